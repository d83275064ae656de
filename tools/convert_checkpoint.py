#!/usr/bin/env python
"""Weights between our checkpoints, Hugging Face's safetensors and torch.save files, in any direction (Llama).

    ./run_train.sh --checkpoint.enable true  # which saves to outputs/debug/checkpoint
    tools/convert_checkpoint.py outputs/debug/checkpoint debug-hf --to huggingface
    tools/convert_checkpoint.py Llama-3.1-8B llama-8b --to matrixtitan --tokenizer Llama-3.1-8B/original/tokenizer.model
    tools/convert_checkpoint.py outputs/debug/checkpoint debug.pt --to torch

The input's format is seen from its files. Start a run from `llama-8b` with `--checkpoint.initial_load_path llama-8b`.
Tensors go through one at a time, so memory stays near the largest one; only a torch.save file is made as a whole.
Values are never rounded unless --dtype asks for it. No file read can run code. Needs the `tools` extra.
Next: `models/hf_llama.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matrixtitan.checkpoint import CheckpointError, StoredCheckpoint, TrainState
from matrixtitan.checkpoint import folder as folders
from matrixtitan.checkpoint.integrity import CHECKSUMS_FILE, Checksums, digest
from matrixtitan.checkpoint.metadata import METADATA_FILE
from matrixtitan.checkpoint.reading import CONFIG_FILE, FORMAT_VERSION, META_FILE, find_checkpoint
from matrixtitan.checkpoint.state import nested
from matrixtitan.checkpoint.storage import ChecksummedWriter
from matrixtitan.data.tokenizer import PATTERNS, Tokenizer, check_vocab, load_tokenizer
from models import MODELS
from models.hf_llama import (
    fqn_of,
    from_hf,
    from_hf_config,
    hf_name,
    is_rotary_buffer,
    to_hf,
    to_hf_config,
)
from models.layers import RopeScaling
from models.llama import Llama, LlamaFlavor
from tools.hf_tokenizer import write_tokenizer
from tools.in_place import in_place

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
COMPARED_ELEMENTS = 1 << 22  # at a time
HF_INDEX, HF_SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class LlamaModel:
    """What is needed to build the model. `tokenizer_path` is None where nothing says which tokenizer it had."""

    flavor: LlamaFlavor
    vocab_size: int
    max_seq_len: int
    tie_embeddings: bool
    tokenizer_path: str | None = None
    tokenizer_pattern: str = ""
    special_ids: Mapping[str, Any] | None = None  # bos_token_id and eos_token_id, from Hugging Face

    def build(self) -> Llama:
        """The model without values, on the current default device."""
        return Llama(
            self.flavor,
            vocab_size=self.vocab_size,
            max_seq_len=self.max_seq_len,
            tie_embeddings=self.tie_embeddings,
        )

    def flavor_name(self) -> str | None:
        """The name that a run's model.flavor knows this shape by; tied or not is a key of its own."""
        for name, flavor in MODELS["llama3"].items():
            if (
                dataclasses.replace(flavor, tie_embeddings=self.flavor.tie_embeddings)
                == self.flavor
            ):
                return name
        return None

    def to_config(self) -> dict[str, Any]:
        """The two sections of a run's config that describe the model, with the shape spelled out."""
        model = {
            "name": "llama3",
            "flavor": self.flavor_name(),
            "shape": dataclasses.asdict(self.flavor),
            "tie_embeddings": self.tie_embeddings,
            "tokenizer_path": self.tokenizer_path,
            "tokenizer_pattern": self.tokenizer_pattern,
            "special_ids": self.special_ids,
        }
        return {"model": model, "training": {"seq_len": self.max_seq_len}}


@dataclass(frozen=True)
class Weights:
    """A model's weights, wherever they are stored: `read(fqn)` gives one whole tensor, on the CPU."""

    model: LlamaModel
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], Tensor]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        with torch.device("meta"):
            return {name: param.shape for name, param in self.model.build().named_parameters()}

    def cast(self, dtype: torch.dtype) -> Weights:
        dtypes = dict.fromkeys(self.dtypes, dtype)
        return Weights(self.model, dtypes, lambda fqn: self.read(fqn).to(dtype))


# --- reading ---------------------------------------------------------------------------------------------------------


