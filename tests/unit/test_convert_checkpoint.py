"""Conversion: exact round trips, transformers' models in and out, little memory, clear errors."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from matrixtitan.checkpoint import Checkpointer
from matrixtitan.checkpoint.reading import CONFIG_FILE, META_FILE
from matrixtitan.checkpoint.writing import write_checkpoint
from matrixtitan.config import CheckpointConfig, Config, JobConfig, ModelConfig, TrainingConfig
from matrixtitan.data.tokenizer import (
    LLAMA3_PATTERN,
    Family,
    Tokenizer,
    load_tokenizer,
    write_ranks,
)
from matrixtitan.export import (
    StoredModel,
    Weights,
    huggingface,
    open_weights,
    write_huggingface,
    write_matrixtitan,
    write_torch,
)
from matrixtitan.export.tokenizer import write_tokenizer
from matrixtitan.export.weights import model_of
from matrixtitan.fsdp.row_segment import RowSegment
from matrixtitan.plan.local_param import LocalParam
from matrixtitan.tools.convert_checkpoint import main
from models.layers import RopeScaling
from models.llama import LLAMA3_FLAVORS, LlamaFlavor
from tests.lib.distributed import run_distributed

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

VOCAB, SEQ_LEN = 61, 48
SCALING = RopeScaling(8.0, 1.0, 4.0, original_max_seq_len=32)
UNTIED = LlamaFlavor(48, 2, 6, 2, 80, rope_scaling=SCALING)
TIED = LlamaFlavor(
    64, 2, 4, 1, 96, tie_embeddings=True, rope_scaling=None, rope_theta=10_000.0, norm_eps=1e-6
)
SPECIAL_IDS = {"bos_token_id": 59, "eos_token_id": 60}


def weights_of(flavor: LlamaFlavor, dtype: torch.dtype = torch.float32) -> Weights:
    """A model with random weights, norms too."""
    model = StoredModel(flavor, VOCAB, SEQ_LEN, flavor.tie_embeddings, special_ids=SPECIAL_IDS)
    net = model.build().to(dtype)
    values = {}
    for number, (fqn, param) in enumerate(net.named_parameters()):
        generator = torch.Generator().manual_seed(number)
        values[fqn] = (torch.randn(param.shape, generator=generator) * 0.2 + 0.1).to(dtype)
    return Weights(model, dict.fromkeys(values, dtype), values.__getitem__)


def logits_of(weights: Weights) -> Tensor:
    net = weights.model.build()
    net.load_state_dict({fqn: weights.read(fqn) for fqn in weights.shapes})
    with torch.no_grad():
        return net(tokens())


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(5))


def assert_same(first: Weights, second: Weights) -> None:
    assert first.dtypes == second.dtypes
    for fqn in first.shapes:
        assert torch.equal(first.read(fqn), second.read(fqn)), fqn


def fails(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The message that ends the command."""
    with pytest.raises(SystemExit) as ending:
        main([str(argument) for argument in argv])
    assert isinstance(ending.value.code, str), "expected an error message, not success"
    return ending.value.code


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("flavor", [UNTIED, TIED], ids=["untied", "tied"])
def test_round_trip_through_all_formats_is_exact(
    flavor: LlamaFlavor, dtype: torch.dtype, tmp_path: Path
) -> None:
    weights = weights_of(flavor, dtype)
    write_matrixtitan(weights, tmp_path / "ours")
    main([str(tmp_path / "ours"), str(tmp_path / "hf"), "--to", "huggingface"])
    main([str(tmp_path / "hf"), str(tmp_path / "file.pt"), "--to", "torch"])
    main([str(tmp_path / "file.pt"), str(tmp_path / "again"), "--to", "matrixtitan"])
    again = open_weights(tmp_path / "again")
    assert_same(again, weights)
    assert again.model == weights.model


