"""What a job would take, without its machines: bytes, memory, times and the degrees to choose, of our strategy
and of those that it is compared with. Above `plan/`, which it only reads. Start at `report.py`."""
