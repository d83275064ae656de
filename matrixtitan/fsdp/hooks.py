"""When each unit is gathered, freed and reduced: the hooks around its modules, and the order that all ranks share.

Owns the schedule of one sharded model and its state over a forward and a backward. It moves no bytes (`unit.py`).

[Note: when a unit's gradients are reduced]
One autograd function on a module's inputs tells that the backward through that call is over, parameter gradients
included, because autograd runs what was recorded later first. When a unit's last outstanding call is over, its
gradients are reduced, with zeros for parameters that this rank did not use. Calls whose inputs need no gradient (the
embedding), and units called from several places (tied weights), are over when the whole backward is: they reduce in
the engine's final callback, in a fixed order. Counting gradient hooks instead would break tied weights and repeated
forwards.

[Note: a call lives as long as its graph]
Only the autograd graph holds a Call. A forward whose output is dropped without a backward takes its Call with it, so
a forgotten forward cannot hold back a later reduction. Where the output is kept, the reduction comes late, in the final
callback: a backward leaves nothing unreduced behind. A graph that is kept may run backward again: its calls reopen.

[Note: one order on all ranks]
Collectives match by order. Units are gathered on demand in the order of forward, which must be the same on every
rank. The first forward checks that with a small all-gather per unit and records the order in which units first run;
later ones prefetch by it. A rank that departs from it raises before it gathers anything else, since the others wait in
a gather that it will not join; they learn of it when its process ends. The order stays for good: even all ranks alike
cannot change it. Only a unit's first call in a forward is checked. How often and where it is called again may change
between forwards, and must be the same on all ranks.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from matrixtitan.fsdp.unit import Reduction, Unit


class Call:
    """One forward of one of a unit's modules with gradients enabled."""

    __slots__ = ("__weakref__", "begun", "needs_weights", "over", "state")

    def __init__(self, state: UnitState, module: nn.Module) -> None:
        self.state = state
        self.needs_weights = (
            type(module) is not nn.Embedding
        )  # a lookup's backward only needs the indices
        self.begun = False  # its backward has begun
        self.over = False


class UnitState:
    """A unit and what the schedule remembers of it between hooks."""

    def __init__(self, unit: Unit, index: int, keep: bool) -> None:
        self.unit = unit
        self.index = index
        self.keep = keep  # stays gathered between forward and backward
        self.running: list[Call | None] = []  # forwards now executing, innermost last
        self.calls: weakref.WeakSet[Call] = weakref.WeakSet()  # forwards whose backward is not over
        self.modules_run: set[nn.Module] = set()
        self.keeps_gradients = False  # accumulated without being reduced

    @property
    def in_backward(self) -> bool:
        return any(call.begun for call in self.calls)

    @property
    def weights_wanted(self) -> bool:
        """A backward to come computes with the weights."""
        return any(call.needs_weights for call in self.calls)


