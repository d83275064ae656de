"""matrix_optimizer: one torch optimizer for a rank's matrices and for its tail.

Owns the split by role, the options' checks and the state by parameter name. The updates are those
of the rule's class and of torch's AdamW. Never communicates.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from matrixtitan.optim.base import ParamGroup, block_rows_of, evaluate, named_params
from matrixtitan.options import not_one_of
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.rules import RULES, AdamWRule, Rule

TAIL_OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


class HasLocalParameters(Protocol):
    """What an optimizer needs of the handle of `fully_shard`."""

    def local_parameters(self) -> list[LocalParam]:
        """The parameters of which this rank holds rows."""


def matrix_optimizer(
    handle: HasLocalParameters,
    rule: str = "muon",
    *,
    lr: float,
    weight_decay: float = 0.0,
    tail: Mapping[str, Any] | None = None,
    **options: Any,
) -> torch.optim.Optimizer:
    """One optimizer: `rule` ("muon", "shampoo", "soap", "adamw") for matrices, AdamW for the tail.

    `options` are the rule's own. `tail` holds AdamW's lr, betas, eps and weight_decay; vectors are
    not decayed. Every rank has the same three groups: the matrices, the tail's other parameters and
    its vectors. A rank whose groups are empty steps like any other. ValueError for an unknown rule
    or option.
    """
    if rule not in RULES:
        raise ValueError(not_one_of("rule", rule, RULES))
    known = {f.name for f in dataclasses.fields(RULES[rule])} - {"per_head_patterns"}
    _check_names(f"matrix_optimizer with rule {rule!r}", options, known)
    _check_names("tail", tail or {}, set(TAIL_OPTIONS))
    matrix_rule = RULES[rule](**options)
    matrix_rule.require()
    rates = {"lr": lr, "weight_decay": weight_decay}
    mine = [p for p in handle.local_parameters() if p.trainable and p.tensor.numel()]
    return _MatrixAndTail(mine, matrix_rule, rates, {**TAIL_OPTIONS, **(tail or {})})


def _check_names(where: str, given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(given) - known):
        raise ValueError(
            f"{where} has no option {', '.join(unknown)}; its options are "
            f"{', '.join(sorted(known))}"
        )


class _MatrixAndTail(torch.optim.Optimizer):
    """The rule's optimizer and AdamW behind three groups whose options their steps follow."""

    def __init__(
        self, params: list[LocalParam], rule: Rule, rates: ParamGroup, tail: ParamGroup
    ) -> None:
        self.rule = rule
        matrices = [p for p in params if p.role == "matrix"]
        tail_params = [p for p in params if p.role != "matrix"]
        others = [p for p in tail_params if len(p.full_shape) > 1]
        vectors = [p for p in tail_params if len(p.full_shape) < 2]
        groups = [
            {"name": "matrix", **rates, **_named(matrices)},
            {"name": "tail", **tail, **_named(others)},
            {"name": "tail", **tail, "weight_decay": 0.0, **_named(vectors)},
        ]
        self._built = False
        super().__init__(groups, {})
        self._built = True
        merged: dict[Any, list[LocalParam]] = {}
        for param in matrices:
            options = {} if isinstance(rule, AdamWRule) else _cut_options(param)
            merged.setdefault(tuple(options.items()), []).append(param)
        self._inner: list[tuple[torch.optim.Optimizer, list[tuple[ParamGroup, ParamGroup]]]] = []
        outer = self.param_groups
        if matrices:
            cls = pkgutil.resolve_name(rule.optimizer)
            inner = [{**dict(options), **_named(alike)} for options, alike in merged.items()]
            optimizer = cls(inner, **rates, **rule.arguments())
            self._add(optimizer, [outer[0]] * len(merged))
        if tail_params:
            # the loop would be chosen for sharded parameters, which are a subclass of tensors
            groups = [_named(others), _named(vectors)]
            adamw = torch.optim.AdamW(groups, foreach=True, **tail)
            self._add(adamw, outer[1:])

    def _add(self, optimizer: torch.optim.Optimizer, outer: list[ParamGroup]) -> None:
        optimizer.state = self.state  # one state for all
        self._inner.append((optimizer, list(zip(optimizer.param_groups, outer, strict=True))))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by `torch.amp.GradScaler.step` alone, whose check for infinities is per rank."""
        raise RuntimeError(
            "matrix_optimizer does not work with torch.amp.GradScaler, which would skip a step on "
            "some ranks only: train in bfloat16, which needs no scaler"
        )

    def __repr__(self) -> str:
        counts = {"matrix": [0, 0], "tail": [0, 0]}
        for group in self.param_groups:
            counts[group["name"]][0] += len(group["params"])
            counts[group["name"]][1] += sum(p.numel() for p in group["params"])
        total = max(1, sum(elements for _, elements in counts.values()))
        rules = {"matrix": self.rule.name, "tail": "adamw"}
        lines = [
            f"{rules[name]} ({name}): {count} parameters, {elements} elements, "
            f"{100 * elements / total:.1f} % of this rank's"
            for name, (count, elements) in counts.items()
        ]
        return "matrix_optimizer\n  " + "\n  ".join(lines)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """RuntimeError: the handle decides what is stepped."""
        if self._built:
            raise RuntimeError(
                "add_param_group: matrix_optimizer steps what its handle holds; make a new "
                "optimizer"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Returns the result of `closure`, if given."""
        loss = evaluate(closure)
        for optimizer, pairs in self._inner:
            for inner, outer in pairs:
                inner.update({k: v for k, v in outer.items() if k in inner and k[:5] != "param"})
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state by parameter name, and the groups' options."""
        state = {
            name: dict(self.state[param])
            for group in self.param_groups
            for name, param in named_params(group)
            if self.state.get(param)
        }
        options = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        return {"state": state, "param_groups": options}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave. ValueError names what does not fit; nothing changes."""
        saved, groups = state_dict["state"], state_dict["param_groups"]
        mine = {
            name: (param, self.rule if group["name"] == "matrix" else AdamWRule())
            for group in self.param_groups
            for name, param in named_params(group)
        }
        if unknown := sorted(set(saved) - set(mine)):
            raise ValueError(f"the state is of {', '.join(unknown)}, which this rank does not step")
        if [set(g) - {"initial_lr", "param_names"} for g in groups] != [
            set(g) - {"initial_lr", "param_names", "params"} for g in self.param_groups
        ]:
            raise ValueError("the state's parameter groups are not those of matrix_optimizer")
        for name, tensors in saved.items():
            param, rule = mine[name]
            wanted = {k: tuple(s.shape) for k, s in rule.state(tuple(param.shape)).items()}
            given = {k: tuple(t.shape) for k, t in tensors.items()}
            if given != wanted:
                raise ValueError(f"the state of {name} is {given}; this optimizer needs {wanted}")
        self.state.clear()
        for name, tensors in saved.items():
            param = mine[name][0]
            self.state[param] = {
                k: t.clone() if t.ndim == 0 else t.to(param.device, copy=True)
                for k, t in tensors.items()
            }
        for group, options in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in options.items() if k != "param_names"})


def _named(params: list[LocalParam]) -> ParamGroup:
    """The group's parameters; its names too where it has none, as torch wants of all or of none."""
    return {"params": [p.tensor for p in params], "param_names": [p.fqn for p in params]}


def _cut_options(param: LocalParam) -> ParamGroup:
    """The options by which Muon cuts a parameter into its matrices."""
    return {"block_rows": block_rows_of(param), "form": param.form}
