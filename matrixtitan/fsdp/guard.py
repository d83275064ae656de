"""Refusal of what would silently compute with a part of a parameter, or make ranks differ.

Owns the tensor classes of sharded parameters and of their gradients. They hold this rank's rows, so
PyTorch would accept them where the full parameter is meant. Optimizers update them as they are.
Next: `param.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from matrixtitan.fsdp.nested import tensors_in

PRODUCTS = frozenset(
    (
        *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addmm_", "addbmm"),
        *("addmv", "baddbmm", "chain_matmul", "multi_dot", "einsum", "tensordot", "linear"),
        *("bilinear", "embedding", "embedding_bag", "conv1d", "conv2d", "conv3d"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "t"),
    )
)
"""Names of functions that use a weight as a layer does."""
ATTRIBUTES: Any = Tensor
"""Tensor by its descriptors, which the stubs declare as values."""
TRANSPOSES = tuple(getattr(ATTRIBUTES, name).__get__ for name in ("T", "mT", "H", "mH"))
"""A transpose is plain local rows, so the product that follows it could not be refused."""
NORMS = frozenset(["vector_norm", "linalg_vector_norm", "_foreach_norm"])
"""What clip_grad_norm_ of torch calls. `grad.norm()` passes: a matrix optimizer may want it."""


class ShardedParameter(nn.Parameter):
    """This rank's rows of a parameter: optimizers update it, and computation with it is refused.

    `.detach()` and `.data` are the plain local rows. Every other result of a function is a plain
    tensor too.
    """

    full_name: str

    def __new__(cls, data: Tensor, full_name: str, requires_grad: bool) -> ShardedParameter:
        param: Any = nn.Parameter.__new__(cls, data, requires_grad)
        param.full_name = full_name
        return param

    # nn.Parameter.__new__ makes the whole object
    def __init__(self, data: Tensor, full_name: str, requires_grad: bool) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func == ATTRIBUTES.data.__set__:
                _check_data(args[0], args[1])
            operands = list(tensors_in((args, kwargs)))
            params = [tensor for tensor in operands if isinstance(tensor, ShardedParameter)]
            name = getattr(func, "__name__", "")
            for param in params:
                if (
                    name in PRODUCTS
                    or func in TRANSPOSES
                    or _meets_other_shapes(name, param, operands)
                ):
                    _refuse_use(param, name)
            result = func(*args, **kwargs)
            if any(tensor.grad_fn is not None for tensor in tensors_in(result)):
                for param in params:
                    if param.requires_grad:
                        _refuse_use(param, name)
            return result

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise RuntimeError(
            f"{self.full_name} is sharded, and a sharded model cannot be copied; copy the model "
            "before fully_shard, or build a second model, shard it, and load a state dict"
        )

    def register_hook(self, hook: Callable[..., Any]) -> NoReturn:
        raise RuntimeError(
            f"{self.full_name}: register_hook on a sharded parameter would never run, since "
            "autograd does not see that tensor; use register_post_accumulate_grad_hook, which runs "
            "after the summed gradient is in .grad"
        )


class ShardedGradient(Tensor):
    """This rank's rows of a gradient: norms and inf checks that each rank would make alone raise.

    Results of functions are plain tensors.
    """

    full_name: str

    def __new__(cls, data: Tensor, full_name: str) -> ShardedGradient:
        grad: Any = Tensor._make_subclass(cls, data)
        grad.full_name = full_name
        return grad

    # Tensor._make_subclass makes the whole object
    def __init__(self, data: Tensor, full_name: str) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", "")
            if name in NORMS or name == "_amp_foreach_non_finite_check_and_unscale_":
                for tensor in tensors_in((args, kwargs)):
                    if isinstance(tensor, ShardedGradient):
                        _refuse_gradient(tensor, name)
            return func(*args, **kwargs)


def refuse_deepcopy(self: object, memo: object) -> NoReturn:
    """The `__deepcopy__` of what a sharded model's hooks lead to.

    Buffers and communication cannot be copied.
    """
    raise RuntimeError(
        f"a sharded model cannot be copied (its {type(self).__name__} was reached); copy the model "
        "before fully_shard, or build a second model, shard it, and load a state dict"
    )


def _meets_other_shapes(name: str, param: Tensor, operands: list[Tensor]) -> bool:
    """Whether a function combines `param` with a tensor of another shape than its rows.

    The functions over lists that optimizers call treat each parameter apart. An attribute's setter
    is no computation.
    """
    if name.startswith(("_foreach_", "_fused_")) or name in ("__set__", "register_hook"):
        return False
    return any(other.numel() > 1 and other.shape != param.shape for other in operands)


def _refuse_use(param: ShardedParameter, function: str) -> NoReturn:
    raise RuntimeError(
        f"{param.full_name} was used by {function} outside its unit's forward, where it holds only "
        f"this rank's rows, of shape {tuple(param.shape)}. Use it inside the forward of a module "
        "of its unit (the argument units says which module gathers it); .detach() gives the local "
        "rows where those are meant"
    )


def _check_data(param: Tensor, data: Tensor) -> None:
    """RuntimeError unless assigning `data` to `param.data` changes nothing."""
    assert isinstance(param, ShardedParameter)
    same = (
        data.dtype == param.dtype
        and data.device == param.device
        and data.shape == param.shape
        and (data.is_meta or data.data_ptr() == param.data_ptr())
    )
    if not same:
        raise RuntimeError(
            f"{param.full_name}: its .data was assigned after fully_shard (by model.to(), "
            "model.bfloat16() or the like), which the gather would not see; convert the model "
            "before fully_shard, choose the compute dtype by MixedPrecisionPolicy, and copy new "
            "values into the parameter in place"
        )


def _refuse_gradient(grad: ShardedGradient, function: str) -> NoReturn:
    if function in NORMS:
        raise RuntimeError(
            f"{function} of the gradient of {grad.full_name} would be the norm of this rank's rows "
            "alone, so ranks would clip differently; call clip_grad_norm_ of the handle that "
            "fully_shard returned, or .detach() for the norm of the local rows"
        )
    raise RuntimeError(
        f"GradScaler would look for infinities in this rank's rows of the gradient of "
        f"{grad.full_name} alone, so ranks would skip different steps; train in bfloat16, which "
        "needs no scaling, by MixedPrecisionPolicy"
    )
