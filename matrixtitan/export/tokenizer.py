"""A rank file's tokenizer as Hugging Face's tokenizer.json and tokenizer_config.json.

Both give the same ids for any text. `huggingface.py` writes the files beside the weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from matrixtitan.data.tokenizer import Tokenizer, read_ranks
from matrixtitan.extras import need


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_seq_len: int) -> None:
    """Write both files to `folder`, for AutoTokenizer. A text begins with BOS, as in training.

    Unlike in training, the text of a special token becomes that token, since prompts and chat
    templates rely on it.
    """
    need("tokenizers")
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as FastTokenizer

    family = tokenizer.family
    vocabulary, merges = vocabulary_and_merges(read_ranks(Path(tokenizer.path)))
    # Special tokens are in the vocabulary too, which gives them their ids, gaps or not.
    model = models.BPE({**vocabulary, **family.special_tokens}, merges, ignore_merges=True)
    fast = FastTokenizer(model)
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(family.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in family.special_tokens]
    )
    fast.post_processor = processors.TemplateProcessing(
        single=f"{family.bos} $A", special_tokens=[(family.bos, tokenizer.bos_id)]
    )
    # not fast.save, which raises a bare Exception on a full disk
    (folder / "tokenizer.json").write_bytes(fast.to_str(pretty=True).encode())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": family.bos,
        "eos_token": family.eos,
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def vocabulary_and_merges(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Tokens as printable characters, and the pairs that form them, in the order of merging."""
    characters = characters_of_bytes()
    spelled = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = [
        (spelled[token[:cut]], spelled[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    return {spelled[token]: rank for token, rank in ranks.items()}, merges


def characters_of_bytes() -> list[str]:
    """The character that byte-level BPE writes for each byte.

    A printable byte is its own character; the others take the characters from U+0100 on, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