def open_weights(
    path: Path,
    step: int | None = None,
    tokenizer: str | None = None,
    tokenizer_pattern: str | None = None,
) -> Weights:
    """The weights at `path`, whatever their format; `step` chooses one of our checkpoints in a folder of them.

    `tokenizer` and its pattern override what is recorded. ValueError or CheckpointError, naming the file and what is
    wrong with it.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    huggingface = any(path.glob("*.safetensors*")) or any(path.glob("pytorch_model*.bin*"))
    if step is not None and (path.is_file() or huggingface):
        raise ValueError(f"--step is for a folder of checkpoints, which {path} is not")
    if path.is_file():
        weights = _open_torch(path)
    elif huggingface:
        weights = _open_huggingface(path)
    else:
        weights = _open_matrixtitan(path, step)
    model = weights.model
    if tokenizer is not None:
        model = dataclasses.replace(model, tokenizer_path=tokenizer, tokenizer_pattern="")
    if tokenizer_pattern is not None:
        if model.tokenizer_path is None:
            raise ValueError(
                f"--tokenizer-pattern {tokenizer_pattern}: of which file? Give it with --tokenizer"
            )
        model = dataclasses.replace(model, tokenizer_pattern=tokenizer_pattern)
    return dataclasses.replace(weights, model=model)


def _open_matrixtitan(path: Path, step: int | None) -> Weights:
    stored = StoredCheckpoint.open(_step_folder(path, step))
    entries = {
        key.removeprefix("model."): entry
        for key, entry in stored.tensors.items()
        if key.startswith("model.")
    }
    shapes = {fqn: entry.size for fqn, entry in entries.items()}
    dtypes = {fqn: entry.properties.dtype for fqn, entry in entries.items()}
    model = _model_of(stored.read_json(CONFIG_FILE), shapes, stored.path)
    return _checked(
        Weights(model, dtypes, lambda fqn: stored.read(f"model.{fqn}")), shapes, stored.path
    )


def _step_folder(path: Path, step: int | None) -> Path:
    if step is None:
        return find_checkpoint(path)
    for folder in (path, path / "checkpoint"):
        complete, _ = folders.list_steps(folder)
        if step in complete:
            return folders.step_folder(folder, step)
    raise ValueError(f"--step {step}: {path} has no complete checkpoint of that step")


def _open_torch(path: Path) -> Weights:
    try:  # mapped, so that a tensor's bytes are read when they are used
        content = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"{path} cannot be read as a torch.save file of plain tensors; a file that needs any other class is not "
            "read, since that could run code"
        ) from error
    if not _is_model_file(content):
        raise ValueError(
            f'{path} must hold {{"model": {{name: tensor}}, "config": ...}}, as this tool writes it: tensors alone do '
            "not tell a model's number of heads"
        )
    tensors = content["model"]
    shapes = {fqn: tensor.shape for fqn, tensor in tensors.items()}
    dtypes = {fqn: tensor.dtype for fqn, tensor in tensors.items()}
    model = _model_of(content["config"], shapes, path)
    return _checked(Weights(model, dtypes, tensors.__getitem__), shapes, path)


def _is_model_file(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and {"model", "config"} <= content.keys()
        and isinstance(content["model"], dict)
        and all(isinstance(value, Tensor) for value in content["model"].values())
    )


def _model_of(config: Any, shapes: Mapping[str, torch.Size], where: Path) -> LlamaModel:
    """From a run's config, or from what `LlamaModel.to_config` gave."""
    if "tok_embeddings.weight" not in shapes:
        raise ValueError(f"{where} holds no Llama model: there is no tok_embeddings.weight")
    try:
        section = config["model"]
        return LlamaModel(
            _flavor_of(section),
            vocab_size=shapes["tok_embeddings.weight"][0],
            max_seq_len=config["training"]["seq_len"],
            tie_embeddings="head.output.weight" not in shapes,
            tokenizer_path=section["tokenizer_path"],
            tokenizer_pattern=section.get("tokenizer_pattern", ""),
            special_ids=section.get("special_ids"),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{where}: its config names no model that models/ knows ({error}); add it there"
        ) from error


def _flavor_of(section: Mapping[str, Any]) -> LlamaFlavor:
    shape = section.get("shape")
    if shape is None:
        return MODELS[section["name"]][section["flavor"]]
    scaling = shape["rope_scaling"]
    rope = None if scaling is None else RopeScaling(**scaling)
    return LlamaFlavor(**{**shape, "rope_scaling": rope})


