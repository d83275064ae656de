"""MatrixFSDP: ZeRO-3 whose shards are whole matrices. Start at `api.py`.

The package imports torch and `matrixtitan.plan` only, so that it can be lifted out.

| to find | read |
|---|---|
| the public function and its arguments | `api.py` |
| the handle that it returns | `handle.py` |
| when a unit is gathered, freed and reduced | `hooks.py` |
| what a gather and a reduction do; where a gradient is summed onto its owner | `unit.py` |
| the two nn.Parameter objects of a parameter, and its gradient | `param.py` |
| buffers: their layout, who frees them and when | `buffers.py`, `streams.py` |
| the global gradient norm and clipping | `grad_norm.py` |
| the messages of each transport | `transports.py`, `ring.py`, `background.py` |
| state dicts: rows for DCP, full tensors on rank 0 | `state_dict.py`, `row_segment.py` |
| checks of arguments, model and plan; agreement between ranks | `assignment.py`, `agreement.py` |

To add a transport: write a subclass of `Transport` (`transports.py`), and register its name, price
and class in `matrixtitan/plan/transport_registry.py`.
"""

from matrixtitan.fsdp.api import fully_shard
from matrixtitan.fsdp.handle import MatrixFSDP
from matrixtitan.fsdp.mixed_precision import MixedPrecisionPolicy
from matrixtitan.fsdp.unit import InitRows

__all__ = ["InitRows", "MatrixFSDP", "MixedPrecisionPolicy", "fully_shard"]
