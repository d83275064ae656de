"""Text to shards: packing, formats of files, bad records, the cache and its interruptions."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from matrixtitan.data import prepare, sources
from matrixtitan.data.prepare import TextSource, cached_shards, tokenize
from matrixtitan.data.shards import HEADER_BYTES, ShardWriter, TokenStream, dtype_for, read_header
from matrixtitan.data.sources import find_files, read_texts
from matrixtitan.data.tokenizer import Tokenizer, load_tokenizer
from matrixtitan.mistakes import is_mistake
from matrixtitan.tools import prepare_data
from tests.lib.corpus import byte_tokenizer, texts, write_jsonl

BOS, EOS = 256, 257


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return byte_tokenizer(tmp_path)


def packed(documents: Sequence[str]) -> list[int]:
    return [token for text in documents for token in (BOS, *text.encode(), EOS)]


def tokens_of(folder: Path, split: str, tokenizer: Tokenizer) -> list[int]:
    stream = TokenStream(sorted(folder.glob(f"{split}-*.bin")), tokenizer.fingerprint)
    return stream.read(0, len(stream)).tolist()


def make(
    source: TextSource, tokenizer: Tokenizer, folder: Path, **options: object
) -> prepare.Counts:
    folder.mkdir()
    return tokenize(source, tokenizer, folder, **({"validation_fraction": 0.0} | options))


def jsonl(path: Path, **options: str) -> TextSource:
    return TextSource("jsonl", [str(path)], **options)


# --- what is in the shards ------------------------------------------------------------------------


def test_documents_are_packed_in_order_between_bos_and_eos(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    documents = texts(30)
    counts = make(jsonl(write_jsonl(tmp_path / "a.jsonl", documents)), tokenizer, tmp_path / "out")
    assert tokens_of(tmp_path / "out", "train", tokenizer) == packed(documents)
    assert counts == prepare.Counts((30, 0), (len(packed(documents)), 0), 0)


def test_held_out_documents_are_in_their_own_shards(tmp_path: Path, tokenizer: Tokenizer) -> None:
    documents = texts(30)
    source = jsonl(write_jsonl(tmp_path / "a.jsonl", documents))
    make(source, tokenizer, tmp_path / "out", validation_fraction=0.2)
    held_out = documents[4::5]
    kept = [text for text in documents if text not in held_out]
    assert tokens_of(tmp_path / "out", "validation", tokenizer) == packed(held_out)
    assert tokens_of(tmp_path / "out", "train", tokenizer) == packed(kept)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_any_number_of_threads_gives_the_same(
    tmp_path: Path, tokenizer: Tokenizer, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_TASK_BYTES", 100)  # many tasks
    documents = texts(100)
    source = jsonl(write_jsonl(tmp_path / "a.jsonl", documents))
    make(source, tokenizer, tmp_path / "out", num_threads=num_threads)
    assert tokens_of(tmp_path / "out", "train", tokenizer) == packed(documents)


def test_gzip_glob_and_folder_give_the_same(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / "corpus"
    (folder / "below").mkdir(parents=True)
    documents = texts(3)
    (folder / "a.txt").write_text(documents[0])
    (folder / "b.txt.gz").write_bytes(gzip.compress(documents[1].encode()))
    (folder / "below" / "c.txt").write_text(documents[2])
    (folder / ".hidden").write_text("not this")
    paths = {
        "folder": [str(folder)],
        "glob": [str(folder / "**" / "*.txt*")],
        "files": [str(folder / "below" / "c.txt"), str(folder / "?.txt*")],
    }
    for name, path in paths.items():
        make(TextSource("text", path), tokenizer, tmp_path / name)
        assert tokens_of(tmp_path / name, "train", tokenizer) == packed(documents), name


def test_a_long_file_is_read_in_pieces_but_is_one_document(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_PIECE_BYTES", 50)
    text = "".join(f"line {number} é\n" for number in range(100))
    (tmp_path / "long.txt").write_text(text)
    counts = make(TextSource("text", [str(tmp_path / "long.txt")]), tokenizer, tmp_path / "out")
    assert tokens_of(tmp_path / "out", "train", tokenizer) == packed([text])
    assert counts.documents == (1, 0)


def test_a_chosen_field_and_blank_lines(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "one", "text": "no"}\n\n  \n{"content": "two"}')
    make(jsonl(path, field="content"), tokenizer, tmp_path / "out")
    assert tokens_of(tmp_path / "out", "train", tokenizer) == packed(["one", "two"])


def test_a_byte_order_mark_is_no_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhi")
    make(TextSource("text", [str(tmp_path / "a.txt")]), tokenizer, tmp_path / "out")
    assert tokens_of(tmp_path / "out", "train", tokenizer) == packed(["hi"])


def test_shards_roll_over_and_read_as_one_stream(tmp_path: Path, tokenizer: Tokenizer) -> None:
    documents = texts(20)
    source = jsonl(write_jsonl(tmp_path / "a.jsonl", documents))
    make(source, tokenizer, tmp_path / "out", shard_tokens=100)
    files = sorted((tmp_path / "out").glob("train-*.bin"))
    expected = packed(documents)
    assert len(files) == -(-len(expected) // 100)
    stream = TokenStream(files, tokenizer.fingerprint)
    assert stream.num_documents == 20
    for start, count in [(0, 5), (95, 10), (99, 1), (100, 1), (50, 300), (len(expected) - 3, 3)]:
        assert stream.read(start, count).tolist() == expected[start : start + count]


def test_one_mark_between_documents_where_bos_is_eos(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.eos_id = tokenizer.bos_id  # as GPT's <|endoftext|>
    make(jsonl(write_jsonl(tmp_path / "a.jsonl", ["a", "b"])), tokenizer, tmp_path / "out")
    assert tokens_of(tmp_path / "out", "train", tokenizer) == [BOS, ord("a"), BOS, ord("b")]


def test_wide_ids_survive(tmp_path: Path) -> None:
    assert dtype_for(65_536).itemsize == 2
    assert dtype_for(65_537).itemsize == 4
    writer = ShardWriter(tmp_path, "train", "ab" * 32, dtype_for(128_256), 1000)
    writer.append(np.array([0, 65_536, 128_255], dtype=np.uint32), 1)
    writer.close()
    assert TokenStream([tmp_path / "train-00000.bin"], "ab" * 32).read(0, 3).tolist() == [
        0,
        65_536,
        128_255,
    ]


def test_standard_library_is_read_in_seconds(tmp_path: Path) -> None:
    """The embedded data: this interpreter's Python files, without tests and installed packages."""
    files = find_files("python_stdlib", ())
    names = {file.name for file in files}
    assert {"argparse.py", "decoder.py"} <= names
    assert not {"site-packages", "test", "tests"} & {
        part for file in files for part in file.parts[-4:]
    }
    tokenizer = load_tokenizer("")
    counts = make(
        TextSource("python_stdlib"), tokenizer, tmp_path / "out", validation_fraction=0.02
    )
    assert sum(counts.tokens) > 1_000_000
    assert 0.005 < counts.tokens[1] / sum(counts.tokens) < 0.05
    assert counts.documents[1] == int(sum(counts.documents) * 0.02)


