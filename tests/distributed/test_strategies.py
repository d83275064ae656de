"""Every strategy trains to the same losses, and communicates what its formula says."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from matrixtitan.fsdp.api import make_transport
from matrixtitan.parallelize import model_specs
from matrixtitan.plan.shard import ParamSpec
from matrixtitan.predict.strategies import StrategyVariant, strategy_bytes, unit_sizes
from matrixtitan.rules import RULES, AdamWRule, MuonRule, Rule, SOAPRule
from matrixtitan.strategies.fsdp2_collectives import TransportAllGather, TransportReduceScatter
from matrixtitan.strategies.matrix_exchange import shard_bounds
from matrixtitan.strategies.zero1_owner import Zero1Owner, owners_of
from models.llama import Llama
from tests.lib.count_collectives import CollectiveCounter
from tests.lib.distributed import run_distributed
from tests.lib.strategies import FLAVOR, SEQ_LEN, STRATEGIES, VOCAB, Run, make_config

STEPS = 20
TOLERANCE = 5e-5


def curves(names: list[str], steps: int) -> dict[str, tuple[list[float], list[float]]]:
    results = {}
    for name in names:
        run = Run(make_config(name))
        results[name] = run.train(steps)
        run.close()
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_losses_and_norms_agree_with_ddp(world_size: int) -> None:
    for results in run_distributed(curves, world_size, list(STRATEGIES), STEPS):
        losses, norms = results["ddp"]
        assert losses[-1] != pytest.approx(losses[0], abs=1e-3), (
            "a model that does not move proves nothing"
        )
        for name, (found_losses, found_norms) in results.items():
            assert found_losses == pytest.approx(losses, rel=0, abs=TOLERANCE), name
            assert found_norms == pytest.approx(norms, rel=TOLERANCE), name


def matrices_after(names: list[str], steps: int) -> dict[str, dict[str, Tensor]]:
    """Each strategy's whole matrices on this rank after training, without batched products."""
    results = {}
    for name in names:
        run = Run(make_config(name, ns_batch=False))
        run.train(steps)
        results[name] = {
            param.fqn: param.tensor.detach().clone()
            for param in run.strategy.local_parameters()
            if param.role == "matrix"
        }
        run.close()
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_matrices_agree_with_ddp(world_size: int) -> None:
    owned = set()
    for results in run_distributed(matrices_after, world_size, ["matrix_fsdp", "ddp"], STEPS):
        for fqn, matrix in results["matrix_fsdp"].items():
            torch.testing.assert_close(matrix, results["ddp"][fqn], atol=1e-5, rtol=0, msg=fqn)
            owned.add(fqn)
    assert owned == set(results["ddp"])


def counts(names: list[str]) -> dict[str, dict[str, Any]]:
    results = {}
    for name in names:
        run = Run(make_config(name))
        # buckets and prefetch order settle in the first step
        run.forward_backward(0)
        run.update()
        with CollectiveCounter() as forward_backward:
            run.forward_backward(1)
        with CollectiveCounter() as optimizer:
            run.update()
        results[name] = {
            "forward_backward": forward_backward.logical_bytes,
            "optimizer": optimizer.logical_bytes,
            "optimizer_calls": dict(optimizer.calls_by_op()),
        }
        run.close()
    return results


def formula(name: StrategyVariant, world_size: int) -> tuple[int, int]:
    with torch.device("meta"):
        model = Llama(FLAVOR, vocab_size=VOCAB, max_seq_len=SEQ_LEN, tie_embeddings=False)
    specs = model_specs(model, make_config("ddp"))
    # the last unit is kept after forward, and an embedding's backward does not need its weight
    sizes = unit_sizes(
        specs, ["tok_embeddings", "head"], row_multiple=world_size if "fsdp2" in name else 1
    )
    step = strategy_bytes(name, sizes, world_size, param_bytes=4, grad_bytes=4)
    return step.forward_backward, step.optimizer


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_follow_the_formulas(world_size: int) -> None:
    names: list[StrategyVariant] = [
        "matrix_fsdp", "fsdp2_gather_each", "fsdp2_gather_once", "fsdp2_all_to_all", "zero1_owner",
        "ddp",
    ]  # fmt: skip
    results = run_distributed(counts, world_size, names)
    # the norm's all-reduce of one float64; replicated strategies hold all gradients already
    scalar = 2 * 8 * (world_size - 1) / world_size
    for name in names:
        forward_backward, optimizer = formula(name, world_size)
        mean = {
            phase: sum(result[name][phase] for result in results) / world_size
            for phase in ("forward_backward", "optimizer")
        }
        assert mean["forward_backward"] == pytest.approx(forward_backward, rel=0.02), name
        norm = 0.0 if name in ("ddp", "zero1_owner") else scalar
        assert mean["optimizer"] - norm == pytest.approx(optimizer, rel=0.02), name


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_optimizer_step_takes_its_own_path(world_size: int) -> None:
    names = list(STRATEGIES)
    for results in run_distributed(counts, world_size, names):
        calls = {name: result["optimizer_calls"] for name, result in results.items()}
        matrices = 7 * FLAVOR.n_layers
        norm = {"allreduce_": 1}
        assert calls["matrix_fsdp"] == norm, "the step itself communicates nothing"
        assert calls["ddp"] == {}
        assert calls["zero1_owner"] == {"broadcast_": matrices}
        assert calls["fsdp2_gather_each"] == {"all_gather_into_tensor": matrices} | norm
        assert calls["fsdp2_gather_once"] == {"send": world_size - 1} | norm
        assert set(calls["fsdp2_all_to_all"]) == {"alltoall_base_", "allreduce_"}, (
            "no gather, no fall-back"
        )
        assert calls["fsdp2_all_to_all"]["alltoall_base_"] >= 4, (
            "several buckets, or nothing overlaps"
        )
        assert calls["fsdp2_all_to_all_stock"] == calls["fsdp2_all_to_all"]


