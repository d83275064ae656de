"""Bytes, FLOPs, strategy bytes and transport times against figures worked out by hand."""

from __future__ import annotations

from math import prod

import pytest

from matrixtitan.plan.cost import (
    CostSettings,
    block_cost,
    max_over_mean,
    newton_schulz_flops,
    rank_bytes,
    rank_flops,
    unit_shares,
)
from matrixtitan.plan.planner import make_plan
from matrixtitan.plan.shard import MatrixShard, ParamSpec, Plan, Segment
from matrixtitan.plan.transport_registry import (
    Direction,
    choose_transport,
    transport_bytes,
    transport_messages,
    transport_seconds,
)
from matrixtitan.predict.strategies import STRATEGY_VARIANTS, UnitSize, strategy_bytes, unit_sizes
from matrixtitan.rules import RULES, MuonRule, ShampooRule, SOAPRule
from tests.lib.shapes import LLAMA_8B, llama_specs

MIB = 1 << 20


def _spec(
    shape: tuple[int, ...], block: int, role: str = "matrix", trainable: bool = True
) -> ParamSpec:
    return ParamSpec("p", shape, role, "u", block, trainable)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "elements"),
    [
        ("muon", 6 * 10),
        ("adamw", 2 * 60),
        ("shampoo", 2 * (36 + 100) + 2 * 60),
        ("soap", 2 * (36 + 100) + 2 * 60),
    ],
)
def test_state_of_one_matrix(optimizer: str, elements: int) -> None:
    settings = CostSettings(rule=RULES[optimizer]())
    assert block_cost(_spec((6, 10), 6), settings).resident == (240, 240, 4 * elements)


def test_a_side_over_the_limit_has_no_factor() -> None:
    rule = SOAPRule(max_precond_dim=8)
    factors = [name for name in rule.state((6, 10)) if name.endswith("factor")]
    assert factors == ["left_factor"]
    assert rule.state((6, 10))["left_factor"].shape == (6, 6)
    assert rule.flops(6, 10) < SOAPRule().flops(6, 10)


def test_shampoo_cuts_long_sides_into_blocks() -> None:
    """(6, 10) in blocks of 4: rows 4 + 2, columns 4 + 4 + 2, each tile with its own two factors."""
    rule = ShampooRule(max_precond_dim=4)
    factors = 3 * (4**2 + 2**2) + 2 * (4**2 + 4**2 + 2**2)
    elements = dict.fromkeys(("factor", "root", "exp_avg", "graft_avg_sq", "step"), 0)
    for name, spec in rule.state((6, 10)).items():
        kind = name.partition(".")[0].removeprefix("left_").removeprefix("right_")
        elements[kind] += prod(spec.shape) if spec.shape else 0
    assert elements == {
        "factor": factors, "root": factors, "exp_avg": 60, "graft_avg_sq": 60, "step": 0
    }  # fmt: skip
    assert rule.flops(6, 10) < ShampooRule().flops(6, 10)


@pytest.mark.parametrize("optimizer", ["shampoo", "soap"])
def test_factors_are_float32_whatever_is_stored(optimizer: str) -> None:
    stored = {"param_bytes": 2, "grad_bytes": 2, "state_bytes": 2}
    half = CostSettings(rule=RULES[optimizer](), **stored)
    full = CostSettings(rule=RULES[optimizer]())
    state = block_cost(_spec((6, 10), 6), full).resident.optimizer_state
    assert block_cost(_spec((6, 10), 6), half).resident == (120, 120, state)


def test_tail_and_frozen_parameters() -> None:
    settings = CostSettings(param_bytes=2, grad_bytes=2)
    assert block_cost(_spec((10, 3), 1, "tail"), settings).resident == (6, 6, 24)
    assert block_cost(_spec((10, 3), 10, trainable=False), settings).resident == (60, 0, 0)
    assert block_cost(_spec((10, 3), 10, trainable=False), settings).flops == 0


def test_blocks_are_matrices_of_their_own() -> None:
    settings = CostSettings()
    whole = block_cost(_spec((64, 32), 64), settings)
    head = block_cost(_spec((64, 32), 16), settings)
    expert = block_cost(_spec((4, 16, 32), 1), settings)
    assert whole.flops == newton_schulz_flops(64, 32)
    assert head.flops == expert.flops == newton_schulz_flops(16, 32)
    soap = CostSettings(rule=SOAPRule())
    assert block_cost(_spec((4, 16, 32), 1), soap).resident.optimizer_state == 4 * (
        2 * (16**2 + 32**2) + 2 * 16 * 32
    )


def test_a_plan_assumes_the_price_of_muons_rule() -> None:
    """`plan` imports no rule, so that it can be lifted out with `fsdp` alone."""
    assumed, rule = CostSettings().rule, MuonRule()
    assert (assumed.name, assumed.keeps_float32) == (rule.name, rule.keeps_float32)
    for shape in ((64, 64), (64, 512), (512, 64)):
        assert assumed.flops(*shape) == rule.flops(*shape)
        assert assumed.state_bytes(*shape, 2) == rule.state_bytes(*shape, 2)


