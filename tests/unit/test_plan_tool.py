"""tools/plan.py: its figures for known jobs, its printed form, its errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from matrixtitan.data.tokenizer import write_ranks
from matrixtitan.tools.plan import main

CONFIG = """
[model]
flavor = "8B"
tokenizer_path = "/nowhere/tokenizer.model"
[training]
steps = 1000
seq_len = 8192
global_batch_size = 1024
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "llama.toml"
    path.write_text(CONFIG)
    return str(path)


def _report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    out = capsys.readouterr().out
    figures: dict[str, Any] = json.loads(out, parse_constant=pytest.fail)  # JSON has no Infinity
    return figures


def test_llama_8b_on_64_ranks(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    figures = _report(capsys, "--config", config, "--world-size", "64")
    assert figures["model"]["vocab_size"] == 128256
    assert figures["model"]["vocab_from"].startswith("llama3's, since /nowhere")
    assert figures["balance"]["resident_bytes"] <= 1.02
    assert figures["balance"]["optimizer_flops"] <= 1.08
    assert len(figures["ranks"]) == 64
    parameters = figures["model"]["parameters"]
    assert sum(rank["parameters"] for rank in figures["ranks"]) == 4 * parameters
    assert {owner["fqn"] for owner in figures["owners"]} >= {"layers.31.feed_forward.w2.weight"}
    # c ((1 + resharded) b + g): the embedding and the head are gathered once, b = 2, g = 4
    once = 2 * 128256 * 4096 + 4096
    expected = 63 / 64 * ((2 * parameters - once) * 2 + parameters * 4)
    ours = figures["strategies"]["matrix_fsdp"]
    assert ours["forward_backward"]["rank_bytes"] == pytest.approx(expected, rel=1e-9)
    assert ours["optimizer"]["rank_bytes"] == 0
    grouped, star = figures["transports"]["grouped"], figures["transports"]["star"]
    assert grouped["rank_bytes_at_most"] == pytest.approx(expected, rel=0.02)
    assert grouped["seconds"] == pytest.approx(grouped["link_bytes_at_most"] / 25e9)
    assert star["seconds"] > 10 * grouped["seconds"]


def test_processes_with_other_hash_seeds_make_the_same_plan() -> None:
    """Each rank plans for itself, so a plan must not depend on the order of a set."""
    command = [sys.executable, "tools/plan.py", "--config", "debug", "--world-size", "5", "--json"]
    digests = {
        json.loads(
            subprocess.run(
                command,
                cwd=Path(__file__).resolve().parents[2],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                check=True,
            ).stdout
        )["digest"]
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1


def test_memory_of_32b_on_64_ranks_in_bfloat16(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As published: matrix_fsdp needs about 10 GB a rank, and zero1_owner over 80 GB."""
    overrides = ("--model.flavor", "32B", "--training.dtype", "bfloat16")
    memory = _report(capsys, "--config", config, "--world-size", "64", *overrides)["memory"]
    assert memory["matrix_fsdp"]["peak_bytes"] == pytest.approx(9.3e9, rel=0.01)
    assert memory["matrix_fsdp"]["fits"]
    assert memory["zero1_owner"]["peak_bytes"] > 80e9
    assert not memory["zero1_owner"]["fits"] and not memory["ddp"]["fits"]
    # FSDP2 has one unit's all-gather buffer in addition (1.31 GB)
    assert memory["fsdp2_all_to_all"]["peak_bytes"] == pytest.approx(10.6e9, rel=0.01)
    for strategy in memory.values():
        resident = [term for term in strategy["terms"] if term["phase"] == "resident"]
        assert [term["name"] for term in resident][:2] == ["parameters", "gradients"]
        assert {term["dtype"] for term in resident} == {"bfloat16"}


def test_replicas_share_owners_and_reduce_over_each_other(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = _report(capsys, "--config", config, "--world-size", "64", "--replicas", "8")
    assert figures["shard_ranks"] == len(figures["ranks"]) == 8
    star = figures["transports"]["star"]
    replica_bytes = star["replica_rank_bytes"]
    assert replica_bytes == pytest.approx(2 * 7 / 8 * figures["ranks"][0]["gradients"], rel=0.01)
    assert star["link_bytes_at_most"] == 8 * replica_bytes  # a shard group stays inside its host


def test_rates_and_hosts_change_times_alone(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--config", config, "--world-size", "8", "--gpus-per-node", "1", "--backend", "gloo")
    fast = _report(capsys, *argv, "--link-gbit", "10")
    slow = _report(capsys, *argv, "--link-gbit", "1")
    assert fast["digest"] == slow["digest"]
    for transport in ("grouped", "ring", "star"):
        ratio = slow["transports"][transport]["seconds"] / fast["transports"][transport]["seconds"]
        assert ratio == pytest.approx(10)
    assert {unit["auto"] for unit in slow["units"]} == {"ring"}
    names = [term["name"] for term in slow["memory"]["matrix_fsdp"]["terms"]]
    assert "full gradients of 2 in reduction" in names
    one_host = _report(capsys, "--config", config, "--world-size", "8", "--local-gbit", "800")
    assert one_host["transports"]["ring"]["link_bytes_at_most"] == 0
    assert one_host["transports"]["ring"]["seconds"] > 0


def test_the_egress_cap_of_a_config_reaches_the_planner(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ("--config", "debug", "--world-size", "3", "--parallelism.egress_cap")
    assert main([*argv, "1.5", "--json"]) == 0
    capsys.readouterr()
    assert main([*argv, "1.0"]) != 0
    assert re.search(r"egress_cap 1\.0 cannot be met: rank \d would", capsys.readouterr().err)


def test_printed_form(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", config, "--world-size", "64", "--replicas", "2"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "balance.resident_bytes   1.0",
        "5 Newton-Schulz steps, in the form that takes fewer",
        "of 14336x4096",
        "fullest (rank",
        "matrix_fsdp, star (most)",
        "fsdp2_all_to_all",
        "gradients over replicas",
        "DOES NOT FIT",
    ):
        assert part in printed


def test_embedded_tokenizer_gives_its_own_vocabulary(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--config", config, "--world-size", "2", "--model.flavor", "debug")
    figures = _report(capsys, *argv, "--model.tokenizer_path", "")
    assert figures["model"]["vocab_size"] == 4096
    assert _report(capsys, *argv, "--vocab-size", "1000")["model"]["vocab_size"] == 1000


def test_a_rank_file_of_an_unknown_family_needs_its_pattern(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ranks(tmp_path / "ranks", [bytes([byte]) for byte in range(256)])
    argv = ["--config", config, "--world-size", "2", "--model.flavor", "debug"]
    argv += ["--model.tokenizer_path", str(tmp_path / "ranks")]
    assert main(argv) == 2
    assert "--model.tokenizer_pattern" in capsys.readouterr().err
    figures = _report(capsys, *argv, "--model.tokenizer_pattern", "gpt2")
    assert figures["model"]["vocab_size"] == 258


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--world-size", "10", "--replicas", "3"), "3 replicas do not divide a world size of 10"),
        (("--world-size", "4", "--model.flavr", "1B"), "did you mean model.flavor"),
        (("--world-size", "4", "--optimizer.tail_patterns", '["*.wz.weight"]'), "wz"),
    ],
)
def test_errors_say_what_to_change(
    config: str, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    assert main(["--config", config, *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--world-size", "0"),
        ("--microbatches", "9" * 400),
        ("--vocab-size", "9" * 22),
        ("--link-gbit", "0"),
        ("--link-gbit", "inf"),
        ("--local-gbit", "1e300"),
        ("--gpu-memory-gb", "nan"),
        ("--message-us", "-5"),
        ("--message-us", "nan"),
        ("--message-us", "inf"),
    ],
)
def test_wrong_numbers_are_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--config", "debug", "--world-size", "8", option, value])
    assert re.search(
        f"argument {option}: '{value}' is not a .* to 1e\\+09", capsys.readouterr().err
    )


def test_the_slowest_machine_has_finite_figures(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ("--link-gbit", "1e-9", "--local-gbit", "1e-9", "--message-us", "1e9")
    large = ("--vocab-size", "1000000000", "--microbatches", "1000000000", "--gpus-per-node", "1")
    _report(capsys, "--config", "debug", "--world-size", "3", *slow, *large)


def test_a_config_that_cannot_be_opened_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "x" * 5000, "--world-size", "8"]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_the_picture_is_drawn_beside_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    _report(capsys, "--config", "debug", "--world-size", "64", "--picture", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("path", "message"),
    [("plan.xyz", "Format 'xyz' is not supported"), ("nowhere/plan.png", "No such file")],
)
def test_a_picture_that_cannot_be_written_ends_with_one_message(
    path: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture = str(tmp_path / path)
    assert main(["--config", "debug", "--world-size", "2", "--picture", picture]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = str(tmp_path / "plan.png")
    assert main(["--config", "no such config", "--world-size", "2", "--picture", picture]) == 2
    error = capsys.readouterr().err
    assert "plan: matplotlib is missing; install the plots extra (pip install -e" in error
    assert len(error.splitlines()) == 1
