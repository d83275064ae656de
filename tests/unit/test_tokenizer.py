"""The tokenizer: what ships, rank files of every family, errors with advice, training."""

from __future__ import annotations

import base64
import json
import logging
import pathlib
import sys
import typing

import pytest
import tiktoken.load

from matrixtitan.config import ModelConfig
from matrixtitan.data.tokenizer import (
    EMBEDDED_PATH,
    PATTERNS,
    Tokenizer,
    check_vocab,
    load_tokenizer,
    mark_file,
    read_ranks,
    write_ranks,
)
from matrixtitan.tools import train_tokenizer as trainer

SAMPLES = [
    "",
    "def f(x):\n    return x + 12345  # naïve café\n\n\n",
    "I'll say: \"it's 日本語, ok?\"\t\r\n   trailing   ",
    "emoji \U0001f600 and \x00 control",
    "<|begin_of_text|>not special<|end_of_text|>",
]


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return load_tokenizer("")


def write_llama_like(path: pathlib.Path, num_ranks: int) -> None:
    """A rank file of this many tokens: the bytes, then made-up pairs and triples of them."""
    tokens = [bytes([byte]) for byte in range(256)]
    number = 0
    while len(tokens) < num_ranks:
        tokens.append(number.to_bytes(3, "big"))
        number += 1
    write_ranks(path, tokens)


def test_embedded_has_4096_tokens_with_bos_and_eos(embedded: Tokenizer) -> None:
    assert embedded.n_words == embedded.vocab_size == 4096
    assert (embedded.bos_id, embedded.eos_id) == (4094, 4095)


@pytest.mark.parametrize("text", SAMPLES)
def test_round_trip(embedded: Tokenizer, text: str) -> None:
    ids = embedded.encode(text)
    assert embedded.decode(ids) == text
    assert all(0 <= token < 4094 for token in ids)  # special tokens in a text are ordinary text


def test_bos_and_eos_where_asked(embedded: Tokenizer) -> None:
    plain = embedded.encode("pass")
    assert embedded.encode("pass", bos=True, eos=True) == [embedded.bos_id, *plain, embedded.eos_id]
    assert embedded.encode("") == []


def test_compresses_source_code(embedded: Tokenizer) -> None:
    text = pathlib.Path(sys.modules["argparse"].__file__).read_text()
    assert len(text) / len(embedded.encode(text)) > 3.0


def test_a_very_long_run_is_encoded(embedded: Tokenizer) -> None:
    text = "x = '" + "a" * 1_200_000 + "'" + " " * 60_000 + "end"
    assert embedded.decode(embedded.encode(text)) == text


def test_half_a_surrogate_pair_is_replaced(embedded: Tokenizer) -> None:
    assert (
        embedded.decode(embedded.encode(json.loads(r'"a\ud800b \ud83d\ude00"')))
        == "a\ufffdb \U0001f600"
    )


def test_fingerprint_follows_ranks(embedded: Tokenizer, tmp_path: pathlib.Path) -> None:
    assert load_tokenizer(str(EMBEDDED_PATH)).fingerprint == embedded.fingerprint
    tokens = list(read_ranks(EMBEDDED_PATH))
    tokens[-1], tokens[-2] = tokens[-2], tokens[-1]
    write_ranks(tmp_path / "other", tokens)
    assert load_tokenizer(str(tmp_path / "other"), "llama3").fingerprint != embedded.fingerprint


def test_the_embedded_tokenizer_s_fingerprint_stays(embedded: Tokenizer) -> None:
    """The fingerprint is stable: cached tokens and checkpoints name it."""
    assert embedded.fingerprint.startswith("17d029dc8dc6d3242ffef35376a82700")


@pytest.mark.parametrize(
    ("num_ranks", "n_words", "bos", "eos"),
    [
        (128_000, 128_256, 128_000, 128_001),
        (50_256, 50_257, 50_256, 50_256),
        (100_256, 100_277, 100_257, 100_257),
    ],
)
def test_families(tmp_path: pathlib.Path, num_ranks: int, n_words: int, bos: int, eos: int) -> None:
    path = tmp_path / "tokenizer.model"
    write_llama_like(path, num_ranks)
    tokenizer = load_tokenizer(str(tmp_path))  # the folder that holds it will do
    assert (tokenizer.n_words, tokenizer.bos_id, tokenizer.eos_id) == (n_words, bos, eos)