@pytest.mark.parametrize("flavor", [UNTIED, TIED], ids=["untied", "tied"])
def test_transformers_reads_what_is_written(flavor: LlamaFlavor, tmp_path: Path) -> None:
    weights = weights_of(flavor)
    write_huggingface(weights, tmp_path / "hf", shard_bytes=40_000)
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 2
    theirs, info = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(logits_of(weights), theirs(tokens()).logits, atol=1e-4, rtol=0)
    config = theirs.generation_config
    assert (config.bos_token_id, config.eos_token_id) == (59, 60)
    assert theirs.generate(tokens()[:, :4], max_new_tokens=3, do_sample=False).shape[1] <= 7


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_own_model_loads(tied: bool, sharded: bool, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    size = "20KB" if sharded else "1GB"
    theirs.save_pretrained(tmp_path / "hf", max_shard_size=size)
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == sharded
    main([str(tmp_path / "hf"), str(tmp_path / "ours"), "--to", "matrixtitan"])
    with torch.no_grad():
        expected = theirs(tokens()).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(
        logits_of(open_weights(tmp_path / "ours")), expected, atol=1e-4, rtol=0
    )


def test_dtype_rounds_once(tmp_path: Path) -> None:
    weights = weights_of(UNTIED)
    write_matrixtitan(weights, tmp_path / "ours")
    main(
        [str(tmp_path / "ours"), str(tmp_path / "hf"), "--to", "huggingface", "--dtype", "bfloat16"]
    )
    assert_same(open_weights(tmp_path / "hf"), weights.cast(torch.bfloat16))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def add_tensors(folder: Path, **tensors: Tensor) -> None:
    """Store these tensors too. In a name, "__" stands for a dot."""
    path = folder / "model.safetensors"
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    safetensors_torch.save_file(safetensors_torch.load_file(path) | named, path)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    write_huggingface(weights_of(TIED), tmp_path / "tied")
    return tmp_path / "tied"


def test_old_and_doubled_tensors_are_left_out(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "COMPARED_ELEMENTS", 64 * 7)  # in several pieces
    weights = weights_of(TIED)
    add_tensors(
        tied,
        lm_head__weight=weights.read("tok_embeddings.weight").clone(),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8),
        model__rotary_emb__inv_freq=torch.ones(8),
    )
    assert_same(open_weights(tied), weights)


@pytest.mark.parametrize("change", ["first", "last", "sign", "rows", "dtype"])
def test_a_tied_model_s_own_output_is_not_dropped(
    change: str, tied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "COMPARED_ELEMENTS", 64 * 7)
    output = weights_of(TIED).read("tok_embeddings.weight").clone()
    if change == "sign":  # equal as numbers, not to the bit
        add_tensors(tied, model__embed_tokens__weight=torch.zeros_like(output))
        output = -torch.zeros_like(output)
    if change in ("first", "last"):
        output[0 if change == "first" else -1, 0] += 1
    output = {"rows": output[:-1], "dtype": output.bfloat16()}.get(change, output)
    add_tensors(tied, lm_head__weight=output.contiguous())
    message = (
        r"model\.safetensors: .* lm_head\.weight is not the embedding\. Set tie_word_embeddings"
    )
    with pytest.raises(ValueError, match=message):
        open_weights(tied)


def test_a_tied_config_with_an_output_of_its_own_is_imported_untied_as_the_message_says(
    tied: Path,
) -> None:
    """With tie_word_embeddings false the logits equal those of transformers 5."""
    add_tensors(tied, lm_head__weight=torch.randn(VOCAB, 64))
    edit_config(tied, tie_word_embeddings=False)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tied)
    with torch.no_grad():
        torch.testing.assert_close(
            logits_of(open_weights(tied)), theirs(tokens()).logits, atol=1e-4, rtol=0
        )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.experts.gate_proj.weight",
        "score.weight",
        "own.rotary_emb.inv_freq",
    ],
)
def test_a_tensor_that_is_not_ours_is_refused_by_name(name: str, tied: Path) -> None:
    add_tensors(tied, **{name.replace(".", "__"): torch.ones(8)})
    with pytest.raises(ValueError, match=rf"model\.safetensors: {re.escape(name)} is not a tensor"):
        open_weights(tied)


