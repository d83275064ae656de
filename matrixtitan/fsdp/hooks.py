"""When each unit is gathered, freed and reduced: hooks around its modules, and the units' order.

Owns the schedule of one sharded model, and its state over a forward and a backward. It moves no
bytes and frees no buffer itself. Next: `unit.py`, which does both; [Note: who frees what, and when]
there belongs to this file too.

[Note: when a unit's gradients are reduced]
One autograd function on a module's inputs tells when the backward through that call is over. The
parameters' gradients are there then, because autograd runs first what was recorded last. When a
unit's last outstanding call is over, its gradients are reduced, with zeros for parameters that this
rank did not use. Two kinds of calls are over only when the whole backward is: calls whose inputs
need no gradient (the embedding), and those of units called from several places (tied weights).
Their units are reduced in the engine's final callback, in a fixed order. Counting gradient hooks
instead would break tied weights and repeated forwards.

[Note: a call lives as long as its graph]
Only the autograd graph holds a Call. A forward whose output is dropped without a backward takes its
Call with it, so a forgotten forward cannot delay a later reduction. If the output is kept, the
unit's gradients are reduced in the final callback, so no backward leaves gradients unreduced. If
the graph is retained, backward may run again, and reopens the graph's calls.

[Note: one order on all ranks]
Collectives match by order. Units are gathered on demand in the order of forward, which must be the
same on every rank. The first forward checks that with a small all-gather per unit, and records the
order in which units first run. Later forwards prefetch by that order. A rank that departs from it
raises before it gathers anything else. The other ranks wait in a gather that this rank will not
join, and learn of it when its process ends. The order is final: not even all ranks together can
change it. Only a unit's first call in a forward is checked. How often and where it is called again
may change between forwards, and must be the same on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from matrixtitan.fsdp.guard import refuse_deepcopy
from matrixtitan.fsdp.mixed_precision import MixedPrecisionPolicy, cast_floating
from matrixtitan.fsdp.nested import map_tensors, tensors_in
from matrixtitan.fsdp.unit import Reduction, Unit


class Call:
    """One forward of one of a unit's modules with gradients enabled."""

    __slots__ = ("__weakref__", "begun", "needs_weights", "over", "state")

    def __init__(self, state: UnitState, module: nn.Module) -> None:
        self.state = state
        # the backward of an embedding needs the indices alone
        self.needs_weights = type(module) is not nn.Embedding
        self.begun = False
        """Its backward has begun."""
        self.over = False
        """Its backward is over."""

    __deepcopy__ = refuse_deepcopy


class UnitState:
    """A unit and what the schedule remembers of it between hooks."""

    def __init__(self, unit: Unit, index: int, keep: bool) -> None:
        self.unit = unit
        self.index = index
        self.keep = keep
        """It stays gathered between forward and backward."""
        self.running: list[Call | None] = []
        """Forwards that execute now, innermost last."""
        self.calls: weakref.WeakSet[Call] = weakref.WeakSet()
        """Forwards whose backward is not over."""
        self.modules_run: set[nn.Module] = set()
        self.keeps_gradients = False
        """It has gradients that were accumulated without being reduced."""

    __deepcopy__ = refuse_deepcopy

    @property
    def in_backward(self) -> bool:
        return any(call.begun for call in self.calls)

    @property
    def weights_wanted(self) -> bool:
        """Whether a backward to come computes with the weights."""
        return any(call.needs_weights for call in self.calls)


