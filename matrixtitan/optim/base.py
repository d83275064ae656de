"""The step loop that Muon, Shampoo and SOAP share.

Owns the checks of parameters, state allocation and the cut into blocks of rows. An option's check
and the state's shapes are the rule's (`rules/`), the update is the subclass's (`muon.py`,
`shampoo.py`, `soap.py`). Never communicates: a parameter is a plain tensor that is here whole, or
has no rows here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import chain
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor

from matrixtitan.options import Range
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.plan.matrix_form import MatrixForm
from matrixtitan.rules.base import Rule, StateSpec

ParamGroup = dict[str, Any]


class MatrixOptimizer(torch.optim.Optimizer, ABC):
    """Base of the matrix optimizers: parameters are matrices (R, C) or stacks of them (E, R, C).

    Every slice of a stack is a matrix of its own. Where `cuts_blocks`, a group's `block_rows` cuts
    each of its matrices into blocks of so many rows (attention heads), which are matrices of their
    own too, and a group's `form` says which matrices lie in each of its parameters. Another class
    steps a fused or transposed parameter as the one matrix that is stored, and refuses one of four
    or more dimensions. Tensors with zero rows (another rank owns the parameter) are passed over.
    """

    cuts_blocks: ClassVar[bool] = False

    def __init__(self, params: Iterable[Any], defaults: ParamGroup) -> None:
        super().__init__(params, {"block_rows": None, **defaults})

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group. ValueError for an option or a parameter that cannot be."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "weight_decay"):
            if not Range(low=0).holds(group[name]):
                raise ValueError(f"{name} is {group[name]}; it must be {Range(low=0)}")
        self.rule_of(group).require()
        block_rows = group["block_rows"]
        if block_rows is not None:
            check_count("block_rows", block_rows)
            if not self.cuts_blocks:
                raise ValueError(
                    f"block_rows is {block_rows}, but {type(self).__name__} does not cut matrices "
                    "into blocks of rows: leave it out"
                )
        for name, param in named_params(group):
            if param.ndim not in (2, 3) and not (self.cuts_blocks and param.ndim > 3):
                raise ValueError(
                    f"{name} has shape {tuple(param.shape)}; {type(self).__name__} takes matrices "
                    "(R, C) and stacks of them (E, R, C): give it to AdamW"
                )
            if param.is_complex():
                raise ValueError(f"{name} is complex; {type(self).__name__} takes real matrices")
            if self.cuts_blocks and param.numel():
                check_form(name, param, block_rows, form_of(group))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Returns the result of `closure`, if given."""
        loss = evaluate(closure)
        for group in self.param_groups:
            ready = []
            for name, param in named_params(group):
                if param.grad is None or param.numel() == 0:
                    continue
                if param.grad.is_sparse:
                    raise RuntimeError(
                        f"{name} has a sparse gradient; {type(self).__name__} needs dense ones"
                    )
                self.allocate(param, group)
                ready.append(param)
            if ready:
                self.update(ready, group)
        return loss

    def allocate_state(self) -> None:
        """Allocate all state from shapes, before a checkpoint is loaded in place.

        Existing state is left as it is.
        """
        for group in self.param_groups:
            for param in group["params"]:
                if param.numel():
                    self.allocate(param, group)

    def allocate(self, param: Tensor, group: ParamGroup) -> None:
        """Allocate one parameter's state unless it exists."""
        if not self.state[param]:
            self.state[param].update(self.initial_state(param, group))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as the base class does, but keep float32 state beside bfloat16 parameters.

        ValueError where the state is another optimizer's or its shapes differ. Nothing has changed
        then.
        """
        for group in state_dict["param_groups"]:
            if missing := [name for name in self.defaults if name not in group]:
                raise ValueError(
                    f"the state is not {type(self).__name__}'s: its parameter groups lack "
                    f"{', '.join(missing)}"
                )
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False):
            for index, (name, param) in zip(saved["params"], named_params(group), strict=False):
                if index in state_dict["state"]:
                    self._check_state(name, param, saved, state_dict["state"][index])
        super().load_state_dict(state_dict)  # refuses groups of other lengths
        indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, param in zip(indices, params, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if value.is_floating_point():
                    self.state[param][name] = value.to(param.device)

    def _check_state(
        self, name: str, param: Tensor, group: ParamGroup, state: dict[str, Tensor]
    ) -> None:
        """ValueError unless `state` has the names and shapes that `param` needs in `group`."""
        needed = self.initial_state(param.detach().to("meta"), group)
        theirs, ours = ({(k, *t.shape) for k, t in tensors.items()} for tensors in (state, needed))
        if theirs != ours:
            raise ValueError(
                f"the state of {name} holds {sorted(theirs - ours)}, where a parameter of shape "
                f"{tuple(param.shape)} needs {sorted(ours - theirs)} (name and shape): load it "
                "into the model that it was saved from"
            )

    @abstractmethod
    def rule_of(self, group: ParamGroup) -> Rule:
        """The rule with the group's options, which checks them and says what the state is."""

    def initial_state(self, param: Tensor, group: ParamGroup) -> dict[str, Tensor]:
        """The state of a parameter that has taken no step."""
        specs = self.rule_of(group).state(tuple(param.shape))
        return {name: _new_state(spec, param) for name, spec in specs.items()}

    @abstractmethod
    def update(self, params: list[Tensor], group: ParamGroup) -> None:
        """One step for at least one parameter of a group; all of them have gradients and state."""