def test_transformers_models_with_biases_or_other_rotations_are_refused(tmp_path: Path) -> None:
    small = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16}
    small |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    for number, (keys, message) in enumerate(
        [
            ({"attention_bias": True}, "attention_bias is True"),
            ({"mlp_bias": True}, "mlp_bias is True"),
            ({"head_dim": 4}, "head_dim is 4"),
            ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
            (
                {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
                r"rope_parameters\.rope_type is 'linear'",
            ),
        ]
    ):
        config = transformers.LlamaConfig(**small, **keys)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / str(number))
        with pytest.raises(ValueError, match=rf"config\.json: {message}"):
            open_weights(tmp_path / str(number))


# --- runs -----------------------------------------------------------------------------------------


def save_as_a_run_does(folder: str, values: dict[str, Tensor]) -> None:
    """Two ranks: matrices whole, by turns; the embedding cut by rows; something of an optimizer."""
    rank = dist.get_rank()
    tensors: dict[str, Tensor] = {}
    for number, (fqn, value) in enumerate(values.items()):
        if fqn == "tok_embeddings.weight":
            rows = value[:1000] if rank == 0 else value[1000:]
            tensors[f"model.{fqn}"] = RowSegment(rows, value.shape, 1000 * rank)
        elif number % 2 == rank:
            tensors[f"model.{fqn}"] = value
            tensors[f"optimizer.{fqn}.momentum"] = torch.zeros_like(value)
    config = Config(
        model=ModelConfig(flavor="debug"), training=TrainingConfig(seq_len=SEQ_LEN, steps=7)
    )
    side_files = {
        META_FILE: {"format": 1, "contents": "full"},
        CONFIG_FILE: dataclasses.asdict(config),
    }
    encoded = {name: json.dumps(content).encode() for name, content in side_files.items()}
    group = dist.new_group(backend="gloo")
    for step in (3, 7):
        write_checkpoint(Path(folder), step, tensors, encoded, group)


def test_a_runs_checkpoint_becomes_a_transformers_model(tmp_path: Path) -> None:
    model = StoredModel(LLAMA3_FLAVORS["debug"], 4096, SEQ_LEN, tie_embeddings=False)
    net = model.build()
    net.init_weights(seed=1)
    values = {fqn: param.detach() for fqn, param in net.named_parameters()}
    run_distributed(save_as_a_run_does, 2, str(tmp_path / "run" / "checkpoint"), values)
    main([str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "huggingface", "--step", "3"])
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens()).logits, net(tokens()), atol=1e-4, rtol=0)
    assert theirs.generation_config.eos_token_id == 4095  # the embedded tokenizer's
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (fast.bos_token_id, fast.eos_token_id, len(fast)) == (4094, 4095, 4096)