class Schedule:
    """The hooks of one sharded model. `states[0]` is the root unit, that of the model itself.

    The full gradients of at most `max_reductions` units are in reduction at once. `prefetch` units
    are gathered ahead. `check_order` raises on every rank unless all ranks now gather the unit of
    the same index: see [Note: one order on all ranks].
    """

    def __init__(
        self,
        root: nn.Module,
        states: list[UnitState],
        *,
        prefetch: int,
        max_reductions: int,
        check_order: Callable[[int], None],
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        self.root = root
        self.states = states
        self.prefetch = prefetch
        self.max_reductions = max_reductions
        self.reduce_gradients = True
        self.whole: Literal["no", "read", "write"] = "no"
        """Whether all units stay gathered and the hooks are transparent. "write": what is written
        into the weights then is kept."""
        self._check_order = check_order
        self._mp_policy = mp_policy
        self._recorded: list[UnitState] = []
        """The order of the forward that runs now."""
        self._order: list[UnitState] | None = None
        """The order of the first whole forward."""
        self._in_root_forward = False
        self._in_backward = False
        self._begun: list[Call] = []
        """Calls whose backward began in the backward that runs now."""
        self._reductions: list[Reduction] = []
        self._handles: list[Any] = []
        self._names = [name for name, _ in root.named_parameters()]
        self._install()

    __deepcopy__ = refuse_deepcopy

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
                    module.register_load_state_dict_pre_hook(self._before_load_state_dict),
                ]
        self._handles.append(self.root.register_forward_hook(self._root_post_forward))

    def _before_state_dict(self, *_: Any) -> None:
        if self.whole == "no":
            self.reshard()

    def _before_load_state_dict(self, *_: Any) -> None:
        if self.whole == "read":
            raise RuntimeError(
                "load_state_dict inside full_parameters() would lose what it loads; use "
                "full_parameters(writeback=True), or load outside"
            )
        self._before_state_dict()

    def reshard(self) -> None:
        """Free the weights of every gathered unit.

        Afterwards `parameters()` yields the sharded parameters, and the next forward gathers what
        was changed in them.
        """
        for state in self.states:
            state.unit.reshard()
            state.modules_run.clear()

    # --- forward -------------------------------------------------------------------------------

    def gather_whole(self, writeback: bool) -> None:
        """Gather every unit, and keep all gathered until `free_whole`."""
        if self.whole != "no":
            raise RuntimeError("full_parameters() is entered twice; leave it before entering again")
        if self._in_backward or self._in_root_forward:
            raise RuntimeError(
                "full_parameters() is entered inside a forward or a backward, or after one that "
                "raised; enter it between steps"
            )
        # an optimizer may have stepped since a forward left a unit gathered
        self.reshard()
        for state in self.states:
            state.unit.finish_unshard()
        self.whole = "write" if writeback else "read"

    def free_whole(self) -> None:
        """Free what `gather_whole` gathered."""
        self.whole = "no"
        self.reshard()

    def _pass_through(self) -> bool:
        """Whether the weights are whole; RuntimeError where a backward would follow."""
        if self.whole == "no":
            return False
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a forward inside full_parameters() cannot be followed by a backward; run it under "
                "torch.no_grad()"
            )
        return True

    def _root_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._pass_through():
            return
        if self._in_backward:
            if _backward_is_running():
                # a recomputation: the whole model is inside a checkpoint
                return
            self._abandon_backward()
        self._check_parameters()
        for state in self.states:
            state.unit.check_materialized()
            state.running.clear()
        # an optimizer may have stepped since an earlier forward left its last unit gathered
        self.reshard()
        self._recorded = []
        self._in_root_forward = True

    def _check_parameters(self) -> None:
        """RuntimeError for a parameter that was added to the model after fully_shard.

        None of its gradients is reduced, so its values would drift between ranks. Only a number is
        compared, since each forward pays for this. `ShardedParam.use_unsharded` sees a replaced
        parameter, and the order of units a removed module.
        """
        if sum(1 for _ in self.root.parameters()) <= len(self._names):
            return
        names = (name for name, _ in self.root.named_parameters())
        raise RuntimeError(
            f"{', '.join(name for name in names if name not in self._names)} came into the model "
            "after fully_shard, which would neither shard nor reduce it; add it before"
        )

    def _pre_forward(
        self, state: UnitState, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        if self._pass_through():
            return cast_floating((args, kwargs), self._mp_policy.param_dtype)
        unit = state.unit
        if state.in_backward:
            # Activation checkpointing around the unit recomputes its forward, which needs the
            # weights. No new Call is made: the one from the first forward is still open.
            unit.finish_unshard()
            return None
        if self._in_backward and torch.is_grad_enabled():
            raise RuntimeError(
                f"{unit.name}: forward runs inside backward, before the backward of its first "
                "forward began; reentrant checkpointing is not supported: use "
                "torch.utils.checkpoint with use_reentrant=False"
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
        args, kwargs = cast_floating((args, kwargs), self._mp_policy.param_dtype)
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
                "this forward runs other units than the first one did, or in another order: after "
                f"{position} units comes {state.unit.name}, expected is {expected}. Every forward "
                "on every rank must run the same units in the order of the first, since all "
                "ranks gather them together; branch inside a unit instead"
            )

    def _gather(self, state: UnitState, order: list[UnitState] | None, step: int) -> None:
        """Gather one unit and wait for it; before the wait, begin to gather the next ones.

        `step` 1, in forward: the next ones follow it in `order`. -1, in backward: they precede it,
        and units whose weights no backward wants are left out.
        """
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
        if self.whole != "no":
            return
        if module is self.root:
            # not in _root_post_forward: this hook runs also where forward raised
            self._in_root_forward = False
        if not state.running:
            # recomputed inside backward, or stopped by an error before it began
            return
        call = state.running.pop()
        needs_grad = False
        if call is not None:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._pre_backward, call))
                    needs_grad = True
        state.modules_run.add(module)
        if len(state.modules_run) < len(state.unit.modules) and self._in_root_forward:
            # tied: its other module is still to come
            return
        state.modules_run.clear()
        if not (state.keep and needs_grad):
            state.unit.reshard()

    def _root_post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.whole != "no":
            return cast_floating(output, self._mp_policy.output_dtype)
        if self._in_backward:
            return None
        if self._order is None:
            self._order = self._recorded
        elif len(self._recorded) < len(self._order):
            missing = [state.unit.name for state in self._order[len(self._recorded) :]]
            raise RuntimeError(
                f"this forward ended without units that the first one ran: {missing}. Every "
                "forward on every rank must run the same units, since all ranks gather them "
                "together; branch inside a unit instead"
            )
        for state in self.states:
            if state.modules_run:
                # tied, and only one of its modules ran
                state.modules_run.clear()
                state.unit.reshard()
        return cast_floating(output, self._mp_policy.output_dtype)

    # --- backward ------------------------------------------------------------------------------

    def _pre_backward(self, call: Call, grad: Tensor) -> None:
        state = call.state
        if not self._in_backward:
            self._in_backward = True
            _at_end_of_backward(self._end_backward)
        if call.over or not call.begun:
            call.begun, call.over = True, False
            # where its graph was kept, the call opens again
            state.calls.add(call)
            self._begun.append(call)
        if call.needs_weights:
            self._gather(state, self._order, step=-1)

    def _post_backward(self, call: Call) -> None:
        """All gradients of one call are there: see [Note: when a unit's gradients are reduced]."""
        if call.over:
            return
        call.over = True
        state = call.state
        state.calls.discard(call)
        if len(state.unit.modules) == 1 or not state.weights_wanted:
            # a tied unit whose other module still needs the weights in this backward keeps them
            state.unit.reshard()
        if not state.calls:
            self._reduce(state)

    def _reduce(self, state: UnitState) -> None:
        """Begin to sum a unit's gradients onto their owners, or keep them if reduction is off."""
        if not state.unit.trainable:
            return
        state.keeps_gradients = not self.reduce_gradients
        if state.keeps_gradients:
            state.unit.keep_gradients()
            return
        most = self.max_reductions
        if len(self._reductions) > most and self._reductions[-most - 1].accumulates:
            # adding its sums to `.grad` now frees them; otherwise they live until backward ends
            self._reductions.pop(-most - 1).finish()
        if len(self._reductions) >= most:
            # the next reduction begins below; with it at most `most` hold full gradients
            self._reductions[-most].wait_for_owners()
        self._reductions.append(state.unit.start_reduce())

    def _end_backward(self) -> None:
        """Reduce what is left, in a fixed order; add all sums to `.grad`; free all weights."""
        try:
            late = {call.state for call in self._begun if not call.over}
            self._close_calls()
            late |= {call.state for call in self._begun if call.state.calls}
            if self.reduce_gradients:
                # units with gradients of earlier backwards that this one did not reach
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
        """Close every call whose backward began in the backward that ends."""
        for call in self._begun:
            call.over = True
            call.state.calls.discard(call)

    def _abandon_backward(self) -> None:
        """Drop the gradients of a backward that raised, on every rank, and all unreduced ones.

        Sums that were added to `.grad` before it raised stay there, as in plain PyTorch.
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
    """Identity on a module's inputs, whose backward runs when the module's own is over."""

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
    """Run `callback` when the backward that runs now is over.

    `queue_callback` is private in PyTorch up to 2.15. DDP and FSDP2 use it too, and no public hook
    runs at that point. It is used only here.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _backward_is_running() -> bool:
    """Whether a backward runs in this thread.

    `_current_graph_task_id` is private in PyTorch up to 2.15, which uses it for checkpointing. It
    is used only here.
    """
    return torch._C._current_graph_task_id() != -1


def _watch_inputs(schedule: Schedule, call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Pass every input that needs a gradient through one _PostBackward."""
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if not inputs:
        return args, kwargs
    watched: Iterator[Tensor] = iter(_PostBackward.apply(schedule, call, *inputs))
    return map_tensors(
        (args, kwargs), lambda tensor: next(watched) if tensor.requires_grad else tensor
    )
