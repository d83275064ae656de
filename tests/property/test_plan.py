"""What must hold of a plan for any list of parameters and any number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from matrixtitan.plan.cost import block_cost, rank_bytes, unit_shares
from matrixtitan.plan.packing import CLEAR_MARGIN
from matrixtitan.plan.planner import PlanSettings, make_plan
from matrixtitan.plan.shard import ParamSpec, Plan
from matrixtitan.rules import RULES

WORLD_SIZES = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 33, 100])
OPTIMIZERS = st.sampled_from(["muon", "shampoo", "soap", "adamw"])
SIDES = st.sampled_from([1, 2, 8, 24, 64, 100])


@st.composite
def _spec(draw: Any, number: int) -> ParamSpec:
    kind = draw(st.sampled_from(["matrix", "heads", "stack", "vector", "table", "filter", "empty"]))
    unit = f"unit{draw(st.integers(0, 3))}"
    trainable = draw(st.sampled_from([True, True, True, False]))
    rows, cols = draw(SIDES), draw(SIDES)
    role, shape, block = {
        "matrix": ("matrix", (rows, cols), rows),
        "heads": ("matrix", (rows * 4, cols), rows),
        "stack": ("matrix", (draw(st.integers(1, 20)), rows, cols), 1),
        "vector": ("tail", (rows,), 1),
        "table": ("tail", (rows * 10 + 3, cols), 1),
        "filter": ("tail", (rows, 3, 2, 2), 1),
        "empty": (draw(st.sampled_from(["matrix", "tail"])), (0, cols), 1),
    }[kind]
    return ParamSpec(f"{unit}.p{number}", shape, role, unit, block, trainable)


@st.composite
def _models(draw: Any) -> list[ParamSpec]:
    return [draw(_spec(number)) for number in range(draw(st.integers(0, 25)))]


@settings(max_examples=150, deadline=None)
@given(_models(), WORLD_SIZES, OPTIMIZERS)
def test_a_plan_places_every_row_once_and_cuts_no_block(
    specs: list[ParamSpec], world_size: int, optimizer: Any
) -> None:
    plan = make_plan(specs, world_size, PlanSettings(rule=RULES[optimizer]()))
    assert [shard.fqn for shard in plan.shards] == [spec.fqn for spec in specs]
    for spec, shard in zip(specs, plan.shards, strict=True):
        assert (shard.shape, shard.role, shard.unit) == (spec.shape, spec.role, spec.unit)
        assert (shard.block_rows, shard.trainable) == (spec.block_rows, spec.trainable)
        covered = [row for s in shard.segments for row in range(s.start, s.stop)]
        assert covered == list(range(spec.shape[0]))
        assert all(s.start % spec.block_rows == 0 for s in shard.segments)
        ranks = [s.rank for s in shard.segments]
        assert ranks == sorted(set(ranks)) and all(0 <= rank < world_size for rank in ranks)


@settings(max_examples=60, deadline=None)
@given(_models(), WORLD_SIZES, OPTIMIZERS)
def test_a_plan_is_a_function_of_its_input_and_survives_json(
    specs: list[ParamSpec], world_size: int, optimizer: Any
) -> None:
    chosen = PlanSettings(rule=RULES[optimizer]())
    plan = make_plan(specs, world_size, chosen)
    again = make_plan(list(specs), world_size, PlanSettings(rule=RULES[optimizer]()))
    assert plan == again and plan.digest == again.digest
    stored = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert stored == plan and stored.digest == plan.digest


@settings(max_examples=150, deadline=None)
@given(_models(), WORLD_SIZES, OPTIMIZERS)
def test_bytes_are_all_accounted_for_and_near_balance(
    specs: list[ParamSpec], world_size: int, optimizer: Any
) -> None:
    chosen = PlanSettings(rule=RULES[optimizer]())
    held = [part.total for part in rank_bytes(make_plan(specs, world_size, chosen), chosen)]
    costs = {spec.fqn: block_cost(spec, chosen).resident.total for spec in specs}
    whole = {spec.fqn: costs[spec.fqn] * (spec.shape[0] // spec.block_rows) for spec in specs}
    assert sum(held) == sum(whole.values())
    # a greedy packing is within one item of the mean; small tails of a unit are one item together
    uncut = [spec for spec in specs if len(spec.shape) < 3 or spec.role == "tail"]
    tails: Counter[str] = Counter()
    for spec in uncut:
        if spec.role == "tail":
            tails[spec.unit] += whole[spec.fqn]
    stacks = [
        -(-spec.shape[0] // world_size) * costs[spec.fqn] for spec in specs if spec not in uncut
    ]
    largest = max(
        [0, *stacks, *tails.values(), *(whole[s.fqn] for s in uncut if s.role == "matrix")]
    )
    mean = sum(held) / world_size
    assert max(held) <= (mean + largest) * CLEAR_MARGIN + 1


@settings(max_examples=100, deadline=None)
@given(_models(), WORLD_SIZES, st.sampled_from([1.0, 1.1, 1.5, 2.0, 4.0]))
def test_an_egress_cap_is_kept_in_every_unit_or_refused(
    specs: list[ParamSpec], world_size: int, cap: float
) -> None:
    try:
        plan = make_plan(specs, world_size, PlanSettings(egress_cap=cap))
    except ValueError as error:
        # only where there are matrices, which cannot be cut
        if f"egress_cap {cap} cannot be met" in str(error) and any(
            spec.role == "matrix" for spec in specs
        ):
            return
        raise
    for unit, shares in unit_shares(plan, 1).items():
        mine = [shard for shard in plan.shards if shard.unit == unit]
        cut = [s for s in mine if s.role == "tail" and len(s.segments) > 1]
        whole = [s for s in mine if s.role == "tail" and len(s.segments) == 1]
        # a stack may be cut into a piece per rank
        pieces = [-(-s.shape[0] // world_size) * s.row_numel for s in mine if len(s.shape) == 3]
        pieces += [s.numel for s in mine if s.role == "matrix" and len(s.shape) == 2]
        largest = max([*pieces, sum(shard.numel for shard in whole)], default=0)
        row = max([shard.row_numel for shard in cut], default=1)
        assert max(shares) < max(cap * sum(shares) / world_size, largest) + row


@settings(max_examples=60, deadline=None)
@given(st.lists(SIDES, min_size=1, max_size=40), st.integers(1, 12))
def test_poured_rows_level_ranks_to_a_row(sides: list[int], world_size: int) -> None:
    """A table larger than all matrices together levels any matrices, to about one of its rows."""
    specs = [
        ParamSpec(f"m{i}", (side, 64), "matrix", f"u{i % 3}", side) for i, side in enumerate(sides)
    ]
    specs.append(ParamSpec("table", (40 * 100 * world_size, 64), "tail", "table", 1))
    chosen = PlanSettings()
    held = [part.total for part in rank_bytes(make_plan(specs, world_size, chosen), chosen)]
    row = 64 * 16
    sliver = max(held) / 200
    assert max(held) - min(held) <= sliver + 2 * row
