"""What a job would take, without its machines: bytes, memory, times, and the degrees to choose.

Ours and the strategies that it is compared with, all by formula. The package only reads
`matrixtitan.plan`, and imports no torch. Start at `report.py`.
"""
