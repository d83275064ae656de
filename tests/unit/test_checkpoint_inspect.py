"""tools/inspect_checkpoint.py: what it shows, and that it finds damage."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from matrixtitan.checkpoint import TrainState
from matrixtitan.checkpoint.writing import write_alone
from models.llama import Llama, LlamaFlavor
from tools import inspect_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

VOCAB, SEQ_LEN = 61, 48
FLAVOR = LlamaFlavor(48, 2, 6, 2, 80)


def model_of(flavor: LlamaFlavor, vocab_size: int = VOCAB) -> Llama:
    model = Llama(
        flavor, vocab_size=vocab_size, max_seq_len=SEQ_LEN, tie_embeddings=flavor.tie_embeddings
    )
    model.init_weights(seed=3)
    with torch.no_grad():
        for parameter in model.parameters():  # far from the initial values, so that errors show
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def checkpoint_of(model: Llama, folder: Path, **meta: Any) -> Path:
    weights = {f"model.{name}": parameter.data for name, parameter in model.named_parameters()}
    meta = {
        "format": 1,
        "contents": "model",
        "world_size": 1,
        "torch": torch.__version__,
        "saved_at": "2026-01-01T00:00:00+00:00",
        "train_state": dataclasses.asdict(TrainState(7, 70, 700)),
        "flavor": dataclasses.asdict(model.flavor),
        "max_seq_len": SEQ_LEN,
        **meta,
    }
    shapes = {key: torch.empty_like(value, device="meta") for key, value in weights.items()}
    side_files = {"meta.json": meta, "config.json": {"model": {"tokenizer_path": ""}}}
    encoded = {name: json.dumps(content).encode() for name, content in side_files.items()}
    return write_alone(folder, 7, shapes, weights.__getitem__, encoded)


def test_inspect_shows_step_shapes_and_norms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(FLAVOR)
    path = checkpoint_of(model, tmp_path / "run")
    assert inspect_checkpoint.main([str(tmp_path / "run"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["meta"]["train_state"]["step"] == 7
    weight = figures["tensors"]["model.layers.1.attention.wq.weight"]
    assert weight["shape"] == [48, 48]
    expected = model.layers["1"].attention.wq.weight.double().norm().item()
    assert weight["norm"] == pytest.approx(expected, rel=1e-12)
    assert inspect_checkpoint.main([str(path), "--no-norms", "--keys", "*wq*"]) == 0
    printed = capsys.readouterr().out
    assert "step 7, 700 tokens seen, next window 70" in printed
    assert "wk" not in printed


def test_verify_names_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint_of(model_of(FLAVOR), tmp_path / "run")
    assert inspect_checkpoint.main([str(path), "--verify"]) == 0
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 4
    (path / "__0_0.distcp").write_bytes(data)
    (path / "config.json").unlink()
    capsys.readouterr()
    assert inspect_checkpoint.main([str(path), "--verify"]) == 1
    printed = capsys.readouterr().out
    assert "__0_0.distcp" in printed
    assert "config.json is missing" in printed


def test_no_checkpoint_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_checkpoint.main([str(tmp_path)]) == 1
    assert "no checkpoint at" in capsys.readouterr().err