def test_llama3_special_tokens(tmp_path: pathlib.Path) -> None:
    """Ids of Llama 3's own tokenizer, https://github.com/meta-llama/llama3 (llama/tokenizer.py)."""
    write_llama_like(tmp_path / "tokenizer.model", 128_000)
    special = load_tokenizer(str(tmp_path / "tokenizer.model")).family.special_tokens
    assert sorted(special.values()) == list(range(128_000, 128_256))
    assert special["<|start_header_id|>"] == 128_006
    assert special["<|end_header_id|>"] == 128_007
    assert special["<|eot_id|>"] == 128_009
    assert special["<|reserved_special_token_250|>"] == 128_255


# --- which pattern --------------------------------------------------------------------------------


def test_a_rank_file_of_an_unknown_family_is_refused(tmp_path: pathlib.Path) -> None:
    """Qwen's has 151,643 tokens; Llama 3's pattern would give other tokens than Qwen's."""
    write_llama_like(tmp_path / "qwen.tiktoken", 151_643)
    with pytest.raises(ValueError, match="nothing says how it splits text") as error:
        load_tokenizer(str(tmp_path / "qwen.tiktoken"))
    for part in ("151643 tokens", "qwen.tiktoken.meta.json", "--model.tokenizer_pattern", "qwen2"):
        assert part in str(error.value)
    named = load_tokenizer(str(tmp_path / "qwen.tiktoken"), "qwen2")
    assert (named.bos_id, named.eos_id, named.n_words) == (151_643, 151_644, 151_645)


def test_a_file_of_an_older_train_tokenizer_keeps_its_fingerprint(
    embedded: Tokenizer, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "old").write_bytes(EMBEDDED_PATH.read_bytes())
    with pytest.raises(ValueError, match=r"older tools/train_tokenizer.py it is llama3"):
        load_tokenizer(str(tmp_path / "old"))
    assert load_tokenizer(str(tmp_path / "old"), "llama3").fingerprint == embedded.fingerprint


def test_a_named_pattern_splits_text_by_its_own_rule(tmp_path: pathlib.Path) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [b"12", b"123", b"1234", b"aB"]
    write_ranks(tmp_path / "ranks", tokens)
    pieces = {}
    for pattern in PATTERNS:
        named = load_tokenizer(str(tmp_path / "ranks"), pattern)
        assert named.decode(named.encode("1234aB")) == "1234aB"
        pieces[pattern] = [named.decode([token]) for token in named.encode("1234aB")]
    assert pieces == {
        "llama3": ["123", "4", "aB"],
        "gpt2": ["1234", "aB"],
        "o200k": ["123", "4", "a", "B"],
        "qwen2": ["1", "2", "3", "4", "aB"],
    }


def test_a_named_pattern_leaves_a_known_family_its_special_tokens(tmp_path: pathlib.Path) -> None:
    write_llama_like(tmp_path / "ranks", 50_256)
    known, named = (load_tokenizer(str(tmp_path / "ranks"), name) for name in ("", "qwen2"))
    assert (known.family.pattern, named.family.pattern) == (PATTERNS["gpt2"], PATTERNS["qwen2"])
    assert known.family.special_tokens == named.family.special_tokens


def test_qwen2_pattern_is_transformers_own() -> None:
    qwen2 = pytest.importorskip("transformers.models.qwen2.tokenization_qwen2")
    assert PATTERNS["qwen2"] == qwen2.PRETOKENIZE_REGEX


def test_the_config_takes_the_patterns_that_there_are() -> None:
    hint = typing.get_type_hints(ModelConfig)["tokenizer_pattern"]
    assert typing.get_args(hint) == ("", *PATTERNS)
    with pytest.raises(
        ValueError, match=r"model\.tokenizer_pattern is 'lama3'; choose 'llama3', 'gpt2'"
    ):
        load_tokenizer("", "lama3")