def transport_calls() -> dict[str, dict[str, int]]:
    found = {}
    for name in ("fsdp2_all_to_all", "fsdp2_all_to_all_stock"):
        run = Run(make_config(name))
        run.forward_backward(0)
        run.update()
        with CollectiveCounter() as counter:
            run.forward_backward(1)
        found[name] = dict(counter.calls_by_op())
    return found


def test_tuned_and_stock_transports_are_what_runs() -> None:
    units = FLAVOR.n_layers + 2
    # in backward the head is still gathered, and the embedding is not needed
    gathers = units + FLAVOR.n_layers
    for found in run_distributed(transport_calls, 3):
        assert found["fsdp2_all_to_all"] == {"send": 2 * (gathers + units)}
        assert found["fsdp2_all_to_all_stock"] == {
            "_allgather_base_": gathers,
            "_reduce_scatter_base_": units,
        }


def accumulate(name: str) -> tuple[list[float], list[float], list[float]]:
    whole, norms = Run(make_config(name)).train(4)
    parts, part_norms = Run(make_config(name)).train(4, microbatches=2)
    assert part_norms == pytest.approx(norms, rel=TOLERANCE)
    config = make_config(name)
    object.__setattr__(config.parallelism, "reduce_each_microbatch", False)
    once, _ = Run(config).train(4, microbatches=2)
    return whole, parts, once


@pytest.mark.parametrize("name", ["fsdp2_all_to_all", "zero1_owner"])
def test_microbatches_do_not_change_the_step(name: str) -> None:
    for whole, parts, once in run_distributed(accumulate, 3, name):
        assert parts == pytest.approx(whole, abs=TOLERANCE)
        assert once == pytest.approx(whole, abs=TOLERANCE)


def other_layouts() -> dict[str, list[float]]:
    return {
        "ddp": Run(make_config("ddp")).train(6)[0],
        "hsdp": Run(make_config("fsdp2_all_to_all"), replicate=2).train(6)[0],
        "tied ddp": Run(make_config("ddp"), tied=True).train(6)[0],
        "tied": Run(make_config("fsdp2_gather_once"), tied=True).train(6)[0],
    }


def test_replicas_and_tied_weights_agree_with_ddp() -> None:
    for losses in run_distributed(other_layouts, 4):
        assert losses["hsdp"] == pytest.approx(losses["ddp"], abs=TOLERANCE)
        assert losses["tied"] == pytest.approx(losses["tied ddp"], abs=TOLERANCE)


def rows_of_fsdp2() -> None:
    run = Run(make_config("fsdp2_all_to_all"))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def check() -> None:
        for param in run.strategy.local_parameters():
            assert isinstance(param.tensor, DTensor)
            start, stop = shard_bounds(param.full_shape[0], world_size, rank)
            assert param.start == min(start, param.full_shape[0])
            assert param.tensor.to_local().shape == (stop - start, *param.full_shape[1:])

    check()
    for param in run.strategy.local_parameters():
        assert isinstance(param.tensor, DTensor)
        expected = torch.empty(param.full_shape)
        run.init_rows(param.fqn, param.full_shape, 0, expected)
        assert torch.equal(param.tensor.detach().full_tensor(), expected), param.fqn
    run.train(1)
    with torch.no_grad():
        tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
        # leaves the kept unit gathered
        run.strategy.model(tokens, tokens)
    check()


def test_fsdp2_rows_are_initialised_and_found() -> None:
    run_distributed(rows_of_fsdp2, 3)