def _new_state(spec: StateSpec, param: Tensor) -> Tensor:
    if not spec.shape:
        # a counter is on the CPU: reading it must not wait for a GPU
        return torch.zeros((), dtype=getattr(torch, spec.dtype))
    dtype = param.dtype if spec.dtype == "param" else getattr(torch, spec.dtype)
    if spec.fill == "zeros":
        same = spec.shape == tuple(param.shape)
        return (
            torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            if same
            else torch.zeros(spec.shape, dtype=dtype, device=param.device)
        )
    eye = torch.eye(spec.shape[-1], dtype=dtype, device=param.device)
    return eye.expand(spec.shape).clone(memory_format=torch.contiguous_format)


def evaluate(closure: Callable[[], float] | None) -> float | None:
    """What the closure of a step returns, with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def named_params(group: ParamGroup) -> list[tuple[str, Tensor]]:
    """A group's (name, parameter) pairs; "parameter i" where it was given without names."""
    params = group["params"]
    names = group.get("param_names") or [f"parameter {i}" for i in range(len(params))]
    return list(zip(names, params, strict=True))


def as_matrices(tensor: Tensor, block_rows: int | None) -> Tensor:
    """A view whose last two dims are a matrix: `tensor` itself, or its blocks (B, rows, C)."""
    if tensor.ndim == 2 and block_rows is not None and block_rows != tensor.size(0):
        return tensor.unflatten(0, (-1, block_rows))
    return tensor


def block_rows_of(param: LocalParam) -> int | None:
    """Rows of each matrix in a 2D parameter; None for a single matrix or a stack of them.

    RuntimeError where only a part of a single matrix is here.
    """
    if len(param.full_shape) != 2 or param.block_rows == param.full_shape[0]:
        if len(param.full_shape) == 2 and param.tensor.size(0) != param.full_shape[0]:
            raise RuntimeError(
                f"{param.fqn}: {param.tensor.size(0)} of {param.full_shape[0]} rows are here; its "
                "matrix must be whole"
            )
        return None
    return param.block_rows


def form_of(group: ParamGroup) -> MatrixForm:
    """The group's `form`; by default each parameter is one matrix or a stack of them."""
    form: MatrixForm = group.get("form", MatrixForm())
    return form


def cut_matrices(tensor: Tensor, block_rows: int | None, form: MatrixForm) -> list[Tensor]:
    """The matrices (out, in), stacks (E, out, in) or blocks (B, rows, in) that lie in a parameter.

    `join_matrices` is the inverse.
    """
    stored = tensor.flatten(1) if tensor.ndim > 3 else tensor
    whole = stored.mT if form.transposed else stored
    parts = whole.split(form.rows, dim=-2) if form.rows else (whole,)
    return [as_matrices(part.contiguous(), block_rows) for part in parts]


def join_matrices(parts: list[Tensor], shape: torch.Size, form: MatrixForm) -> Tensor:
    """The parts of `cut_matrices` as one tensor of the stored `shape`."""
    if len(shape) != 3:
        parts = [part.flatten(0, -2) for part in parts]
    whole = torch.cat(parts, dim=-2)
    return (whole.mT if form.transposed else whole).reshape(shape)


def check_form(name: str, param: Tensor, block_rows: int | None, form: MatrixForm) -> None:
    """ValueError unless the matrices of `form` make up `param`."""
    stored = tuple(param.flatten(1).shape) if param.ndim > 3 else tuple(param.shape)
    out_features = stored[-1] if form.transposed else stored[-2]
    if form.rows and (sum(form.rows) != out_features or min(form.rows) < 1):
        raise ValueError(
            f"{name}: the form's rows {form.rows} must be positive and add up to the "
            f"{out_features} out features of its shape {tuple(param.shape)}"
        )
    for rows in form.rows or (out_features,):
        if block_rows and len(stored) == 2 and rows % block_rows:
            raise ValueError(f"{name}: block_rows {block_rows} does not divide its {rows} rows")


def check_count(name: str, value: object) -> None:
    """ValueError unless `value` is a positive whole number."""
    if not isinstance(value, Integral) or int(value) < 1:
        raise ValueError(f"{name} is {value}; it must be a whole number, at least 1")