def test_a_mark_belongs_to_one_rank_file(embedded: Tokenizer, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ranks"
    path.write_bytes(EMBEDDED_PATH.read_bytes())
    mark_file(path).write_bytes(mark_file(EMBEDDED_PATH).read_bytes())
    assert load_tokenizer(str(path)).fingerprint == embedded.fingerprint
    write_ranks(path, list(read_ranks(EMBEDDED_PATH))[:-1])
    with pytest.raises(ValueError, match=r"ranks\.meta\.json is the mark of another rank file"):
        load_tokenizer(str(path))


def test_a_damaged_mark_is_named(embedded: Tokenizer, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ranks"
    path.write_bytes(EMBEDDED_PATH.read_bytes())
    for content in ("", "[]", "{}", '{"made_by": "tools/train_tokenizer.py", "pattern": "llama3"}'):
        mark_file(path).write_text(content)
        with pytest.raises(ValueError, match=r"ranks\.meta\.json is not what"):
            load_tokenizer(str(path))
    for made_by, pattern in (("tools/train_tokenizer.py", ["gpt5"]), ("me", "llama3")):
        mark = {"made_by": made_by, "pattern": pattern, "fingerprint": embedded.fingerprint}
        mark_file(path).write_text(json.dumps(mark))
        with pytest.raises(ValueError, match=r"ranks\.meta\.json says made_by .* known are"):
            load_tokenizer(str(path))
    assert load_tokenizer(str(path), "llama3").fingerprint == embedded.fingerprint


# --- what is no rank file -------------------------------------------------------------------------


def test_missing_file_says_what_to_do(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="no file") as error:
        load_tokenizer(str(tmp_path / "tokenizer.model"))
    assert """--model.tokenizer_path "" --data.sources '[{type = "python_stdlib"}]'""" in str(
        error.value
    )


def test_not_a_rank_file_names_the_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("aGk= 0\n{}\n")
    with pytest.raises(ValueError, match=r"tokenizer\.json, line 2: expected a base64 token"):
        load_tokenizer(str(path))


def test_damaged_rank_files(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ranks"
    tokens = [bytes([byte]) for byte in range(256)]
    write_ranks(path, tokens[:-3])
    with pytest.raises(ValueError, match="no token for 3 of the 256 bytes"):
        load_tokenizer(str(path))
    write_ranks(path, [*tokens, tokens[0]])
    with pytest.raises(ValueError, match=r"line 257: the token .* came before"):
        load_tokenizer(str(path))
    write_ranks(path, tokens)
    path.write_bytes(path.read_bytes() + base64.b64encode(b"ab") + b" 3\n")
    with pytest.raises(ValueError, match="same rank"):
        load_tokenizer(str(path))
    write_ranks(path, tokens)
    path.write_bytes(
        path.read_bytes() + base64.b64encode(b"ab") + b" 258\n"
    )  # 257 ranks: EOS is 258
    with pytest.raises(ValueError, match="special tokens' ids"):
        load_tokenizer(str(path), "llama3")


def test_check_vocab(embedded: Tokenizer) -> None:
    check_vocab(embedded, 4096)
    with pytest.raises(
        ValueError, match=r"4096 tokens, the model's vocabulary 4000.*tokenizer_path"
    ):
        check_vocab(embedded, 4000)


def test_trained_file_gives_the_trainer_s_tokens(tmp_path: pathlib.Path) -> None:
    corpus = [
        pathlib.Path(sys.modules[name].__file__).read_text()
        for name in ("argparse", "inspect", "pickle")
    ]
    trained = trainer.train(iter(corpus), 600)
    write_ranks(tmp_path / "small", trainer.tokens_in_rank_order(trained))
    written = load_tokenizer(str(tmp_path / "small"), trainer.PATTERN)
    assert written.n_words == 600
    for text in [*SAMPLES, *corpus, pathlib.Path(sys.modules["base64"].__file__).read_text()]:
        assert written.encode(text) == trained.encode(text).ids


def test_llama3_pattern() -> None:
    """Words with one sign before them, digits by threes, line ends together."""
    pre_tokenizer = trainer.train(iter(["a"]), 258).pre_tokenizer
    pieces = [piece for piece, _ in pre_tokenizer.pre_tokenize_str("a.b(c)  12345's\n\n  x")]
    assert pieces == ["a", ".b", "(c", ")", "Ġ", "Ġ", "123", "45", "'s", "ĊĊ", "Ġ", "Ġx"]


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with a text, a file of a byte-order mark alone, and an earlier output."""
    monkeypatch.chdir(tmp_path)
    # it would hide the log from later tests
    monkeypatch.setattr(trainer, "init_logger", lambda: None)
    pathlib.Path("text").write_text("some words and some more words " * 3)
    pathlib.Path("mark").write_bytes(b"\xef\xbb\xbf")
    pathlib.Path("earlier").write_text("precious")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "earlier"], "earlier exists already"),
        (["--output", "text/out"], "File exists: 'text'"),
        (["--vocab-size", "1"], "--vocab-size 1 is not from 258"),
        (["--vocab-size", "10000001"], "--vocab-size 10000001 is not from 258 .* to 10000000"),
        (["--vocab-size", "4000"], "--vocab-size 4000: the text gives .* tokens"),
        (["--path", "mark"], "--path: no text to learn from in 1 files .*mark"),
        (["--path", "gone"], "--path: no text file at 'gone'"),
        (["--path"], "2"),
    ],
)
def test_wrong_arguments_of_the_trainer(
    arguments: list[str], message: str, folder: pathlib.Path
) -> None:
    usual = ["--output", "out", "--vocab-size", "262", "--path", "text"]
    with pytest.raises(SystemExit, match=message):
        trainer.main([*usual, *arguments])
    assert pathlib.Path("earlier").read_text() == "precious"
    assert {path.name for path in folder.iterdir()} == {"earlier", "mark", "text"}


def test_a_size_that_names_another_family_leaves_no_file(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "load_tokenizer", lambda path, pattern: load_tokenizer())
    with pytest.raises(SystemExit, match="--vocab-size 262 would be taken for"):
        trainer.main(["--output", "out", "--vocab-size", "262", "--path", "text"])
    assert not list(folder.glob("out*"))


def test_the_trainer_writes_its_file(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.main(["--output", "new/out", "--vocab-size", "262", "--path", "text"])
    assert load_tokenizer("new/out").n_words == 262  # by its mark
    assert capsys.readouterr().out.startswith("new/out: 262 tokens, ")
    assert {path.name for path in pathlib.Path("new").iterdir()} == {"out", "out.meta.json"}
    assert tiktoken.load.load_tiktoken_bpe("new/out") == read_ranks(pathlib.Path("new/out"))


def test_the_trainer_leaves_empty_texts_out(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    pathlib.Path("none").touch()
    with caplog.at_level(logging.INFO, "matrixtitan"):
        trainer.main(["--output", "out", "--vocab-size", "262", "--path", "mark", "none", "text"])
    assert [record.getMessage() for record in caplog.records] == [
        "--path: 3 files",
        "--path: 2 empty texts left out",
    ]


def test_the_trainer_takes_what_training_takes(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long runs, which are encoded in pieces, and lone surrogates."""
    record = json.dumps({"text": "abc" * 20_000 + " \ud800 and"})
    pathlib.Path("records.jsonl").write_text(record)
    arguments = ["--output", "out", "--vocab-size", "260", "--path", "records.jsonl"]
    trainer.main([*arguments, "--type", "jsonl"])
    assert capsys.readouterr().out.startswith("out: 260 tokens, ")


def test_a_file_that_splits_text_differently_is_not_kept(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "cut_long_runs", list)  # the trainer's tokens of single characters
    with pytest.raises(SystemExit, match="split a text in different tokens"):
        trainer.main(["--output", "out", "--vocab-size", "262", "--path", "text"])
    assert not list(folder.glob("out*"))