def test_newton_schulz_flops() -> None:
    m, n = 100, 350
    standard = 5 * (4 * m * m * n + 2 * m**3)
    assert newton_schulz_flops(m, n, form="standard") == standard
    assert newton_schulz_flops(m, n) == newton_schulz_flops(n, m) < standard
    # two chunks of Gram steps, (2, 3): twice 4 m^2 n, and 14 products of 2 m^3
    assert newton_schulz_flops(m, n, form="gram") == 8 * m * m * n + 14 * 2 * m**3
    assert newton_schulz_flops(m, m) == newton_schulz_flops(m, m, form="standard")
    assert newton_schulz_flops(m, 140) == newton_schulz_flops(m, 140, form="standard")
    assert newton_schulz_flops(m, 160) == newton_schulz_flops(m, 160, form="gram")
    assert newton_schulz_flops(m, n, steps=2, form="gram") == 4 * m * m * n + 5 * 2 * m**3


def test_shampoo_and_soap_pay_cubes_per_refresh() -> None:
    for optimizer in ("shampoo", "soap"):
        often = RULES[optimizer](precondition_frequency=1).flops(64, 64)
        seldom = RULES[optimizer](precondition_frequency=100).flops(64, 64)
        assert often > 1.5 * seldom


def test_ranks_add_up_segments() -> None:
    shards = (
        MatrixShard("m", (4, 8), "matrix", "u", 4, (Segment(1, 0, 4),)),
        MatrixShard("t", (10, 8), "tail", "v", 1, (Segment(0, 0, 7), Segment(1, 7, 10))),
    )
    plan, settings = Plan(2, shards), CostSettings()
    assert [part.total for part in rank_bytes(plan, settings)] == [56 * 16, 24 * 16 + 32 * 12]
    assert rank_flops(plan, settings) == [56 * 12, 24 * 12 + newton_schulz_flops(4, 8)]
    assert unit_shares(plan, 2) == {"u": [0, 64], "v": [112, 48]}
    assert max_over_mean([1, 3]) == 1.5
    assert max_over_mean([0, 0]) == 1.0


def test_star_grows_with_ranks_and_the_others_do_not() -> None:
    """Star has the published fan-out problem: a Llama-3 8B block takes 2 to 17 all-gathers."""
    for world_size, factor in ((8, 2.15), (16, 4.3), (32, 8.6), (64, 17.2)):
        shares = unit_shares(make_plan(llama_specs(**LLAMA_8B), world_size), 2)["layers.5"]
        even = transport_seconds("all_gather", shares, 1e9)
        assert transport_seconds("star", shares, 1e9) / even == pytest.approx(factor, rel=0.02)
        ratio = world_size / (world_size - 1)
        assert transport_seconds("ring", shares, 1e9) / even == pytest.approx(ratio, rel=0.02)
        assert transport_seconds("grouped", shares, 1e9) / even == pytest.approx(ratio, rel=0.02)


def test_transport_times_of_the_measured_links() -> None:
    """Predictions are within 20% of times on gloo: 8 emulated hosts at 100 Mbit/s, 8 MB."""
    even, uneven = [MIB] * 8, [int(8 * MIB * share / 10) for share in (5, 3, 1, 1, 0, 0, 0, 0)]
    measured = {  # unshard and reduction, of the even and of the uneven unit
        "ring": ((0.666, 0.659), (0.705, 0.703)),
        "grouped": ((2.04, 0.877), (1.652, 0.935)),
        "star": ((None, None), (2.736, None)),
        "all_gather": ((0.643, None), (None, None)),
    }
    for transport, of_units in measured.items():
        for shares, of_unit in zip((even, uneven), of_units, strict=True):
            for direction, seconds in zip(("unshard", "reduce"), of_unit, strict=True):
                if seconds is not None:
                    predicted = transport_seconds(
                        transport,
                        shares,
                        100e6 / 8,
                        backend="gloo",
                        direction=direction,  # type: ignore[arg-type]
                    )
                    assert predicted == pytest.approx(seconds, rel=0.2), (transport, direction)


