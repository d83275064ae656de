"""One entry of the registry adds a transport: config, prices, tools and runtime then know it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from matrixtitan.config import ConfigError, load_config
from matrixtitan.fsdp.streams import Work
from matrixtitan.fsdp.transports import OwnedTensor, Transport, transport_class
from matrixtitan.plan.transport_registry import (
    TRANSPORTS,
    BusiestBytes,
    Direction,
    RingSpec,
    TransportSpec,
    choose_transport,
    transport_seconds,
)
from matrixtitan.tools import plan
from tests.distributed.test_fsdp import toy_case
from tests.lib.distributed import run_distributed

NAME = "mailbox"


class Mailbox(Transport):
    """Moves tensors one after another, and counts them."""

    name = NAME
    moved = 0

    def unshard(self, tensors: Sequence[OwnedTensor]) -> Sequence[Work]:
        for owner, tensor in tensors:
            dist.broadcast(tensor, group=self.group, group_src=owner)
            Mailbox.moved += 1
        return ()

    def reduce(self, tensors: Sequence[OwnedTensor]) -> Sequence[Work]:
        for owner, tensor in tensors:
            dist.reduce(tensor, group=self.group, group_dst=owner)
            Mailbox.moved += 1
        return ()


class MailboxSpec(TransportSpec):
    """A price of three bytes on a link, and one message, for each byte of a unit."""

    runtime = f"{__name__}:Mailbox"

    def is_auto(self, backend: str, across_hosts: bool) -> bool:
        return backend == "post"

    def carried(
        self, shares: Sequence[int], ranks_per_host: int, direction: Direction, backend: str
    ) -> BusiestBytes:
        return BusiestBytes(sum(shares), 3 * sum(shares))

    def messages(self, shares: Sequence[int], direction: Direction, backend: str) -> int:
        return sum(shares)


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, NAME, MailboxSpec())


def train_by_mailbox() -> int:
    TRANSPORTS[NAME] = MailboxSpec()
    toy_case({"transport": NAME})
    return Mailbox.moved


def test_it_trains() -> None:
    assert min(run_distributed(train_by_mailbox, 2)) > 0


@pytest.mark.usefixtures("_registered")
def test_config_tools_and_auto_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(["--config", "debug", "--parallelism.transport", NAME])
    assert config.parallelism.transport == NAME

    argv = ["--config", "debug", "--world-size", "4", "--gpus-per-node", "2", "--link-gbit", "8"]
    assert plan.main([*argv, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    unit = figures["units"][0]
    assert unit["unshard_seconds"][NAME] == pytest.approx(3 * unit["bytes"] / 1e9)
    assert figures["transports"][NAME]["link_bytes_at_most"] > 0
    assert plan.main(argv) == 0
    assert f"matrix_fsdp, {NAME} (most)" in capsys.readouterr().out

    assert transport_seconds(NAME, [1, 2], 1.0, message_seconds=2.0) == 9 + 6
    assert choose_transport(2, "post") == NAME
    assert transport_class("auto", 2, 2, "post") is Mailbox


def test_unregistered_it_is_unknown_everywhere() -> None:
    with pytest.raises(
        ConfigError,
        match=r"parallelism\.transport is 'rin'; choose 'auto', 'grouped', 'ring', 'star'; "
        "did you mean ring",
    ):
        load_config(["--config", "debug", "--parallelism.transport", "rin"])
    with pytest.raises(ValueError, match="is 'mailbox'; use one of auto, grouped, ring, star"):
        transport_class(NAME, 2, 2, "gloo")
    with pytest.raises(ValueError, match="is 'mailbox'; use one of"):
        transport_seconds(NAME, [1, 2], 1.0)


def test_a_transport_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"'ring' works on gloo alone, .* backend is nccl: use 'grouped'"
    ):
        transport_class("ring", 4, 4, "nccl")

    class Nowhere(RingSpec):
        runtime = "matrixtitan.fsdp.ring:Rung"

    class NotATransport(RingSpec):
        runtime = "matrixtitan.fsdp.ring:deque"

    for spec, complaint in ((Nowhere(), "cannot be imported"), (NotATransport(), "is no matrix")):
        monkeypatch.setitem(TRANSPORTS, NAME, spec)
        with pytest.raises(RuntimeError, match=f"'{NAME}': its runtime .*{complaint}"):
            transport_class(NAME, 2, 2, "gloo")
