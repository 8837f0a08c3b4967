"""Sound input beyond what a reader takes is read whole, or refused by the limit's name: it is never called
damaged, and --skip_damaged never drops it."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from model.errors import UserError
from pretrain.classification.sources import Example, read_examples
from pretrain.prepare.sources.files import TextFiles

MARK = "\ufeff"
DOCUMENTS = [f"document {number} {MARK}\u00e9\n" * 4 for number in range(20)]
JSON_LINES = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
TEXTS = {
    "a.jsonl": JSON_LINES,
    "a.json": json.dumps(DOCUMENTS),
    "a.csv": "id,text\n" + "".join(f'1,"{text}"\n' for text in DOCUMENTS),
    "a.tsv": '"text"\n' + "".join(f'"{text}"\n' for text in DOCUMENTS),
    "a.txt": DOCUMENTS[0],
}


def frame(data: bytes, window_log: int, dictionary: int | None = None) -> bytes:
    """A zstd frame (RFC 8878) of raw blocks with a window of 2^window_log bytes."""
    header = bytes([0 if dictionary is None else 1, window_log - 10 << 3])
    header += b"" if dictionary is None else bytes([dictionary])
    size = 1 << min(window_log, 17)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    blocks = [
        (len(piece) << 3 | (number == len(pieces) - 1)).to_bytes(3, "little") + piece
        for number, piece in enumerate(pieces)
    ]
    return b"\x28\xb5\x2f\xfd" + header + b"".join(blocks)


def outcome(path: Path, **options: Any) -> tuple[list[str], dict[str, int]] | str:
    """Texts and what was left out, or the message; the same with --skip_damaged."""
    found: list[Any] = []
    for skip_damaged in (False, True):
        try:
            source = TextFiles([path], skip_damaged=skip_damaged, **options)
            source.check()
            records = [record for unit in source.units() for record in source.read(unit)]
            texts = [record.text for record in records if not isinstance(record, str)]
            left_out = [record for record in records if isinstance(record, str)]
            found.append((texts, {reason: left_out.count(reason) for reason in left_out}))
        except UserError as error:
            found.append(str(error))
    assert found[0] == found[1] and "damaged" not in str(found[0]), found
    return found[0]


def read_or_named(path: Path, expected: Iterable[str], *words: str, **options: Any) -> bool:
    """Whether all of a file was read; else the message has the words, and is one line."""
    result = outcome(path, **options)
    if isinstance(result, str):
        assert all(word in result for word in (path.name, *words)) and "\n" not in result, result
        return False
    assert result == (list(expected), {})
    return True


def expected_of(name: str) -> list[str]:
    return DOCUMENTS[:1] if name == "a.txt" else DOCUMENTS


@pytest.mark.parametrize("name", TEXTS)
def test_zstd_windows_and_dictionaries(tmp_path, name):
    path, data = tmp_path / f"{name}.zst", TEXTS[name].encode()
    for window_log in [*random.Random(name).sample(range(10, 28), 3), 27, 28, 31, 41]:
        path.write_bytes(frame(data, window_log))
        assert read_or_named(path, expected_of(name), "window of more than", "zstd -dc --long=31") == (
            window_log <= 27
        )
    # A long window may begin in the middle of a file, and behind a frame that is skipped.
    path.write_bytes(b"\x50\x2a\x4d\x18\x01\0\0\0x" + frame(data[:40], 20) + frame(data[40:], 31))
    assert not read_or_named(path, [], "window of more than")
    path.write_bytes(frame(data, 20, dictionary=7))
    assert not read_or_named(path, [], "dictionary", "zstd -dc -D")


@pytest.mark.parametrize("name", TEXTS)
def test_compression_of_several_streams_is_read(tmp_path, name):
    data = TEXTS[name].encode()
    cut = random.Random(name).randrange(len(data))
    for ending, compress in {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "XZ": lambda part: lzma.compress(part, check=lzma.CHECK_NONE),
    }.items():
        path = tmp_path / f"{name}.{ending}"
        path.write_bytes(compress(data[:cut]) + compress(data[cut:]))
        assert read_or_named(path, expected_of(name))


@pytest.mark.parametrize("make", [bz2.compress, lzma.compress, gzip.compress])
def test_damage_to_compressed_files_is_still_damage(tmp_path, make):
    ending = {bz2.compress: "bz2", lzma.compress: "xz", gzip.compress: "gz"}[make]
    noise = json.dumps({"text": "".join(random.Random(0).choices("abcdefgh", k=200_000))}).encode()
    whole = make(JSON_LINES.encode() + noise)
    for data in (whole[:-50], whole[:300] + bytes(200) + whole[500:], b"nothing of that kind"):
        (tmp_path / f"a.jsonl.{ending}").write_bytes(data)
        (tmp_path / f"a.txt.{ending}").write_bytes(data)
        with pytest.raises(UserError, match="is truncated or damaged"):
            list(TextFiles([tmp_path / f"a.jsonl.{ending}"]).documents())
        source = TextFiles([tmp_path / f"a.txt.{ending}"])
        assert [record for unit in source.units() for record in source.read(unit)] == ["damaged"]


def nested(depth: int) -> str:
    return "[" * depth + "1" * 6000 + "]" * depth


# Python 3.11 reads 994 levels, 3.12 1,497, 3.13 9,998.
@pytest.mark.parametrize("depth", [1, 150, 300, 600, 50_000])
def test_nesting_and_long_numbers_in_json(tmp_path, depth):
    record = f'{{"other": {nested(depth)}, "text": "deep"}}'
    lines, array = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines.write_text(record + "\n" + JSON_LINES)
    array.write_text(f"[{record}]")
    if depth <= 600:
        assert read_or_named(lines, ["deep", *DOCUMENTS]) and read_or_named(array, ["deep"])
    else:
        assert outcome(lines) == (DOCUMENTS, {"too_deep": 1})
        assert not read_or_named(array, [], "roughly 900 levels", "JSON Lines")


def test_long_records_of_csv_files_name_the_limit(tmp_path):
    for name in ("a.csv", "a.tsv"):
        for size in (30, 90, 200, 399, 500, 2000):
            for value in ("x" * size, ("x" * 9 + "\n") * (size // 10)):
                (tmp_path / name).write_text(f'text\nfirst\n"{value}"\nlast\n')
                result = outcome(tmp_path / name, max_document_bytes=100)
                if isinstance(result, str):
                    assert size > 390 and "more than 400 bytes" in result and "--max_document_bytes" in result
                else:
                    fits = len(value) <= 100
                    assert result == (["first", *[value] * fits, "last"], {} if fits else {"too_long": 1})
                assert read_or_named(tmp_path / name, ["first", value, "last"], max_document_bytes=3000)


def written(path: Path, table: Any, **options: Any) -> Path:
    pyarrow.parquet.write_table(table, path, **options)
    return path


def test_types_and_compression_of_parquet_files(tmp_path):
    path = tmp_path / "a.parquet"
    texts = pyarrow.array(DOCUMENTS)
    for kind in ("string", "large_string", "string_view", "binary", "large_binary"):
        assert read_or_named(written(path, pyarrow.table({"text": texts.cast(kind)})), DOCUMENTS)
    assert outcome(written(path, pyarrow.table({"text": pyarrow.nulls(3)}))) == ([], {"empty": 3})
    for codec in ("none", "snappy", "gzip", "brotli", "zstd", "lz4"):
        assert read_or_named(written(path, pyarrow.table({"text": texts}), compression=codec), DOCUMENTS)
    for values, kind in (([1, 2], "int64"), ([["a"]], "list"), ([{"text": "a"}], "struct")):
        table = pyarrow.table({"text": pyarrow.array(values)})
        assert not read_or_named(written(path, table), [], kind, "a column of strings")
    whole = written(path, pyarrow.table({"text": texts})).read_bytes()
    path.write_bytes(whole[:-4] + b"PARE")
    assert not read_or_named(path, [], "is encrypted")


@pytest.mark.slow
def test_metadata_of_parquet_files_beyond_pyarrows_default_limit(tmp_path):
    table = pyarrow.table({"text": DOCUMENTS}).replace_schema_metadata({"note": "x" * 101_000_000})
    assert read_or_named(written(tmp_path / "a.parquet", table), DOCUMENTS)


@pytest.mark.parametrize(
    "error", [NotImplementedError("Codec LZO"), MemoryError("malloc of 4"), OSError(5, "I/O")]
)
def test_what_the_library_or_the_machine_lacks_is_no_damage(tmp_path, monkeypatch, error):
    for name, text in TEXTS.items():
        if name != "a.txt":
            (tmp_path / name).write_text(text)

            def failing(*_: object, error: Exception = error) -> Any:
                raise error

            monkeypatch.setattr("pretrain.prepare.sources.readers.check_text", failing)
            words = "memory" if isinstance(error, MemoryError) else error.args[-1]
            assert not read_or_named(tmp_path / name, [], words)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-be"])
def test_other_encodings_are_named(tmp_path, encoding):
    mark = MARK if encoding == "utf-16-be" else ""
    for name, text in TEXTS.items():
        for ending, compress in (("", bytes), (".gz", gzip.compress)):
            path = tmp_path / f"{name}{ending}"
            path.write_bytes(compress((mark + text).encode(encoding)))
            if name == "a.txt":
                assert outcome(path) == ([], {"invalid_utf8": 1})
            else:
                assert not read_or_named(path, [], "UTF-16", "iconv")


@pytest.mark.parametrize(
    "name",
    ["a.zip", "a.jsonl.lz4", "a.csv.zip", "a.tar.gz", "a.tgz", "a.txt.Z", "a.parquet.gz", "a.jsonl.zstd"],
)
def test_archives_are_named(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"\0PK"))
    (tmp_path / "good.txt").write_text("good")
    assert not read_or_named(tmp_path / name, [], "unpack it", ".bz2")
    whole = outcome(tmp_path)
    # In a folder, an archive of who knows what is binary.
    assert isinstance(whole, str) == (name not in ("a.zip", "a.tgz", "a.tar.gz"))


# ---------------------------------------------------------------------- byte order marks


@pytest.mark.parametrize("name", TEXTS)
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    """At the beginning; elsewhere U+FEFF stays, as DOCUMENTS have it."""
    for ending, compress in (("", bytes), (".gz", gzip.compress), (".zst", lambda data: frame(data, 20))):
        path = tmp_path / f"{name}{ending}"
        path.write_bytes(compress((MARK + TEXTS[name]).encode()))
        for unit_bytes in (None, 7, 1):
            assert read_or_named(path, expected_of(name), unit_bytes=unit_bytes)
    path = tmp_path / "lines.txt"
    lines = [f"{MARK}\u00e9 {number}" for number in range(9)]
    path.write_text("\n".join([MARK + lines[0], *lines[1:]]), encoding="utf-8")
    for unit_bytes in (None, 7, 1):
        assert read_or_named(path, lines, format="lines", unit_bytes=unit_bytes)
    # It counts for no limit, and a file of nothing else is empty.
    path.write_bytes(f"{MARK}{'x' * 10}\n{'y' * 10}".encode())
    for size, left_out in ((10, {}), (9, {"too_long": 2})):
        assert outcome(path, format="lines", max_document_bytes=size)[1] == left_out
    path.write_text(MARK, encoding="utf-8")
    for format in ("lines", "text"):
        assert outcome(path, format=format) == ([], {"empty": 1})


@pytest.mark.parametrize("ending", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_labelled_files_keep_the_same_rules(tmp_path, ending):
    compress: Any = {
        "": bytes,
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
        ".zst": lambda data: frame(data, 20),
    }[ending]
    for name, text, expected in (
        ("a.tsv", f"text\tlabel\n{MARK}one\t1\n", Example(f"{MARK}one", "1")),
        ("a.jsonl", f'{{"text": "one", "label": 1, "n": {"1" * 6000}}}\n', Example("one", "1")),
        ("a.fasta", ">name 1\nACGT\n", Example("ACGT", "1")),
    ):
        path = tmp_path / f"{name}{ending}"
        for mark in ("", MARK):
            path.write_bytes(compress((mark + text).encode()))
            assert read_examples(path) == [expected]
    path = tmp_path / f"b.jsonl{ending}"
    path.write_bytes(compress(f'{{"text": "one", "label": 1, "n": {nested(50_000)}}}\n'.encode()))
    with pytest.raises(UserError, match=r"labelled: line 1 .* nested deeper than"):
        read_examples(path)
    if ending == ".zst":
        path.write_bytes(frame(b"text\tlabel\n", 31))
        with pytest.raises(UserError, match=r"labelled: .* window of more than"):
            read_examples(path)


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz"])
def test_damaged_labelled_files_are_one_line(tmp_path, ending):
    compress: Any = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[ending]
    whole = compress(io.BytesIO(random.Random(0).randbytes(5000)).read())
    for data in (whole[:-100], whole[:100] + bytes(100) + whole[200:]):
        (tmp_path / f"a.tsv{ending}").write_bytes(data)
        with pytest.raises(UserError, match=r"labelled: .* cannot be read"):
            read_examples(tmp_path / f"a.tsv{ending}")