def _open_huggingface(folder: Path) -> Weights:
    config = _read_json(folder / "config.json")
    try:
        flavor = from_hf_config(config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    files: dict[str, Path] = {}
    shapes, dtypes = {}, {}
    doubled_output = None
    for path in _safetensors_files(folder):
        with _safetensors(path) as stored:
            for name in stored.keys():  # noqa: SIM118  (not a mapping)
                if is_rotary_buffer(name):
                    continue
                if name == "lm_head.weight" and flavor.tie_embeddings:
                    doubled_output = path
                    continue
                try:
                    fqn = fqn_of(name)
                except ValueError as error:
                    raise ValueError(f"{path}: {error}") from error
                if fqn in files:
                    raise ValueError(f"{folder}: {name} is in {files[fqn].name} and in {path.name}")
                entry = stored.get_slice(name)
                files[fqn], shapes[fqn] = path, torch.Size(entry.get_shape())
                dtypes[fqn] = SAFETENSORS_DTYPES.get(entry.get_dtype(), torch.uint8)

    if doubled_output is not None and "tok_embeddings.weight" in files:
        _check_tied(files["tok_embeddings.weight"], doubled_output)

    def read(fqn: str) -> Tensor:
        with _safetensors(files[fqn]) as stored:
            return from_hf(hf_name(fqn), stored.get_tensor(hf_name(fqn)), flavor)[1]

    model = LlamaModel(
        flavor,
        vocab_size=config["vocab_size"],
        max_seq_len=config.get("max_position_embeddings") or 2048,
        tie_embeddings=flavor.tie_embeddings,
        special_ids={key: config.get(key) for key in ("bos_token_id", "eos_token_id")},
    )
    return _checked(Weights(model, dtypes, read), shapes, folder)


def _check_tied(embedding_file: Path, output_file: Path) -> None:
    """ValueError unless the output that a tied model stores a second time is the embedding, to the bit.

    Refused, since transformers disagrees with itself: version 4 drops the output, version 5 uses it, untied.
    """
    with _safetensors(embedding_file) as first, _safetensors(output_file) as second:
        embedding = first.get_slice("model.embed_tokens.weight")
        output = second.get_slice("lm_head.weight")
        shape = embedding.get_shape()
        same = (shape, embedding.get_dtype()) == (output.get_shape(), output.get_dtype())
        rows = max(1, COMPARED_ELEMENTS // max(1, shape[-1]))
        for start in range(0, shape[0], rows):
            pair = (stored[start : start + rows] for stored in (embedding, output))
            same = same and torch.equal(*(part.view(torch.uint8) for part in pair))
            if not same:
                break
    if not same:
        raise ValueError(
            f"{output_file}: config.json says tie_word_embeddings, but lm_head.weight is not the embedding. Set "
            "tie_word_embeddings to false to keep both (as transformers 5 reads the files), or remove lm_head.weight "
            "(which transformers 4 ignores)"
        )


def _safetensors_files(folder: Path) -> list[Path]:
    names = [HF_SINGLE]
    if (folder / HF_INDEX).exists():
        names = sorted(set(_read_json(folder / HF_INDEX).get("weight_map", {}).values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(
                f"{folder} has no file {name!r}: weights are read from {HF_SINGLE} or the files that {HF_INDEX} "
                "names, and pytorch_model.bin is not read (save it anew with transformers' save_pretrained)"
            )
    others = {path.name for path in folder.glob("*.safetensors")} - set(names)
    if others:
        raise ValueError(
            f"{folder} holds {min(others)} ({len(others)} files) beside the model's files, and would not read it: move "
            "it away if it is no part of the model; merge an adapter into the weights first"
        )
    return [folder / name for name in names]


@contextmanager
def _safetensors(path: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ValueError(
            "Hugging Face's format is read with the safetensors package: pip install safetensors"
        ) from None
    try:
        with safe_open(path, framework="pt") as stored:
            yield stored
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: a Hugging Face model has one") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no table of keys")
    return content


def _checked(weights: Weights, stored: Mapping[str, torch.Size], where: Path) -> Weights:
    """`weights`, if what is stored is exactly the tensors of its model; ValueError otherwise."""
    expected = weights.shapes
    for problem, names in {
        "lacks": expected.keys() - stored.keys(),
        "holds what its model has no place for:": stored.keys() - expected.keys(),
    }.items():
        if names:
            raise ValueError(f"{where} {problem} {min(names)} ({len(names)} tensors)")
    for fqn, shape in expected.items():
        if stored[fqn] != shape:
            raise ValueError(
                f"{where}: {fqn} is {tuple(stored[fqn])}, but its config says {tuple(shape)}"
            )
        if weights.dtypes[fqn] not in SAFETENSORS_NAMES:
            raise ValueError(
                f"{where}: {fqn} is stored in a type other than {', '.join(DTYPES)} (quantised?), which is not read"
            )
    return weights


# --- writing ---------------------------------------------------------------------------------------------------------


def write_matrixtitan(weights: Weights, output: Path) -> None:
    """A folder with one checkpoint, `step-0`, of the model alone: for checkpoint.initial_load_path."""
    meta = {
        "format": FORMAT_VERSION,
        "contents": "model",
        "world_size": 1,
        "torch": torch.__version__,
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "train_state": dataclasses.asdict(TrainState()),
    }
    tensors = {
        f"model.{fqn}": torch.empty(shape, dtype=weights.dtypes[fqn], device="meta")
        for fqn, shape in weights.shapes.items()
    }
    with in_place(output) as written:
        step = folders.make_writing_folder(written, 0)
        writer = ChecksummedWriter(step)
        # DCP keeps all tensors of a file until the file is done, so each has a file of its own.
        writer.single_file_per_rank = False
        planner = _ReadWhenWritten(weights.read)
        try:
            with warnings.catch_warnings():  # that there is one process only
                warnings.simplefilter("ignore", UserWarning)
                dcp.save(nested(tensors), storage_writer=writer, planner=planner, no_dist=True)
        except dcp.CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
        checksums = Checksums(writer.chunks)
        for name, content in {META_FILE: meta, CONFIG_FILE: weights.model.to_config()}.items():
            folders.write_file(step / name, json.dumps(content, indent=1).encode())
            checksums.files[name] = digest((step / name).read_bytes())
        checksums.files[METADATA_FILE] = digest((step / METADATA_FILE).read_bytes())
        folders.write_file(step / CHECKSUMS_FILE, checksums.to_bytes())
        folders.publish(written, 0, step)


class _ReadWhenWritten(DefaultSavePlanner):
    """Plans from meta tensors; each is read from its source at the moment that DCP writes it."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._read(index.fqn.removeprefix("model."))


def write_torch(weights: Weights, output: Path) -> None:
    """{"model": {fqn: tensor}, "config": ...}, for torch.load with weights_only. Holds the model in memory."""
    content = {
        "model": {fqn: weights.read(fqn) for fqn in weights.shapes},
        "config": weights.model.to_config(),
    }
    with in_place(output) as written:
        try:
            torch.save(content, written)
        except RuntimeError as error:  # what torch makes of a full disk
            raise OSError(f"{output} could not be written: {error}") from error


def write_huggingface(weights: Weights, output: Path, shard_bytes: float = 5e9) -> None:
    """A folder for transformers' from_pretrained, with the tokenizer where it is known.

    Files are of at most `shard_bytes`, but for a tensor that is larger.
    """
    model, shapes = weights.model, weights.shapes
    sizes = {fqn: shape.numel() * weights.dtypes[fqn].itemsize for fqn, shape in shapes.items()}
    config = to_hf_config(
        model.flavor,
        vocab_size=model.vocab_size,
        max_seq_len=model.max_seq_len,
        tie_embeddings=model.tie_embeddings,
    )
    tokenizer = _tokenizer_of(model)
    special_ids = _special_ids(model, tokenizer)
    dtype = str(weights.dtypes["tok_embeddings.weight"]).removeprefix("torch.")
    shards = _split(sizes, shard_bytes)
    names = [
        HF_SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    with in_place(output) as written:
        written.mkdir()
        if tokenizer is not None:
            write_tokenizer(tokenizer, written, model.max_seq_len)
        for name, fqns in zip(names, shards, strict=True):
            _write_safetensors(written / name, weights, {fqn: shapes[fqn] for fqn in fqns})
        if len(shards) > 1:
            weight_map = {
                hf_name(fqn): name for name, fqns in zip(names, shards, strict=True) for fqn in fqns
            }
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            (written / HF_INDEX).write_text(json.dumps(index, indent=2))
        config_json = {**config, **special_ids, "torch_dtype": dtype}
        (written / "config.json").write_text(json.dumps(config_json, indent=2))
        (written / "generation_config.json").write_text(json.dumps(special_ids, indent=2))


def _tokenizer_of(model: LlamaModel) -> Tokenizer | None:
    """None if neither the input nor --tokenizer says which; ValueError if it is not there or another model's."""
    if model.tokenizer_path is None:
        return None
    try:
        tokenizer = load_tokenizer(model.tokenizer_path, model.tokenizer_pattern)
        check_vocab(tokenizer, model.vocab_size)
    except ValueError as error:
        raise ValueError(
            f"the model's tokenizer cannot be read; give its rank file with --tokenizer. {error}"
        ) from error
    return tokenizer


def _special_ids(model: LlamaModel, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Without them transformers takes 1 and 2, which are ordinary tokens here."""
    if model.special_ids is not None:
        return dict(model.special_ids)
    if tokenizer is None:
        raise ValueError(
            "the input does not name its tokenizer: give its rank file with --tokenizer"
        )
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}


def _split(sizes: Mapping[str, int], shard_bytes: float) -> list[list[str]]:
    """Names in order, in groups of at most `shard_bytes`; a larger tensor is alone."""
    shards: list[list[str]] = [[]]
    filled = 0
    for fqn, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(fqn)
        filled += size
    return shards


def _write_safetensors(path: Path, weights: Weights, shapes: Mapping[str, torch.Size]) -> None:
    """The format is 8 bytes with the header's length, the header, the tensors' bytes.

    Written here, since the package's own writer wants all tensors of a file in memory.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for fqn, shape in shapes.items():
        dtype, start = weights.dtypes[fqn], end
        end = start + shape.numel() * dtype.itemsize
        header[hf_name(fqn)] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors begin aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for fqn in shapes:
            _, tensor = to_hf(fqn, weights.read(fqn), weights.model.flavor)
            file.write(tensor.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


# --- command line ----------------------------------------------------------------------------------------------------


def convert(options: argparse.Namespace) -> str:
    """What was written, in a line or two. ValueError or CheckpointError for what cannot be converted."""
    weights = open_weights(
        options.input, options.step, options.tokenizer, options.tokenizer_pattern
    )
    if options.dtype:
        weights = weights.cast(DTYPES[options.dtype])
    if options.to == "huggingface":
        if not options.max_shard_gb > 0:
            raise ValueError(f"--max-shard-gb is {options.max_shard_gb}; it must be positive")
        write_huggingface(weights, options.output, options.max_shard_gb * 1e9)
    elif options.to == "torch":
        write_torch(weights, options.output)
    else:
        write_matrixtitan(weights, options.output)
    lines = [f"{options.output}: {len(weights.dtypes)} tensors"]
    if options.to == "matrixtitan":
        flavor = weights.model.flavor_name()
        lines.append(
            f"its shape is --model.flavor {flavor}"
            if flavor
            else f"to train from it, add its shape to models/llama.py: {weights.model.flavor}"
        )
    if options.to == "huggingface" and weights.model.tokenizer_path is None:
        lines.append(
            "no tokenizer is written: the input names none (--tokenizer gives its rank file)"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", type=Path, help="a checkpoint, a run's folder, or a file")
    parser.add_argument("output", type=Path, help="a new folder, or a new file for --to torch")
    parser.add_argument("--to", choices=("huggingface", "matrixtitan", "torch"), required=True)
    parser.add_argument("--step", type=int, help="which of our checkpoints (default: the newest)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="round to this (default: as stored)")
    parser.add_argument("--tokenizer", help="rank file, where the input's record is missing or old")
    parser.add_argument(
        "--tokenizer-pattern",
        choices=tuple(PATTERNS),
        help="as model.tokenizer_pattern, for a rank file of no known family",
    )
    parser.add_argument(
        "--max-shard-gb", type=float, default=5.0, help="size of a safetensors file (default 5)"
    )
    try:
        print(convert(parser.parse_args(argv)))
    except (ValueError, CheckpointError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
