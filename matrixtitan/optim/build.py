"""From a config and the parameters that this rank steps to its optimizers.

Owns the parameter groups (role, pattern, decay), the torch optimizers over them, and their state
keyed by parameter name. A rank that steps nothing gets an empty list, which steps, clips, saves and
loads like any other. Holds no update rule (see `muon.py`, `shampoo.py`, `soap.py`) and never
communicates. Next: `lr_schedule.py`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matrixtitan.config import OptimizerConfig
from matrixtitan.optim.base import MatrixOptimizer, ParamGroup, block_rows_of, named_params
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.rules import AdamWRule, Rule

VECTOR_ELEMENTS = 64
"""No vector of a CPU holds more bfloat16 or float32 elements."""


class StateTensor(NamedTuple):
    """One tensor of optimizer state.

    `per_row`: dim 0 runs over the rows that the parameter has here, so for a row-split parameter
    the tensor is a chunk of the whole state. Otherwise (a step counter, a matrix's factor) every
    holder has all of it.
    """

    fqn: str
    name: str
    tensor: Tensor
    per_row: bool


class Optimizers:
    """The optimizers of one rank, stepped together. The list may be empty."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        for group in self.param_groups:
            group["initial_lr"] = group["lr"]

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Every group of every optimizer.

        A group's "name" is its role, "matrix" or "tail"; "pattern" is the config's, or "".
        """
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Update every parameter that has a gradient, without any communication."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def allocate_state(self) -> None:
        """Allocate all state from shapes, before a checkpoint is loaded in place.

        Existing state is left as it is.
        """
        for optimizer in self.optimizers:
            if isinstance(optimizer, MatrixOptimizer):
                optimizer.allocate_state()
            else:
                _allocate_adamw(optimizer)

    def state_tensors(self) -> list[StateTensor]:
        """The existing state by parameter name: the tensors themselves, not copies."""
        found = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                rule = _rule_of(optimizer, group)
                for fqn, param in named_params(group):
                    specs = rule.state(tuple(param.shape))
                    state = optimizer.state.get(param, {})
                    found += [StateTensor(fqn, n, t, specs[n].per_row) for n, t in state.items()]
        return found


def _rule_of(optimizer: torch.optim.Optimizer, group: ParamGroup) -> Rule:
    return optimizer.rule_of(group) if isinstance(optimizer, MatrixOptimizer) else AdamWRule()


def build_optimizers(params: Sequence[LocalParam], config: OptimizerConfig) -> Optimizers:
    """Optimizers over this rank's parameters: `config.name` for the matrices, AdamW for the tail.

    Parameters with no rows here and frozen ones are left out. The first of `config.groups` whose
    pattern matches a parameter gives it its own lr and decay. Other tail vectors (norms, biases)
    are not decayed. A rank cannot see that a pattern matches nothing in the whole model: call
    `check_patterns` once with the names of all parameters.
    """
    groups: dict[tuple[Any, ...], ParamGroup] = {}
    for param in params:
        if param.trainable and param.tensor.numel():
            options = _group_options(param, config)
            group = groups.setdefault(tuple(options.items()), {**options, "params": []})
            group["params"].append((param.fqn, param.tensor))
    matrix = [group for group in groups.values() if group["name"] == "matrix"]
    tail = [group for group in groups.values() if group["name"] == "tail"]
    optimizers: list[torch.optim.Optimizer] = []
    if matrix:
        optimizers.append(_build_matrix(matrix, config))
    if tail:
        optimizers.append(_build_adamw(tail, config.tail_lr, config.tail_betas, config.tail_eps))
    return Optimizers(optimizers)


def check_patterns(fqns: Iterable[str], config: OptimizerConfig) -> None:
    """ValueError if a pattern of `config.groups` matches none of the model's names `fqns`."""
    names = list(fqns)
    for table in config.groups:
        if not any(fnmatchcase(name, table.pattern) for name in names):
            near = ", ".join(get_close_matches(table.pattern, names, n=3, cutoff=0.0))
            raise ValueError(
                f"optimizer.groups: pattern {table.pattern!r} matches no parameter; the nearest "
                f"names are {near}"
            )


def _group_options(param: LocalParam, config: OptimizerConfig) -> ParamGroup:
    """The options that decide a parameter's group; equal options share one."""
    is_matrix = param.role == "matrix"
    lr = config.lr if is_matrix else config.tail_lr
    weight_decay = config.weight_decay if is_matrix else config.tail_weight_decay
    if not is_matrix and len(param.full_shape) < 2:
        weight_decay = 0.0
    pattern = ""
    for table in config.groups:
        if fnmatchcase(param.fqn, table.pattern):
            pattern = table.pattern
            lr = lr if table.lr is None else table.lr
            weight_decay = weight_decay if table.weight_decay is None else table.weight_decay
            break
    options = {"name": param.role, "pattern": pattern, "lr": lr, "weight_decay": weight_decay}
    if is_matrix and config.name != "adamw":
        options["block_rows"] = block_rows_of(param)
    else:
        options["fused"] = _takes_fused_adamw(param)
    return options


def _build_matrix(groups: list[ParamGroup], config: OptimizerConfig) -> torch.optim.Optimizer:
    if isinstance(config.rule, AdamWRule):
        return _build_adamw(groups, config.lr, config.rule.betas, config.rule.eps)
    cls = pkgutil.resolve_name(config.rule.optimizer)
    optimizer = cls(
        groups, lr=config.lr, weight_decay=config.weight_decay, **config.rule.arguments()
    )
    assert isinstance(optimizer, MatrixOptimizer)
    return optimizer


def _build_adamw(
    groups: list[ParamGroup], lr: float, betas: Sequence[float], eps: float
) -> torch.optim.AdamW:
    """AdamW over groups that each say in "fused" which of torch's implementations they take."""
    for group in groups:
        group["foreach"] = not group["fused"]
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps)


def _takes_fused_adamw(param: LocalParam) -> bool:
    """Whether AdamW's fused kernel gives every row the same bits wherever rows are cut.

    On CPUs the kernel rounds the elements that do not fill a vector in another way, so rows must
    fill its vectors.
    """
    if param.tensor.device.type == "cpu":
        return len(param.full_shape) > 1 and prod(param.full_shape[1:]) % VECTOR_ELEMENTS == 0
    return param.tensor.device.type == "cuda"


def _allocate_adamw(optimizer: torch.optim.Optimizer) -> None:
    """What torch's AdamW would allocate in its first step, under its names."""
    for group in optimizer.param_groups:
        device_step = group["fused"] or group["capturable"]
        for param in group["params"]:
            state = optimizer.state[param]
            if not state:
                device = param.device if device_step else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