def test_grouped_on_gloo() -> None:
    """Broadcasts of 8 from rank 0 (0 to 1 and 2, 1 to 3), of 4 from 2 and of 4 from 3."""
    shares, gloo = [8, 0, 4, 4], {"backend": "gloo"}
    assert transport_bytes("grouped", shares, **gloo) == (20, 20)  # rank 0: twice 8, once 4
    assert transport_bytes("grouped", shares, 2, **gloo) == (20, 20)
    # c S around the ring, c s to the owner
    reduction = {"backend": "gloo", "direction": "reduce"}
    assert transport_bytes("grouped", shares, **reduction) == (18, 18)
    assert transport_bytes("grouped", shares, 2, **reduction) == (18, 16)
    # two at a time: owners 0 and 2, then 3
    assert transport_seconds("grouped", shares, 1.0, **gloo) == 16 + 8
    assert transport_seconds("grouped", shares, 1.0, **reduction) == (12 + 8) * 0.75 + 8 * 0.75
    # three messages around the ring beside the bytes, and one to the owner, twice
    for latency, seconds in ((1.0, 21 + 2), (5.0, 2 * 4 * 5)):
        slow = {"message_seconds": latency, **reduction}
        assert transport_seconds("grouped", shares, 1.0, **slow) == seconds
    # twice down the tree, level by level
    assert transport_messages("grouped", shares, **gloo) == 2 * 2
    assert transport_seconds("grouped", shares, 1.0, message_seconds=0.5, **gloo) == 24 + 4 * 0.5
    assert transport_messages("grouped", shares) == 3  # NCCL: one for each owner
    assert transport_messages("star", shares, **gloo) == 3
    # two ranks send to each other
    assert transport_seconds("grouped", [5, 3], 1.0, **gloo) == 5
    assert transport_seconds("grouped", [5, 3], 1.0, **reduction) == 5
    assert transport_bytes("grouped", [5, 3], **reduction) == (5, 5)


def test_links_of_hosts_with_several_ranks() -> None:
    shares = [8, 0, 4, 4]
    assert transport_bytes("ring", shares, ranks_per_host=2) == (16, 12)
    assert transport_bytes("ring", shares, ranks_per_host=2, direction="reduce") == (16, 16)
    assert transport_bytes("star", shares, ranks_per_host=2) == (24, 16)
    assert transport_bytes("all_gather", shares, ranks_per_host=2) == (12, 12)
    assert transport_bytes("star", shares, ranks_per_host=4) == (24, 0)
    assert transport_bytes("star", [5]) == (0, 0)
    assert transport_seconds("ring", [5], 1.0, message_seconds=1.0) == 0.0
    one_host = {"ranks_per_host": 4, "message_seconds": 0.5}
    assert transport_seconds("ring", shares, 1.0, **one_host) == 1.5
    assert transport_seconds("ring", shares, 1.0, local_bytes_per_second=8.0, **one_host) == 3.5


def test_transport_is_chosen_by_formula_and_backend() -> None:
    assert choose_transport(2, "nccl") == "grouped"
    assert choose_transport(64, "nccl", ranks_per_host=8) == "grouped"
    assert choose_transport(4, "gloo") == "star"
    assert choose_transport(4, "gloo", ranks_per_host=4) == "star"
    assert choose_transport(4, "gloo", ranks_per_host=2) == "ring"
    with pytest.raises(ValueError, match="backend 'mpi'"):
        choose_transport(1, "mpi")


def test_strategy_bytes_follow_the_formulas() -> None:
    """Two units, the second kept between forward and backward; 4 ranks, so c = 3/4."""
    units = [UnitSize(800, 700, 600, 2), UnitSize(400, 400, 400, 1)]
    sent = {
        name: strategy_bytes(name, units, 4, param_bytes=2, grad_bytes=4)
        for name in STRATEGY_VARIANTS
    }
    sharded = 0.75 * ((2 * 800 + 400) * 2 + 1100 * 4)
    assert sent["matrix_fsdp"] == (sharded, 0)
    assert sent["fsdp2_gather_each"] == sent["fsdp2_gather_once"] == (sharded, 0.75 * 1000 * 4)
    assert sent["fsdp2_all_to_all"] == (sharded, 2 * 0.75 * 1000 / 4 * 4)
    assert sent["zero1_owner"] == (2 * 0.75 * 1100 * 4, 0.75 * 1000 * 4)
    assert sent["ddp"] == (2 * 0.75 * 1100 * 4, 0)
    two = strategy_bytes("matrix_fsdp", units, 4, param_bytes=2, grad_bytes=4, microbatches=2)
    assert two.forward_backward == 2 * sharded


def test_unit_sizes() -> None:
    specs = [
        ParamSpec("a", (4, 2), "matrix", "u", 4),
        ParamSpec("b", (3,), "tail", "u", 1, trainable=False),
        ParamSpec("c", (5, 2), "tail", "v", 1),
    ]
    assert unit_sizes(specs, ["v"]) == [UnitSize(11, 8, 8, 2), UnitSize(10, 10, 0, 1)]
    padded = unit_sizes(specs, row_multiple=3)
    assert padded == [UnitSize(15, 12, 12, 2), UnitSize(12, 12, 0, 2)]


@pytest.mark.parametrize("direction", ["unshard", "reduce"])
@pytest.mark.parametrize("transport", ["ring", "grouped", "star"])
def test_a_last_host_may_have_fewer_ranks(transport: str, direction: Direction) -> None:
    shares = [4, 4, 1]
    within = transport_bytes(transport, shares, 8, direction=direction)
    assert within.link == 0
    across = transport_bytes(transport, shares, 2, direction=direction)
    if transport != "star":
        # the last host's link does not carry what its only rank holds
        assert across.link == 8
