"""A model family is one entry of the registry: config, planner, trainer and tools then know it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matrixtitan.config import Config, ConfigError, load_config
from matrixtitan.tools import convert_checkpoint, generate, plan
from matrixtitan.trainer import Trainer
from models import FAMILIES, build_model, family, family_of_model_type, huggingface_of
from models.base import LanguageModel
from models.initialization import Normal, fill_rows
from tests.distributed.test_trainer import TOLERANCE, config_for, corpus, curves
from tests.lib.distributed import run_distributed

__all__ = ["corpus"]  # a fixture
ENTRY = f"{__name__}:Bigram"


@dataclass(frozen=True)
class BigramFlavor:
    dim: int
    blocks: int
    tie_embeddings: bool = False


class Mixer(nn.Module):
    """Two matrices, no attention, no norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 3 * dim, bias=False)
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)).square())


class Bigram(LanguageModel):
    """Predicts a token from the one before it. Shares no layer, loss or name with Llama."""

    flavors = {"tiny": BigramFlavor(16, 2)}  # noqa: RUF012

    def __init__(self, flavor: BigramFlavor, *, vocab_size: int, **options: Any) -> None:
        super().__init__(flavor, vocab_size=vocab_size, **options)
        if self.tie_embeddings:
            raise ValueError("model.tie_embeddings: a bigram has no tied form")
        self.tail_patterns = ("tok_embeddings.weight", "predict.weight")
        self.tok_embeddings = nn.Embedding(vocab_size, flavor.dim)
        self.layers = nn.ModuleDict({str(i): Mixer(flavor.dim) for i in range(flavor.blocks)})
        self.predict = nn.Linear(flavor.dim, vocab_size)
        self.num_parameters = sum(param.numel() for param in self.parameters())

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.tok_embeddings(tokens)
        for block in self.layers.values():
            hidden = block(hidden)
        logits = self.predict(hidden)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def unit_names(self) -> list[list[str]]:
        return [["tok_embeddings"], *([f"layers.{i}"] for i in self.layers), ["predict"]]

    @torch.no_grad()
    def init_rows(
        self, fqn: str, full_shape: tuple[int, ...], start: int, out: Tensor, seed: int
    ) -> None:
        fill_rows(fqn, full_shape, start, out, seed, Normal(0.1))

    def flops_per_token(self, seq_len: int) -> float:
        return float(6 * self.num_parameters)

    @classmethod
    def flavor_from(cls, fields: Mapping[str, Any]) -> BigramFlavor:
        return BigramFlavor(**fields)


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "bigram", ENTRY)


def train_bigrams(*configs: Config) -> None:
    FAMILIES["bigram"] = ENTRY
    for config in configs:
        with Trainer(config) as trainer:
            trainer.train()


@pytest.mark.usefixtures("_registered")
def test_it_trains_as_under_ddp_and_its_checkpoint_is_read_by_the_tools(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bigram = {"model__name": "bigram", "model__flavor": "tiny"}
    runs: dict[str, dict[str, object]] = {
        "ddp": {},
        "matrix_fsdp": {"activation_checkpoint__mode": "full", "checkpoint__enable": "true"},
    }
    configs = [
        config_for(corpus, tmp_path / name, parallelism__strategy=name, **bigram, **overrides)
        for name, overrides in runs.items()
    ]
    run_distributed(train_bigrams, 2, *configs, timeout=120)
    expected, losses = (
        [loss for _, loss in curves(tmp_path / name)["loss/train"]] for name in runs
    )
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    assert losses[-1] < losses[0] - 0.01
    owned = {
        shard["role"]
        for shard in json.loads((tmp_path / "matrix_fsdp/plan.json").read_text())["shards"]
    }
    assert owned == {"matrix", "tail"}

    run = str(tmp_path / "matrix_fsdp" / "checkpoint")
    sampled = ["--prompt", "def", "--max-new-tokens", "3", "--temperature", "0"]
    generate.main(["--checkpoint", run, *sampled])
    text = capsys.readouterr().out
    assert text.startswith("def")
    convert_checkpoint.main([run, str(tmp_path / "bigram.pt"), "--to", "torch"])
    capsys.readouterr()
    generate.main(["--checkpoint", str(tmp_path / "bigram.pt"), *sampled])
    assert capsys.readouterr().out == text
    with pytest.raises(SystemExit, match=r"family bigram cannot be converted .* Hugging Face"):
        convert_checkpoint.main([run, str(tmp_path / "hf"), "--to", "huggingface"])
    monkeypatch.delitem(FAMILIES, "bigram")
    with pytest.raises(SystemExit, match=r"bigram\.pt: .* 'bigram' is unknown: known are llama3"):
        generate.main(["--checkpoint", str(tmp_path / "bigram.pt"), *sampled])


@pytest.mark.usefixtures("_registered")
def test_the_planner_knows_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["--world-size", "2", "--model.name", "bigram", "--model.flavor", "tiny"]
    assert plan.main(["--config", "debug", *argv]) == 0
    printed = capsys.readouterr().out
    assert "bigram tiny: 0.00 B parameters, 4 matrices; vocabulary 4096" in printed
    assert "predict" in printed  # the last unit

    missing = tmp_path / "missing.toml"
    missing.write_text('[model]\ntokenizer_path = "/nowhere"\n[training]\nglobal_batch_size = 8\n')
    assert plan.main(["--config", str(missing), *argv]) == 2
    assert "family bigram has no vocabulary of its own" in capsys.readouterr().err
    assert plan.main(["--config", str(missing), "--vocab-size", "100", *argv]) == 0

    assert plan.main(["--config", "debug", *argv, "--model.flavor", "tini"]) == 2
    assert (
        "model.flavor 'tini' of bigram is unknown: did you mean 'tiny'" in capsys.readouterr().err
    )
    heads = ["--optimizer.muon.per_head_patterns", '["layers.*.up.weight"]']
    assert plan.main(["--config", "debug", *argv, *heads]) == 2
    assert "heads of 0 rows" in capsys.readouterr().err


@pytest.mark.usefixtures("_registered")
def test_unknown_families_are_refused_with_the_nearest() -> None:
    known = r"choose 'llama3', 'bigram'; did you mean bigram\?"
    with pytest.raises(ConfigError, match=rf"model\.name is 'bigam'; {known}"):
        load_config(["--config", "debug", "--model.name", "bigam"])
    with pytest.raises(ValueError, match="'bigam' is unknown: did you mean 'bigram'"):
        build_model("bigam", "tiny", vocab_size=10, max_seq_len=4)
    with pytest.raises(ValueError, match="model_type is 'bigram'; only 'llama' can be converted"):
        family_of_model_type("bigram")
    assert family_of_model_type("llama") == "llama3"
    assert huggingface_of("llama3").MODEL_TYPE == "llama"


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("models.bigram:Bigram", "cannot be imported"),
        ("models.llama:Lama", "cannot be imported"),
        ("models.llama:LlamaFlavor", r"is no models\.base\.LanguageModel"),
    ],
)
def test_a_wrong_entry_is_named(
    entry: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "bigram", entry)
    with pytest.raises(RuntimeError, match=f"model family 'bigram': {entry} {complaint}"):
        family("bigram")