@pytest.mark.parametrize(
    "text", [Path(__file__).read_text(), "naïve 日本語 \U0001f600\r\n\t 12345  x", ""]
)
def test_the_tokenizer_gives_the_same_ids(text: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    write_tokenizer(tokenizer, tmp_path, SEQ_LEN)
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(text, bos=True)
    assert fast(text)["input_ids"] == ids
    assert fast.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_keep_their_ids_across_a_gap(tmp_path: Path) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    rank_file = tmp_path / "bytes.tiktoken"
    write_ranks(rank_file, list(ranks))
    family = Family("gap", LLAMA3_PATTERN, {"<|b|>": 300, "<|e|>": 301}, "<|b|>", "<|e|>")
    write_tokenizer(Tokenizer(ranks, family, str(rank_file)), tmp_path, SEQ_LEN)
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert fast("ab<|e|>")["input_ids"] == [300, 97, 98, 301]


def test_a_named_tokenizer_pattern_goes_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into our checkpoints by name, and into tokenizer.json. Older checkpoints have no name."""
    rank_file = tmp_path / "ranks"
    write_ranks(rank_file, [*(bytes([byte]) for byte in range(256)), b"12", b"123"])
    write_huggingface(weights_of(UNTIED), tmp_path / "hf")
    to_ours = [tmp_path / "hf", tmp_path / "ours", "--to", "matrixtitan"]
    message = fails(capsys, *to_ours, "--tokenizer-pattern", "qwen2")
    assert "--tokenizer-pattern qwen2: of which file?" in message
    own = ["--tokenizer", rank_file, "--tokenizer-pattern", "qwen2"]
    main([str(argument) for argument in (*to_ours, *own)])
    model = open_weights(tmp_path / "ours").model
    assert (model.tokenizer_path, model.tokenizer_pattern) == (str(rank_file), "qwen2")
    old = {**model.to_config()["model"]}
    del old["tokenizer_pattern"]
    shapes = {"tok_embeddings.weight": torch.Size([VOCAB, 48])}
    assert model_of({"model": old, "training": {"seq_len": 1}}, shapes, tmp_path) == (
        dataclasses.replace(model, max_seq_len=1, tokenizer_pattern="")
    )

    wide = dataclasses.replace(model, vocab_size=260, special_ids=None)
    values = {fqn: torch.zeros(shape) for fqn, shape in Weights(wide, {}, model).shapes.items()}
    dtypes = dict.fromkeys(values, torch.float32)
    write_huggingface(Weights(wide, dtypes, values.__getitem__), tmp_path / "out")
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert fast("123")["input_ids"] == [258, 49, 50, 51]
    unmarked = dataclasses.replace(wide, tokenizer_pattern="")
    with pytest.raises(ValueError, match=r"cannot be read.*nothing says how it splits text"):
        write_huggingface(Weights(unmarked, dtypes, values.__getitem__), tmp_path / "none")


class FakeStrategy:
    """What a Checkpointer sees of a run that holds some rows of each weight."""

    plan = None

    def __init__(self, model: StoredModel) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.params = []
        for fqn, param in model.build().named_parameters():
            rows, full_shape = param.shape[0], tuple(param.shape)
            start, stop = rows * rank // world_size, rows * (rank + 1) // world_size
            tensor = torch.nn.Parameter(torch.zeros(stop - start, *full_shape[1:]))
            self.params.append(LocalParam(fqn, tensor, full_shape, "tail", 1, start))

    def local_parameters(self) -> list[LocalParam]:
        return self.params


def start_from(dump_folder: str, initial: str, model: StoredModel) -> dict[str, tuple[int, Tensor]]:
    config = Config(
        job=JobConfig(dump_folder=dump_folder),
        checkpoint=CheckpointConfig(enable=True, initial_load_path=initial),
    )
    run: Any = FakeStrategy(model)
    with Checkpointer(config, run, run) as checkpointer:
        assert checkpointer.load() is None  # a new run: step 0
    return {param.fqn: (param.start, param.tensor.detach()) for param in run.params}


def test_a_run_starts_from_a_converted_checkpoint(tmp_path: Path) -> None:
    weights = weights_of(UNTIED, torch.bfloat16)
    write_huggingface(weights, tmp_path / "hf")
    main([str(tmp_path / "hf"), str(tmp_path / "ours"), "--to", "matrixtitan"])
    place = (str(tmp_path / "run"), str(tmp_path / "ours"), weights.model)
    for loaded in run_distributed(start_from, 3, *place):
        for fqn, (start, rows) in loaded.items():
            expected = weights.read(fqn)[start : start + rows.shape[0]].float()
            assert torch.equal(rows, expected), fqn


def test_the_flavor_to_train_it_as_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_torch(weights_of(UNTIED), tmp_path / "odd.pt")
    main([str(tmp_path / "odd.pt"), str(tmp_path / "odd"), "--to", "matrixtitan"])
    assert "models/llama.py: LlamaFlavor(dim=48" in capsys.readouterr().out
    write_torch(weights_of(LLAMA3_FLAVORS["netlab"]), tmp_path / "known.pt")
    main([str(tmp_path / "known.pt"), str(tmp_path / "known"), "--to", "matrixtitan"])
    assert "--model.flavor netlab" in capsys.readouterr().out


# --- memory ---------------------------------------------------------------------------------------


class PeakMemory:
    """Peak growth of this process's memory inside the block, in bytes, without mapped files."""

    def __enter__(self) -> PeakMemory:
        self.start, self.peak = self._now(), 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, self._now() - self.start)

    def _now(self) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_stays_near_one_tensor_or_one_file(tmp_path: Path) -> None:
    flavor = LlamaFlavor(384, 16, 4, 4, 1024)  # 28M parameters, the largest tensor 1.6 MB
    model = StoredModel(flavor, VOCAB, SEQ_LEN, False, special_ids=SPECIAL_IDS)
    with torch.device("meta"):
        names = [fqn for fqn, _ in model.build().named_parameters()]
    shapes = Weights(model, {}, lambda fqn: torch.empty(0)).shapes
    made = Weights(model, dict.fromkeys(names, torch.float32), lambda fqn: torch.ones(shapes[fqn]))
    total = 4 * sum(shape.numel() for shape in shapes.values())
    steps: dict[str, Callable[[], None]] = {
        "ours": lambda: write_matrixtitan(made, tmp_path / "ours"),
        "to hf": lambda: write_huggingface(
            open_weights(tmp_path / "ours"), tmp_path / "hf", shard_bytes=total / 16
        ),
        "from hf": lambda: write_matrixtitan(open_weights(tmp_path / "hf"), tmp_path / "again"),
    }
    for name, step in steps.items():
        with PeakMemory() as memory:
            step()
        assert memory.peak < total / 4, f"{name}: {memory.peak / 1e6:.0f} of {total / 1e6:.0f} MB"