class Schedule:
    """The hooks of one sharded model. `states[0]` is the root unit, that of the model itself.

    At most `max_reductions` units' gradients are in reduction. `check_order` raises on every rank unless all ranks
    gather the unit of the same index now.
    """

    def __init__(
        self,
        root: nn.Module,
        states: list[UnitState],
        *,
        prefetch: int,
        max_reductions: int,
        check_order: Callable[[int], None],
        param_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
    ) -> None:
        self.root = root
        self.states = states
        self.prefetch = prefetch
        self.max_reductions = max_reductions
        self.reduce_gradients = True
        self._check_order = check_order
        self._param_dtype = param_dtype
        self._output_dtype = output_dtype
        self._recorded: list[UnitState] = []  # the order of the forward now running
        self._order: list[UnitState] | None = None  # the order of the first whole forward
        self._in_root_forward = False
        self._in_backward = False
        self._begun: list[Call] = []  # calls whose backward began in the backward now running
        self._reductions: list[Reduction] = []
        self._handles: list[Any] = []
        self._install()

    def _install(self) -> None:
        self._handles.append(
            self.root.register_forward_pre_hook(self._root_pre_forward, with_kwargs=True)
        )
        for state in self.states:
            for module in state.unit.modules:
                self._handles += [
                    module.register_forward_pre_hook(
                        partial(self._pre_forward, state), with_kwargs=True
                    ),
                    module.register_forward_hook(
                        partial(self._post_forward, state), always_call=True
                    ),
                    module.register_state_dict_pre_hook(self._before_state_dict),
                    module.register_load_state_dict_pre_hook(self._before_state_dict),
                ]
        self._handles.append(self.root.register_forward_hook(self._root_post_forward))

    def _before_state_dict(self, *_: Any) -> None:
        self.reshard()

    def reshard(self) -> None:
        """Free every gathered unit: parameters() yields the sharded ones again, and no stale copy can train on."""
        for state in self.states:
            state.unit.reshard()
            state.modules_run.clear()

    # --- forward ---------------------------------------------------------------------------------------------------

    def _root_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._in_backward:
            if _backward_is_running():
                return  # a recomputation, with the whole model inside a checkpoint
            self._abandon_backward()
        for state in self.states:
            state.unit.check_materialized()
            state.running.clear()
        self.reshard()  # whatever an earlier forward left gathered may be stale by now
        self._recorded = []
        self._in_root_forward = True

    def _pre_forward(
        self, state: UnitState, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        unit = state.unit
        if (
            state.in_backward
        ):  # recomputed by a checkpoint outside the unit: weights are needed, hooks are in place
            unit.finish_unshard()
            return None
        if self._in_backward and torch.is_grad_enabled():
            raise RuntimeError(
                f"{unit.name}: forward runs inside backward, before the backward of its first forward began; "
                "reentrant checkpointing is not supported: use torch.utils.checkpoint with use_reentrant=False"
            )
        if (
            unit.state == "sharded"
            and self._in_root_forward
            and self._order is None
            and unit.params
        ):
            unit.check_materialized()
            self._check_order(state.index)
        if self._in_root_forward and unit.params and state not in self._recorded:
            self._check_recorded_order(state)
            self._recorded.append(state)
        self._gather(state, self._order, step=1)
        if self._param_dtype is not None:
            args, kwargs = _map_tensors(
                (args, kwargs), partial(_cast_floating, dtype=self._param_dtype)
            )
        call = None
        if torch.is_grad_enabled():
            call = Call(state, module)
            state.calls.add(call)
            args, kwargs = _watch_inputs(self, call, args, kwargs)
        state.running.append(call)
        return args, kwargs

    def _check_recorded_order(self, state: UnitState) -> None:
        """RuntimeError unless `state` is the unit that the first forward ran at this point."""
        if self._order is None:
            return
        position = len(self._recorded)
        expected = self._order[position].unit.name if position < len(self._order) else "none"
        if state.unit.name != expected:
            raise RuntimeError(
                f"this forward runs other units than the first one did, or in another order: after {position} units "
                f"comes {state.unit.name}, expected is {expected}. Every forward on every rank must run the same units "
                "in the order of the first, since all ranks gather them together; branch inside a unit instead"
            )

    def _gather(self, state: UnitState, order: list[UnitState] | None, step: int) -> None:
        """Gather one unit and begin with the next ones in `order`, its own first."""
        state.unit.start_unshard()
        if order is not None and state in order:
            position = order.index(state)
            ahead = order[position + 1 :] if step > 0 else order[:position][::-1]
            if step < 0:
                ahead = [other for other in ahead if other.weights_wanted]
            for other in ahead[: self.prefetch]:
                other.unit.start_unshard()
        state.unit.finish_unshard()

    def _post_forward(self, state: UnitState, module: nn.Module, args: Any, output: Any) -> None:
        if module is self.root:
            self._in_root_forward = False  # here, since this hook also runs where forward raised
        if not state.running:
            return  # recomputed inside backward, or stopped by an error before it began
        call = state.running.pop()
        needs_grad = False
        if call is not None:
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._pre_backward, call))
                    needs_grad = True
        state.modules_run.add(module)
        if len(state.modules_run) < len(state.unit.modules) and self._in_root_forward:
            return  # tied: its other module is still to come
        state.modules_run.clear()
        if not (state.keep and needs_grad):
            state.unit.reshard()

    def _root_post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._in_backward:
            return None
        if self._order is None:
            self._order = self._recorded
        elif len(self._recorded) < len(self._order):
            missing = [state.unit.name for state in self._order[len(self._recorded) :]]
            raise RuntimeError(
                f"this forward ended without units that the first one ran: {missing}. Every forward on every rank must "
                "run the same units, since all ranks gather them together; branch inside a unit instead"
            )
        for state in self.states:
            if state.modules_run:  # tied, but only one of its modules ran
                state.modules_run.clear()
                state.unit.reshard()
        if self._output_dtype is not None:
            return _map_tensors(output, partial(_cast_floating, dtype=self._output_dtype))
        return None

    # --- backward --------------------------------------------------------------------------------------------------

    def _pre_backward(self, call: Call, grad: Tensor) -> None:
        state = call.state
        if not self._in_backward:
            self._in_backward = True
            _at_end_of_backward(self._end_backward)
        if call.over or not call.begun:
            call.begun, call.over = True, False
            state.calls.add(call)  # again, where its graph is kept
            self._begun.append(call)
        if call.needs_weights:
            self._gather(state, self._order, step=-1)

    def _post_backward(self, call: Call) -> None:
        """All gradients of one call are there."""
        if call.over:
            return
        call.over = True
        state = call.state
        state.calls.discard(call)
        if len(state.unit.modules) == 1 or not state.weights_wanted:
            state.unit.reshard()  # else its next module's backward follows at once
        if not state.calls:
            self._reduce(state)

    def _reduce(self, state: UnitState) -> None:
        if not state.unit.trainable:
            return
        state.keeps_gradients = not self.reduce_gradients
        if state.keeps_gradients:
            state.unit.keep_gradients()
            return
        most = self.max_reductions
        if len(self._reductions) > most and self._reductions[-most - 1].accumulates:
            self._reductions.pop(-most - 1).finish()  # or this rank's gradients would be here twice
        if len(self._reductions) >= most:
            self._reductions[-most].wait_for_owners()  # bounds the full gradients alive
        self._reductions.append(state.unit.start_reduce())

    def _end_backward(self) -> None:
        try:
            late = {call.state for call in self._begun if not call.over}
            self._close_calls()
            late |= {call.state for call in self._begun if call.state.calls}
            if self.reduce_gradients:  # of earlier backwards, where this one did not come by
                late |= {state for state in self.states if state.keeps_gradients}
            for state in sorted(late, key=lambda s: s.index, reverse=True):
                state.unit.reshard()
                self._reduce(state)
            for reduction in self._reductions:
                reduction.wait_for_owners()
            for reduction in self._reductions:
                reduction.finish()
            self.reshard()
        finally:
            self._forget_backward()

    def _close_calls(self) -> None:
        for call in self._begun:
            call.over = True
            call.state.calls.discard(call)

    def _abandon_backward(self) -> None:
        """The last backward raised, on every rank: drop its gradients, and unreduced ones of those before.

        What it has added to gradients of earlier backwards stays, as in plain PyTorch.
        """
        self._close_calls()
        for reduction in self._reductions:
            reduction.drop()
        for state in self.states:
            state.unit.drop_gradients()
            state.keeps_gradients = False
        self._forget_backward()

    def _forget_backward(self) -> None:
        self._reductions = []
        self._begun = []
        self._in_backward = False