def owners() -> tuple[dict[str, int], list[str], dict[str, Tensor]]:
    run = Run(make_config("zero1_owner"))
    run.train(2)
    assert isinstance(run.strategy, Zero1Owner)
    momenta = [
        state.fqn for state in run.optimizers.state_tensors() if state.name == "momentum_buffer"
    ]
    return (
        run.strategy.owner_of,
        momenta,
        {p.fqn: p.tensor.detach() for p in run.strategy.local_parameters()},
    )


def test_zero1_keeps_momentum_on_the_owner_and_equal_weights_everywhere() -> None:
    results = run_distributed(owners, 3)
    owner_of, _, weights = results[0]
    assert set(owner_of.values()) == {0, 1, 2}
    for rank, (found, momenta, found_weights) in enumerate(results):
        assert found == owner_of
        assert sorted(momenta) == sorted(fqn for fqn, owner in owner_of.items() if owner == rank)
        torch.testing.assert_close(found_weights, weights, rtol=0, atol=0)


@pytest.mark.parametrize(("rule", "first"), [(MuonRule(), "square"), (AdamWRule(), "wide")])
def test_zero1_balances_the_price_of_the_rule(rule: Rule, first: str) -> None:
    """The costly matrix gets its owner first: Muon's is the square one, AdamW's the larger one."""
    shapes = {"square": (64, 64), "wide": (16, 512)}
    specs = [ParamSpec(fqn, shape, "matrix", "u", shape[0]) for fqn, shape in shapes.items()]
    owner_of = owners_of(specs, rule, 2)
    assert owner_of == {fqn: int(fqn != first) for fqn in shapes}


def message(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("no ValueError")


def soap_on_row_shards() -> str:
    config = make_config("fsdp2_all_to_all")
    soap = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name="soap"))
    return message(lambda: Run(soap))


@dataclasses.dataclass(frozen=True)
class SteppedBySOAP(MuonRule):
    """A rule that passes for Muon's, and whose optimizer is none."""

    optimizer = SOAPRule.optimizer

    def arguments(self) -> dict[str, Any]:
        return {}


def another_optimizer_on_row_shards() -> str:
    RULES["muon"] = SteppedBySOAP
    return message(lambda: Run(make_config("fsdp2_all_to_all")))


def test_what_fsdp2_cannot_do_is_named() -> None:
    message = run_distributed(soap_on_row_shards, 2)[0]
    assert "optimizer.name soap needs whole matrices" in message
    assert "parallelism.strategy" in message
    message = run_distributed(another_optimizer_on_row_shards, 2)[0]
    assert message.startswith("SOAP is no Muon: it would step rows of matrices")


def exchanges_by(transport: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    movers = [make_transport(transport, group, torch.device("cpu")) for _ in range(2)]
    all_gather, reduce_scatter = TransportAllGather(movers[0]), TransportReduceScatter(movers[1])
    mine = torch.full((5,), float(rank))
    outputs = [
        all_gather.allocate((5 * size,), dtype=mine.dtype, device=mine.device) for _ in range(3)
    ]
    works = [all_gather(output, mine + 10 * call, group) for call, output in enumerate(outputs)]
    whole = torch.arange(4.0 * size) * (rank + 1)
    part = reduce_scatter.allocate((4,), dtype=whole.dtype, device=whole.device)
    # while the all-gathers are in flight
    reduce_scatter(part, whole, group, dist.ReduceOp.SUM)
    assert torch.equal(part, torch.arange(4.0 * rank, 4.0 * rank + 4) * size * (size + 1) / 2)
    for call in reversed(range(3)):
        works[call].wait()
        assert torch.equal(
            outputs[call], torch.arange(float(size)).repeat_interleave(5) + 10 * call
        )
    with pytest.raises(ValueError, match="set_force_sum_reduction_for_comms"):
        reduce_scatter(part, whole, group, dist.ReduceOp.AVG)
    for mover in movers:
        mover.close()


@pytest.mark.parametrize("transport", ["star", "ring"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exchanges_by_our_transports_overlap_and_are_exact(world_size: int, transport: str) -> None:
    run_distributed(exchanges_by, world_size, transport)


def threads_after_close() -> list[str]:
    # across machines "auto" is the ring, which has a thread in each direction
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    run = Run(make_config("fsdp2_all_to_all"))
    run.train(1)
    assert [thread for thread in threading.enumerate() if "ring" in thread.name]
    run.close()
    return [thread.name for thread in threading.enumerate() if "ring" in thread.name]


def test_closing_fsdp2_ends_its_threads() -> None:
    assert run_distributed(threads_after_close, 2) == [[], []]