# --- what cannot be converted ---------------------------------------------------------------------


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    write_huggingface(weights_of(UNTIED), tmp_path / "hf", shard_bytes=40_000)
    return tmp_path / "hf"


def edit_config(folder: Path, **keys: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("to", ["huggingface", "matrixtitan", "torch"])
def test_an_existing_output_is_kept(
    hf: Path, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert "out exists already" in fails(capsys, hf, tmp_path / "out", "--to", to)
    assert not list((tmp_path / "out").iterdir())
    for output in (".", "/"):
        assert f"error: {output} exists already" in fails(capsys, hf, output, "--to", to)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow past 10 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("to", ["huggingface", "matrixtitan", "torch"])
def test_a_full_disk_ends_with_a_message(
    hf: Path, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with full_disk():
        message = fails(capsys, hf, tmp_path / "out", "--to", to)
    assert "could not be written" in message or "File too large" in message
    assert not list(tmp_path.glob("out*"))


def test_a_tokenizer_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write_tokenizer(load_tokenizer(), tmp_path, SEQ_LEN)
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # not installed
    with pytest.raises(ValueError, match="tokenizers is missing; install the tools extra"):
        write_tokenizer(load_tokenizer(), tmp_path, SEQ_LEN)


def test_the_size_of_files(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for size in ("nan", "0", "-1"):
        message = fails(capsys, hf, tmp_path / "out", "--to", "huggingface", "--max-shard-gb", size)
        assert f"--max-shard-gb is {float(size)}; it must be positive" in message
    main([str(hf), str(tmp_path / "out"), "--to", "huggingface", "--max-shard-gb", "inf"])
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "gpt2", "hidden_size": None}, "model_type is 'gpt2'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": 3}, "lacks layers.2."),
        ({"num_hidden_layers": 1}, "no place for: layers.1."),
        ({"vocab_size": 62}, r"is \(61, 48\), but its config says \(62, 48\)"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    ],
)
def test_other_models_are_refused(
    keys: dict[str, Any], message: str, hf: Path, tmp_path: Path
) -> None:
    edit_config(hf, **keys)
    with pytest.raises(ValueError, match=message):
        open_weights(hf)