class _PostBackward(torch.autograd.Function):
    """Identity on a module's inputs; its backward runs when the module's own is over."""

    @staticmethod
    def forward(ctx: Any, schedule: Schedule, call: Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.schedule = schedule
        ctx.call = call
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.schedule._post_backward(ctx.call)
        return None, None, *grads


def _at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward now running is over.

    Private in PyTorch up to 2.15; DDP and FSDP2 use it too, and no public hook runs at that point. Only used here.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _backward_is_running() -> bool:
    """In this thread. Private in PyTorch up to 2.15, which uses it for checkpointing. Only used here."""
    return torch._C._current_graph_task_id() != -1


def _watch_inputs(schedule: Schedule, call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Pass every input that needs a gradient through one _PostBackward."""
    inputs = [tensor for tensor in _tensors((args, kwargs)) if tensor.requires_grad]
    if not inputs:
        return args, kwargs
    watched: Iterator[Tensor] = iter(_PostBackward.apply(schedule, call, *inputs))
    return _map_tensors(
        (args, kwargs), lambda tensor: next(watched) if tensor.requires_grad else tensor
    )


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists, dicts and dataclasses, in a fixed order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from _tensors(getattr(tree, field.name))


def _map_tensors(tree: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with `fn` applied to each tensor, in the order of `_tensors`."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, dict):
        mapped = {key: _map_tensors(value, fn) for key, value in tree.items()}
        return mapped if type(tree) is dict else type(tree)(**mapped)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map_tensors(value, fn) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_tensors(value, fn) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changes = {
            f.name: _map_tensors(getattr(tree, f.name), fn)
            for f in dataclasses.fields(tree)
            if f.init
        }
        return dataclasses.replace(tree, **changes)
    return tree


def _cast_floating(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