# --- what is wrong with a text --------------------------------------------------------------------

GOOD = b'{"text": "good"}\n'
BAD_LINES = [
    (b'{"text": "cut\n', r"line 2: not valid JSON"),
    (b'{"body": "x"}\n', r"line 2: no field 'text' \(it has body\)"),
    (b'["x"]\n', r"line 2: no field 'text' \(it is a list\)"),
    (b'{"text": 3}\n', r"line 2: field 'text' is not a text"),
    (b'{"text": null}\n', r"line 2: field 'text' is not a text \(it is a NoneType\)"),
    (b'{"text": "\xff"}\n', r"line 2: not UTF-8"),
    (b"[" * 100_000 + b"\n", r"line 2: not valid JSON"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_line_names_file_and_line(
    tmp_path: Path, tokenizer: Tokenizer, line: bytes, message: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + line + GOOD)
    with pytest.raises(ValueError, match=r"data\.sources\[0\]: .*a\.jsonl " + message) as error:
        make(jsonl(tmp_path / "a.jsonl"), tokenizer, tmp_path / "out")
    assert 'data.on_bad_record = "skip"' in str(error.value)


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_line_is_counted_and_logged_where_skipped(
    tmp_path: Path,
    tokenizer: Tokenizer,
    line: bytes,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + line + GOOD)
    with caplog.at_level(logging.WARNING, "matrixtitan"):
        counts = make(
            jsonl(tmp_path / "a.jsonl"), tokenizer, tmp_path / "out", on_bad_record="skip"
        )
    assert counts.skipped == 1
    assert tokens_of(tmp_path / "out", "train", tokenizer) == packed(["good", "good"])
    assert "a.jsonl line 2" in caplog.text
    assert "1 bad records skipped in all" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.txt", b"fine\nbad \xe9\n", "b.txt line 2: not UTF-8"),
        ("b.txt.gz", gzip.compress(b"word " * 10_000)[:-20], "b.txt.gz: cannot be read"),
        ("b.txt.gz", b"plain", "b.txt.gz: cannot be read"),
    ],
)
def test_bad_file(
    tmp_path: Path, tokenizer: Tokenizer, name: str, content: bytes, message: str
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("good")
    (corpus / name).write_bytes(content)
    (corpus / "c.txt").write_text("fine")
    source = TextSource("text", [str(corpus)])
    with pytest.raises(ValueError, match=message):
        make(source, tokenizer, tmp_path / "out")
    counts = make(source, tokenizer, tmp_path / "skipping", on_bad_record="skip")
    assert counts.skipped == 1
    assert tokens_of(tmp_path / "skipping", "train", tokenizer) == packed(["good", "fine"])


@pytest.mark.parametrize(
    ("content", "name", "kept"),
    [
        (b"one\n" * 15 + b"\xff\n" + b"two\n" * 15, "b.txt", "one\n" * 13 + "two\n" * 4),
        (b"\xff\n" + b"two\n" * 30, "b.txt", "two\n" * 17),
        (b"one\n" * 30 + b"\xff", "b.txt", "one\n" * 26),
        (gzip.compress(b"one\n" * 50_000, 0)[:-100], "b.txt.gz", None),
    ],
)
def test_a_long_file_with_a_bad_piece_stays_one_document(
    tmp_path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    name: str,
    kept: str | None,
) -> None:
    """The document loses its bad piece and keeps its marks: the next one does not run into it."""
    monkeypatch.setattr(sources, "_PIECE_BYTES", 50)
    (tmp_path / name).write_bytes(content)
    (tmp_path / "c.txt").write_text("next")
    paths = [str(tmp_path / name), str(tmp_path / "c.txt")]
    counts = make(TextSource("text", paths), tokenizer, tmp_path / "out", on_bad_record="skip")
    tokens = tokens_of(tmp_path / "out", "train", tokenizer)
    assert [t for t in tokens if t >= 256] == [BOS, EOS, BOS, EOS]
    assert counts.documents == (2, 0)
    assert kept is None or tokens == packed([kept, "next"])
    half = tmp_path / "half"
    source = TextSource("text", paths)
    counts = make(source, tokenizer, half, on_bad_record="skip", validation_fraction=0.5)
    assert counts.documents == (1, 1)
    assert tokens_of(half, "validation", tokenizer) == packed(["next"])


EMPTY_FILES = {
    "a.jsonl": b"",
    "b.jsonl": b"\n \n\n",
    "c.jsonl": b"\xef\xbb\xbf\n",
    "d.jsonl.gz": gzip.compress(b""),
    "e.jsonl": b'{"text": ""}\n\n{"text": ""}\n',
}


def test_empty_texts_beside_good_ones_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty text is no error, and no document of two marks. A text of white space is one."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, content in EMPTY_FILES.items():
        (corpus / name).write_bytes(content)
    write_jsonl(corpus / "f.jsonl", ["", "one", " ", "", "two"])
    with caplog.at_level(logging.INFO, "matrixtitan"):
        shards = cached(corpus, tokenizer, tmp_path / "cache", validation_fraction=0.0)
    stream = TokenStream(shards, tokenizer.fingerprint)
    assert stream.read(0, len(stream)).tolist() == packed(["one", " ", "two"])
    counts = json.loads((shards[0].parent / "counts.json").read_text())
    assert (counts["documents"], counts["skipped"], counts["empty"]) == ([3, 0], 0, 8)
    told = "6 files, 3 documents, 13 tokens, 0 of them held out, 8 empty texts left out"
    assert caplog.text.count(told) == 1


def test_an_empty_text_file_beside_good_ones_is_left_out_and_counted(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks also stand between files that are read in pieces, and where BOS is EOS."""
    monkeypatch.setattr(sources, "_PIECE_BYTES", 10)
    monkeypatch.setattr(prepare, "_TASK_BYTES", 15)  # documents go over from one task to the next
    tokenizer.eos_id = tokenizer.bos_id
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    long = ["line of one\n" * 5, "line of two\n" * 5]
    for name, text in {"a": "", "b": long[0], "c": "", "d": "\ufeff", "e": long[1]}.items():
        (corpus / f"{name}.txt").write_text(text)
    counts = make(TextSource("text", [str(corpus)]), tokenizer, tmp_path / "out")
    tokens = tokens_of(tmp_path / "out", "train", tokenizer)
    assert tokens == [BOS, *long[0].encode(), BOS, *long[1].encode()]
    assert (counts.documents, counts.skipped, counts.empty) == ((2, 0), 0, 3)


def test_empty_texts_take_no_share_of_the_held_out_documents(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """If every second row is empty, every fifth of the other rows is still held out."""
    documents = texts(50)
    rows = [row for text in documents for row in (text, "")]
    source = jsonl(write_jsonl(tmp_path / "a.jsonl", rows))
    counts = make(source, tokenizer, tmp_path / "out", validation_fraction=0.2)
    assert counts.documents == (40, 10)
    assert tokens_of(tmp_path / "out", "validation", tokenizer) == packed(documents[4::5])


@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
@pytest.mark.parametrize("name", EMPTY_FILES)
def test_a_source_of_empty_texts_alone_says_so(
    tmp_path: Path, tokenizer: Tokenizer, name: str, on_bad_record: str
) -> None:
    (tmp_path / name).write_bytes(EMPTY_FILES[name])
    count = 2 if name == "e.jsonl" else 1
    message = (
        rf"data\.sources\[0\]: no text to learn from in 1 files .*{name}.* {count} empty texts"
    )
    with pytest.raises(ValueError, match=message):
        make(jsonl(tmp_path / name), tokenizer, tmp_path / "out", on_bad_record=on_bad_record)
    with pytest.raises(ValueError, match=message):
        list(read_texts("jsonl", [tmp_path / name], key="data.sources[0]"))


def test_a_source_of_bad_records_alone_says_so(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{\n[]\n")
    with pytest.raises(
        ValueError, match=r"no text to learn from .* 2 bad records, which were skipped"
    ):
        make(jsonl(tmp_path / "a.jsonl"), tokenizer, tmp_path / "out", on_bad_record="skip")


# --- which files a path means ---------------------------------------------------------------------


def linked_corpus(folder: Path) -> Path:
    """Two parts, one behind a link; a second link to it, a link to a file, and loops."""
    corpus = folder / "c"
    for part in (corpus / "part1", folder / "real" / "below"):
        part.mkdir(parents=True)
        write_jsonl(part / "a.jsonl", texts(3))
    (corpus / "part2").symlink_to("../real")
    (corpus / "part3").symlink_to("part2")
    (corpus / "again.jsonl").symlink_to("part1/a.jsonl")
    (corpus / "part1" / "loop").symlink_to("..")
    (folder / "real" / "loop").symlink_to(".")
    return corpus


@pytest.mark.parametrize(
    "path", ["c", "c/**/*.jsonl", "c/**", "c/part2/../**/a*.jsonl", ["c/part1", "c/part[23]/**/*"]]
)
def test_a_folder_behind_a_symbolic_link_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | list[str]
) -> None:
    """By folder and by glob, each file comes once, and loops end."""
    linked_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c" / ".hidden").symlink_to("nowhere")
    files = find_files("jsonl", path)
    assert sorted(os.path.realpath(file) for file in files) == [
        str(tmp_path / "c" / "part1" / "a.jsonl"),
        str(tmp_path / "real" / "below" / "a.jsonl"),
    ]


def test_a_folder_and_a_glob_give_the_same_files_in_the_same_order(tmp_path: Path) -> None:
    corpus = linked_corpus(tmp_path)
    files = find_files("jsonl", str(corpus))
    assert files == find_files("jsonl", str(corpus / "**" / "*.jsonl"))
    assert files == [corpus / "again.jsonl", corpus / "part2" / "below" / "a.jsonl"]


@pytest.mark.parametrize("path", ["c", "c/**/*.jsonl", "c/*/x.jsonl", "c/part*", "c/part4"])
def test_a_dangling_link_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    corpus = linked_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    (corpus / "part4").symlink_to("../gone")
    with pytest.raises(ValueError, match=r"--path: .*/part4 is a symbolic link to '\.\./gone'"):
        find_files("jsonl", path, "--path")


@pytest.mark.parametrize("path", ["c", "c/**/*.jsonl", "c/part*", "c/part4"])
def test_a_circular_link_is_named_like_a_dangling_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    corpus = linked_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    (corpus / "part4").symlink_to("part4")
    said = r"--path: .*/part4 is a symbolic link to 'part4', which leads nowhere: mend the link or"
    with pytest.raises(ValueError, match=said):
        find_files("jsonl", path, "--path")


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = linked_corpus(tmp_path)
    scandir = os.scandir

    def refusing(folder: Path) -> object:
        if folder.name == "part1":  # as the system does; a test that runs as root is let in
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refusing)
    for path in (corpus, corpus / "*" / "a.*"):
        with pytest.raises(ValueError, match=r"data\.sources: .*Permission denied: '.*part1'"):
            find_files("jsonl", str(path))


def test_the_library_is_read_behind_links_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lib/test", "real"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "module.py").write_text("pass")
    (tmp_path / "lib" / "json").symlink_to("../real")
    (tmp_path / "lib" / "libpython.so").symlink_to("gone")  # no source
    monkeypatch.setattr(sources, "stdlib_folder", lambda: tmp_path / "lib")
    assert find_files("python_stdlib", ()) == [tmp_path / "lib" / "json" / "module.py"]


def test_no_file_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.sources\[3\]: no jsonl file at '.*nowhere"):
        find_files("jsonl", str(tmp_path / "nowhere"), "data.sources[3]")
    with pytest.raises(ValueError, match="needs a path"):
        find_files("text", ())


# --- what is wrong with a shard -------------------------------------------------------------------


def one_shard(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    make(jsonl(write_jsonl(tmp_path / "a.jsonl", texts(5))), tokenizer, tmp_path / "out")
    return tmp_path / "out" / "train-00000.bin"


def test_shards_of_another_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = one_shard(tmp_path, tokenizer)
    with pytest.raises(ValueError, match=r"train-00000\.bin was made by another tokenizer"):
        TokenStream([path], load_tokenizer("").fingerprint)


def test_damaged_shards(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = one_shard(tmp_path, tokenizer)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"train-00000\.bin is cut short"):
        read_header(path)
    path.write_bytes(b"\0" * HEADER_BYTES + whole[HEADER_BYTES:])  # never completed
    with pytest.raises(ValueError, match="is not a token shard"):
        read_header(path)
    path.write_bytes(whole[:8] + b"\x09" + whole[9:])
    with pytest.raises(ValueError, match="format version 9"):
        read_header(path)


# --- the cache ------------------------------------------------------------------------------------


def cached(path: Path, tokenizer: Tokenizer, cache: Path, **options: object) -> list[Path]:
    return cached_shards(jsonl(path), tokenizer, cache, **({"validation_fraction": 0.1} | options))


def test_cache_is_made_once_and_again_after_a_change(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def counting(*args: object, **options: object) -> prepare.Counts:
        made.append(1)
        return tokenize(*args, **options)

    monkeypatch.setattr(prepare, "tokenize", counting)
    path = write_jsonl(tmp_path / "a.jsonl", texts(20))
    cache = tmp_path / "cache"
    first = cached(path, tokenizer, cache)
    assert cached(path, tokenizer, cache) == first
    assert len(made) == 1
    others = [
        cached(path, load_tokenizer(""), cache),
        cached(path, tokenizer, cache, validation_fraction=0.2),
        cached(path, tokenizer, cache, on_bad_record="skip"),
    ]
    write_jsonl(path, texts(21))
    others.append(cached(path, tokenizer, cache))
    assert len(made) == 5
    assert len({shards[0].parent for shards in [first, *others]}) == 5


def test_interrupted_cache_starts_clean(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception half-way leaves nothing that a later call takes for whole."""
    path = write_jsonl(tmp_path / "a.jsonl", texts(20))
    cache = tmp_path / "cache"

    def interrupted(source: TextSource, tokenizer: Tokenizer, folder: Path, **_: object) -> None:
        (folder / "train-00000.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "tokenize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cached(path, tokenizer, cache)
    assert [entry.suffix for entry in cache.iterdir()] == [".lock"]
    stream = TokenStream([cached(path, tokenizer, cache)[0]], tokenizer.fingerprint)
    assert stream.num_documents == 18


def test_a_full_disk_names_the_cache(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(20))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", raising(full))
    with pytest.raises(ValueError, match=r"^data\.cache_dir: .* No space left .* free space") as e:
        cached(path, tokenizer, tmp_path / "cache")
    assert is_mistake(e.value)


def raising(error: Exception) -> Callable[..., None]:
    def act(*_: object) -> None:
        raise error

    return act


def _build_for_ever(path: Path, folder: Path, cache: Path, started: str) -> None:
    """What a process does that will be killed: hold the lock, write half a shard."""

    def stuck(source: TextSource, tokenizer: Tokenizer, below: Path, **_: object) -> None:
        (below / "train-00000.bin").write_bytes(b"half")
        Path(started).touch()
        time.sleep(60)

    prepare.tokenize = stuck
    cached(path, byte_tokenizer(folder), cache)


def _wait_for(path: Path, folder: Path, cache: Path, queue: multiprocessing.Queue) -> None:
    shards = cached(path, byte_tokenizer(folder), cache)
    queue.put((os.getpid(), [str(shard) for shard in shards]))


def test_others_wait_for_the_builder_and_survive_its_death(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(20))
    cache, started = tmp_path / "cache", tmp_path / "started"
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    builder = context.Process(target=_build_for_ever, args=(path, folders[0], cache, str(started)))
    waiting = [
        context.Process(target=_wait_for, args=(path, folder, cache, queue))
        for folder in folders[1:]
    ]
    builder.start()
    try:
        deadline = time.monotonic() + 20
        while not started.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for process in waiting:
            process.start()
        time.sleep(0.3)
        assert queue.empty()  # they wait
        os.kill(builder.pid, signal.SIGKILL)
        results = [queue.get(timeout=20) for _ in waiting]
    finally:
        for process in [builder, *waiting]:
            if process.pid is not None:
                process.kill()
                process.join()
    assert results[0][1] == results[1][1]
    stream = TokenStream([Path(results[0][1][0])], tokenizer.fingerprint)
    assert stream.num_documents == 18


def test_cache_folder_that_cannot_be_written(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(20))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"data\.cache_dir: cannot write in .*file"):
        cached(path, tokenizer, tmp_path / "file")


def test_skips_are_told_again_from_the_cache(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"{\n" + GOOD)
    cached(tmp_path / "a.jsonl", tokenizer, tmp_path / "cache", on_bad_record="skip")
    assert "1 bad records skipped in all" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "matrixtitan"):  # the level of rank 0 alone
        cached(tmp_path / "a.jsonl", tokenizer, tmp_path / "cache", on_bad_record="skip")
    (told,) = caplog.records
    assert told.levelno == logging.INFO and "1 bad records skipped in all" in told.message


# --- tools/prepare_data.py ------------------------------------------------------------------------


def test_prepare_data_tool(
    tmp_path: Path,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # it would hide the log from later tests
    monkeypatch.setattr(prepare_data, "init_logger", lambda: None)
    documents = texts(30)
    corpus = write_jsonl(tmp_path / "a.jsonl", documents, field="body")
    argv = ["--type", "jsonl", "--path", str(corpus), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="--tokenizer-pattern"):  # a rank file without a mark
        prepare_data.main([*argv, "--tokenizer", tokenizer.path])
    own = ["--tokenizer", tokenizer.path, "--tokenizer-pattern", "llama3"]
    with pytest.raises(SystemExit, match="no field 'text'"):
        prepare_data.main([*argv, *own])
    for wrong in (["--threads", "0"], ["--shard-tokens", "-1"], ["--output", "/dev/null/out"]):
        with pytest.raises(SystemExit, match=wrong[0] if wrong[0] != "--output" else "/dev/null"):
            prepare_data.main([*argv, *own, *wrong])
    assert not list(tmp_path.glob("out*"))
    prepare_data.main([*argv, *own, "--field", "body", "--validation-fraction", "0"])
    assert tokens_of(tmp_path / "out", "train", tokenizer) == packed(documents)
    assert "30 documents" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "counts.json").read_text())["documents"] == [30, 0]
    with pytest.raises(SystemExit, match="exists already"):
        prepare_data.main(argv)
    (tmp_path / "other.writing").mkdir()  # a call under way, or one that was killed
    with pytest.raises(SystemExit, match=r"other\.writing exists already"):
        prepare_data.main([*argv, *own, "--output", str(tmp_path / "other")])
    assert (tmp_path / "other.writing").exists()