def test_missing_files_are_named(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist"):
        open_weights(tmp_path / "nowhere")
    shard = sorted(hf.glob("*.safetensors"))[0]
    shard.rename(tmp_path / "kept")
    with pytest.raises(ValueError, match=f"no file '{shard.name}'"):
        open_weights(hf)
    (tmp_path / "kept").rename(shard)
    config = (hf / "config.json").read_text()
    (hf / "config.json").write_text(config[:-2])
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        open_weights(hf)
    (hf / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        open_weights(hf)


def test_weights_in_files_that_would_not_be_read_are_named(hf: Path) -> None:
    shards = sorted(hf.glob("*.safetensors"))
    safetensors_torch.save_file({"lora": torch.ones(2)}, hf / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"holds adapter_model\.safetensors \(1 files\)"):
        open_weights(hf)
    (hf / "adapter_model.safetensors").unlink()
    twice = safetensors_torch.load_file(shards[0]) | safetensors_torch.load_file(shards[1])
    safetensors_torch.save_file(twice, shards[1])
    with pytest.raises(ValueError, match=rf"is in {shards[0].name} and in {shards[1].name}"):
        open_weights(hf)


def test_an_index_cannot_point_outside_its_folder(hf: Path) -> None:
    index = hf / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "../secret.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"no file '\.\./secret\.safetensors'"):
        open_weights(hf)


def test_quantised_weights_are_refused(hf: Path) -> None:
    shard = sorted(hf.glob("*.safetensors"))[0]
    stored = safetensors_torch.load_file(shard)
    name = min(stored)
    stored[name] = stored[name].to(torch.int8)
    safetensors_torch.save_file(stored, shard)
    with pytest.raises(ValueError, match="type other than float32, bfloat16, float16"):
        open_weights(hf)


def test_a_damaged_shard_leaves_no_output(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = sorted(hf.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-4])
    assert f"{shard.name} is damaged" in fails(capsys, hf, tmp_path / "out", "--to", "torch")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("to", ["huggingface", "matrixtitan", "torch"])
def test_a_damaged_checkpoint_is_noticed_and_leaves_no_output(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_matrixtitan(weights_of(UNTIED), tmp_path / "ours")
    path = max(
        (tmp_path / "ours" / "step-0").glob("*.distcp"), key=lambda file: file.stat().st_size
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    message = fails(capsys, tmp_path / "ours", tmp_path / "out", "--to", to)
    assert path.name in message
    assert "damaged" in message
    assert not list(tmp_path.glob("out*"))


class Runs:
    """A pickle that runs a command when it is read without care."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_no_code_in_a_torch_file_runs(tmp_path: Path) -> None:
    trap = Runs(f"touch {tmp_path}/ran")
    torch.save({"model": {"w": torch.ones(2)}, "config": trap}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(trap))
    for name in ("zip.pt", "plain.pt"):
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            open_weights(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_torch_files_of_other_contents_are_refused(tmp_path: Path) -> None:
    torch.save(weights_of(UNTIED).read("tok_embeddings.weight"), tmp_path / "tensor.pt")
    with pytest.raises(ValueError, match="must hold"):
        open_weights(tmp_path / "tensor.pt")
    torch.save({"model": {"w": 3}, "config": {}}, tmp_path / "number.pt")
    with pytest.raises(ValueError, match="must hold"):
        open_weights(tmp_path / "number.pt")
    torch.save({"model": {"w": torch.ones(2)}, "config": {}}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"no tok_embeddings\.weight"):
        open_weights(tmp_path / "other.pt")
    torch.save({"model": {"tok_embeddings.weight": torch.ones(2)}, "config": {}}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="names no model"):
        open_weights(tmp_path / "c.pt")


def test_pickled_huggingface_weights_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    write_huggingface(weights_of(UNTIED), tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="save_pretrained"):
        open_weights(tmp_path / "hf")


def test_step_is_for_our_folders(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--step"):
        open_weights(hf, step=3)
    write_matrixtitan(weights_of(UNTIED), tmp_path / "ours")
    with pytest.raises(ValueError, match=r"--step 3: .* no complete checkpoint"):
        open_weights(tmp_path / "ours", step=3)


def test_a_tokenizer_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    weights = weights_of(UNTIED)
    model = dataclasses.replace(weights.model, special_ids=None, tokenizer_path="/gone/ranks")
    with pytest.raises(ValueError, match=r"--tokenizer.*/gone/ranks"):
        write_huggingface(dataclasses.replace(weights, model=model), tmp_path / "hf")
    model = dataclasses.replace(model, tokenizer_path=None)
    with pytest.raises(ValueError, match="--tokenizer"):
        write_huggingface(dataclasses.replace(weights, model=model), tmp_path / "hf")
    model = dataclasses.replace(model, tokenizer_path="")  # 4,096 tokens: another model's
    with pytest.raises(ValueError, match=r"--tokenizer.*vocabulary 61"):
        write_huggingface(dataclasses.replace(weights, model=model), tmp_path / "hf")
