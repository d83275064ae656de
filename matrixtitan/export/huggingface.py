"""A model in Hugging Face's folder: safetensors files, config.json and the tokenizer.

The files are read and written by the safetensors package. DCP's `hf_storage` is not used: it knows
tensors by the name that they are stored under, and ours are renamed and reordered on the way.
Next: `models/base.py`, whose `HuggingFace` maps one tensor, and `tokenizer.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matrixtitan.data.tokenizer import Tokenizer, check_vocab, load_tokenizer
from matrixtitan.export.tokenizer import write_tokenizer
from matrixtitan.export.weights import StoredModel, Weights, checked
from matrixtitan.extras import need
from matrixtitan.in_place import in_place
from models import family_of_model_type, huggingface_of

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
COMPARED_ELEMENTS = 1 << 22
"""Elements of two tensors that are compared at a time."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def open_huggingface(folder: Path) -> Weights:
    need("safetensors")
    config = _read_json(folder / "config.json")
    try:
        family = family_of_model_type(config.get("model_type"))
        hf = huggingface_of(family)
        flavor = hf.from_hf_config(config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    files: dict[str, Path] = {}
    shapes, dtypes = {}, {}
    doubled_output = None
    for path in _safetensors_files(folder):
        with _safetensors(path) as stored:
            for name in stored.keys():  # noqa: SIM118  (not a mapping)
                if hf.is_redundant(name):
                    continue
                if name == "lm_head.weight" and flavor.tie_embeddings:
                    doubled_output = path
                    continue
                try:
                    fqn = hf.fqn_of(name)
                except ValueError as error:
                    raise ValueError(f"{path}: {error}") from error
                if fqn in files:
                    raise ValueError(f"{folder}: {name} is in {files[fqn].name} and in {path.name}")
                entry = stored.get_slice(name)
                files[fqn], shapes[fqn] = path, torch.Size(entry.get_shape())
                dtypes[fqn] = _DTYPES.get(entry.get_dtype(), torch.uint8)

    if doubled_output is not None and "tok_embeddings.weight" in files:
        _check_tied(files["tok_embeddings.weight"], doubled_output)

    def read(fqn: str) -> Tensor:
        with _safetensors(files[fqn]) as stored:
            name = hf.hf_name(fqn)
            return hf.from_hf(name, stored.get_tensor(name), flavor)[1]

    model = StoredModel(
        flavor,
        vocab_size=config["vocab_size"],
        max_seq_len=config.get("max_position_embeddings") or 2048,
        tie_embeddings=flavor.tie_embeddings,
        special_ids={key: config.get(key) for key in ("bos_token_id", "eos_token_id")},
        family=family,
    )
    return checked(Weights(model, dtypes, read), shapes, folder)


def _check_tied(embedding_file: Path, output_file: Path) -> None:
    """ValueError unless the output that a tied model stores again equals the embedding bitwise.

    A different output is refused because versions of transformers disagree: version 4 ignores it,
    version 5 uses it, untied.
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
            f"{output_file}: config.json says tie_word_embeddings, but lm_head.weight is not the "
            "embedding. Set tie_word_embeddings to false to keep both (as transformers 5 reads the "
            "files), or remove lm_head.weight (which transformers 4 ignores)"
        )


def _safetensors_files(folder: Path) -> list[Path]:
    names = [SINGLE_FILE]
    if (folder / INDEX_FILE).exists():
        names = sorted(set(_read_json(folder / INDEX_FILE).get("weight_map", {}).values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(
                f"{folder} has no file {name!r}: weights are read from {SINGLE_FILE} or the files "
                f"that {INDEX_FILE} names. pytorch_model.bin is not read: load it with "
                "transformers and save it again with save_pretrained"
            )
    others = {path.name for path in folder.glob("*.safetensors")} - set(names)
    if others:
        raise ValueError(
            f"{folder} holds {min(others)} ({len(others)} files) beside the model's files, and "
            "would not read it: move it away if it is no part of the model; merge an adapter into "
            "the weights first"
        )
    return [folder / name for name in names]


@contextmanager
def _safetensors(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

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


def write_huggingface(weights: Weights, output: Path, shard_bytes: float = 5e9) -> None:
    """A folder for transformers' from_pretrained, with the tokenizer if the model names one.

    A file has at most `shard_bytes`, unless a single tensor is larger. Memory holds one file.
    """
    need("safetensors", "tokenizers")
    model, shapes = weights.model, weights.shapes
    sizes = {fqn: shape.numel() * weights.dtypes[fqn].itemsize for fqn, shape in shapes.items()}
    hf = huggingface_of(model.family)
    config = hf.to_hf_config(
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
        SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    with in_place(output) as written:
        written.mkdir()
        if tokenizer is not None:
            write_tokenizer(tokenizer, written, model.max_seq_len)
        for name, fqns in zip(names, shards, strict=True):
            _write_safetensors(written / name, weights, fqns)
        if len(shards) > 1:
            weight_map = {
                hf.hf_name(fqn): name
                for name, fqns in zip(names, shards, strict=True)
                for fqn in fqns
            }
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            (written / INDEX_FILE).write_text(json.dumps(index, indent=2))
        config_json = {**config, **special_ids, "torch_dtype": dtype}
        (written / "config.json").write_text(json.dumps(config_json, indent=2))
        (written / "generation_config.json").write_text(json.dumps(special_ids, indent=2))


def _tokenizer_of(model: StoredModel) -> Tokenizer | None:
    """The recorded tokenizer; ValueError if its file is missing or belongs to another model."""
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


def _special_ids(model: StoredModel, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """BOS and EOS. Without them transformers takes 1 and 2, which are ordinary tokens here."""
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


def _write_safetensors(path: Path, weights: Weights, fqns: list[str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    hf = huggingface_of(weights.model.family)
    tensors = dict(hf.to_hf(fqn, weights.read(fqn), weights.model.flavor) for fqn in fqns)
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error
