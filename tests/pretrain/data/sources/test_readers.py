"""Documents out of files: every one once however a file is cut, and what is bad is skipped, counted or refused."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
import zlib
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.data.sources import readers
from pretrain.data.sources.files import TextFiles
from pretrain.data.sources.source import Document


def texts(source: TextFiles) -> list[str]:
    return [document.text for document in source.documents()]


def write_parquet(path: Path, values: list[object], column: str = "text", **options: object) -> Path:
    pyarrow.parquet.write_table(
        pyarrow.table({"other": list(range(len(values))), column: values}), path, **options
    )
    return path


def compress_zst(path: Path, data: bytes) -> Path:
    with pyarrow.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(data)
    return path


@settings(max_examples=150, deadline=None)
@given(
    lines=st.lists(st.text(st.sampled_from("ab\u00e9 "), max_size=12), max_size=30),
    ending=st.sampled_from(["\n", "\r\n"]),
    last_ends=st.booleans(),
    unit=st.integers(1, 60),
    chunk=st.integers(1, 40),
    longest=st.integers(0, 14),
)
def test_pieces_of_a_file_give_each_line_once(
    tmp_path_factory, lines, ending, last_ends, unit, chunk, longest
):
    path = tmp_path_factory.mktemp("lines") / "file"
    data = ending.join([*lines, ""] if last_ends else lines).encode()
    path.write_bytes(data)
    expected = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    if expected[-1] == b"":
        expected.pop()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(readers, "_CHUNK", chunk)
        read = []
        for start, stop, _ in readers.pieces(path, "lines", len(data), unit, readers.Limits()):
            read += list(readers.read_lines(path, start, stop, longest))
    # The "\r" of a line end counts against the limit as well.
    lengths = [len(line) for line in data.split(b"\n")]
    assert read == [
        line if length <= longest else None for line, length in zip(expected, lengths, strict=False)
    ]


def test_formats_and_compressions_give_the_same_documents(tmp_path):
    documents = [f"document {number} é\u2028\n" * 3 for number in range(50)]
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in documents).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines[:1000]) + gzip.compress(lines[1000:]))
    compress_zst(tmp_path / "c.json.zst", lines)
    write_parquet(tmp_path / "d.parquet", documents, row_group_size=7)
    for name in ("a.jsonl", "b.jsonl.gz", "c.json.zst", "d.parquet"):
        for unit_bytes in (None, 100, 1):
            source = TextFiles([tmp_path / name], unit_bytes=unit_bytes)
            assert texts(source) == documents, (name, unit_bytes)
            assert (len(source.units()) > 5) == (unit_bytes is not None and name[0] in "ad")
    folder = TextFiles([tmp_path])
    assert texts(folder) == documents * 4
    assert folder.describe()["formats"] == ["jsonl", "parquet"] and folder.describe()["column"] == "text"


def test_plain_text_is_a_document_a_file_or_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\r\nthree")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"four\n"))
    assert texts(TextFiles([tmp_path])) == ["one\n\ntwo\r\nthree", "four\n"]
    source = TextFiles([tmp_path], format="lines")
    assert texts(source) == ["one", "two", "three", "four"] and source.skipped == {"empty": 1}


def test_bad_json_lines_are_skipped_and_counted(tmp_path):
    good = b'{"text": "good"}'
    bad = {
        "empty": [b'{"text": ""}', b'{"text": " \\n"}', b'{"text": null}'],
        "no_text": [b'{"text": 3}', b'{"text": ["a"]}'],
        "missing_column": [b'{"txt": "a"}', b"[1]", b"3"],
        "invalid_json": [b"{", b'{"text": "a}', b"[" * 100_000],
        "invalid_utf8": [b'{"text": "caf\xe9"}', b'{"text": "\\ud800"}'],
        "binary": [b'{"text": "a\\u0000b"}', b'{"text": "a\0b"}'],
        "too_long": [b'{"text": "' + b"x" * 100 + b'"}', b'{"other": "' + b"x" * 1000 + b'"}'],
    }
    lines = [line for group in bad.values() for line in (*group, good)]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + good + b"\n\n" + b"\n".join(lines) + b"\n  \n")
    source = TextFiles([tmp_path], max_document_bytes=100 - 1)
    assert texts(source) == ["good"] * (1 + len(bad))
    # A line of 100,000 brackets is beyond what a record of this limit may take.
    assert source.skipped == {reason: len(group) for reason, group in bad.items()} | {
        "invalid_json": 2,
        "too_long": 3,
    }
    source = TextFiles([tmp_path], max_document_bytes=10**6)
    assert len(texts(source)) == 1 + len(bad) + 1
    assert source.skipped["invalid_json"] == 3, "too deep for the parser"


def test_bad_parquet_values_are_skipped_and_counted(tmp_path):
    values = pyarrow.array([b"good", b"caf\xe9", None, b" ", b"a\0b", b"x" * 99], pyarrow.binary())
    raw = pyarrow.StringArray.from_buffers(len(values), *values.buffers()[1:], values.buffers()[0])
    pyarrow.parquet.write_table(pyarrow.table({"text": raw}), tmp_path / "a.parquet")
    source = TextFiles([tmp_path], max_document_bytes=50)
    assert texts(source) == ["good"]
    assert source.skipped == {"invalid_utf8": 1, "empty": 2, "binary": 1, "too_long": 1}


@pytest.mark.parametrize("kind", ["large", "dictionary", "nested"])
def test_parquet_string_types(tmp_path, kind):
    values = pyarrow.array(["one", "two", "one"])
    if kind == "large":
        values = values.cast(pyarrow.large_string())
    if kind == "dictionary":
        values = values.dictionary_encode()
    table = {"before": [{"text": 1, "b": 2}] * 3, "text": values} if kind == "nested" else {"text": values}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    assert texts(TextFiles([tmp_path])) == ["one", "two", "one"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.jsonl.gz of garbage"])
def test_damaged_files_are_refused_or_taken_up_to_the_damage(tmp_path, name):
    generator = random.Random(0)
    documents = ["".join(generator.choices("abcdefgh ", k=100)) for _ in range(30_000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    path = tmp_path / name.split()[0]
    if "garbage" in name:
        path.write_bytes(b"no gzip at all")
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines, 1)[:-100_000])
    elif name.endswith(".zst"):
        path.write_bytes(compress_zst(path, lines).read_bytes()[:-100_000])
    else:
        path.write_bytes(write_parquet(path, documents).read_bytes()[:-10])
    (tmp_path / "z.jsonl").write_text('{"text": "sound"}\n')
    with pytest.raises(
        UserError, match=r"a\.\w+[^ ]*' is truncated or damaged \(.*--skip_damaged"
    ) as refusal:
        texts(TextFiles([tmp_path]))
    assert "\n" not in str(refusal.value)
    source = TextFiles([tmp_path], skip_damaged=True)
    *read, last = texts(source)
    assert read == documents[: len(read)] and last == "sound"
    if name == "a.jsonl.gz":  # all that was decompressed, and not only whole pieces of a MiB
        assert len(read) == _decompressed(path).count(b"\n")
    assert (len(read) > 1000) == (name in ("a.jsonl.gz", "a.jsonl.zst"))
    assert source.skipped == {"damaged_file": 1}


def _decompressed(path: Path) -> bytes:
    """What zlib itself gets out of the beginning of a .gz file."""
    return zlib.decompressobj(wbits=31).decompress(path.read_bytes())


def test_a_damaged_file_that_is_one_document_is_skipped(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text " * 1000)[:-20])
    (tmp_path / "b.txt.zst").write_bytes(b"no zstd")
    (tmp_path / "c.txt").write_bytes(b"good")
    source = TextFiles([tmp_path])
    assert texts(source) == ["good"] and source.skipped == {"damaged": 2}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.txt"])
def test_empty_files_are_counted_and_refused_alone(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    if name == "a.parquet":
        write_parquet(tmp_path / name, [])
        pyarrow.parquet.write_table(
            pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / name
        )
    with pytest.raises(UserError, match=r"text: no usable document in 1 files \(1 empty\)"):
        texts(TextFiles([tmp_path]))


def test_files_without_the_column_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "a", "id": 1}\n' * 3)
    with pytest.raises(UserError, match=r"column: .*a\.jsonl' have no 'text'; valid: --column .* body, id"):
        TextFiles([tmp_path]).check()
    TextFiles([tmp_path], column="body").check()
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n{"text": "b"}\n')
    TextFiles([tmp_path]).check()
    (tmp_path / "a.jsonl").unlink()
    write_parquet(tmp_path / "b.parquet", ["x"], "body")
    with pytest.raises(UserError, match=r"column: .*b\.parquet' has no column 'text'; .* other, body"):
        TextFiles([tmp_path]).units()
    with pytest.raises(UserError, match=r"column: 'other' .* holds int64, not text"):
        TextFiles([tmp_path], column="other").units()


def test_bad_settings_are_refused(tmp_path):
    (tmp_path / "a").write_text("a")
    with pytest.raises(UserError, match="format: 'xml' is unknown; valid: auto, text, lines"):
        TextFiles([tmp_path], format="xml")
    with pytest.raises(UserError, match="max_document_bytes: 0"):
        TextFiles([tmp_path], max_document_bytes=0)


def test_a_very_long_line_costs_no_memory(tmp_path):
    """20 MB here; the slow test below has 100 MB."""
    check_long_line(tmp_path, 20_000_000, 300_000)


@pytest.mark.slow
def test_a_line_of_100_megabytes(tmp_path):
    check_long_line(tmp_path, 100_000_000, readers.MAX_DOCUMENT_BYTES)


def check_long_line(folder: Path, size: int, longest: int) -> None:
    path = folder / "a.txt"
    with path.open("wb") as stream:
        stream.write(b"first\n")
        for _ in range(size // 10**6):
            stream.write(b"x" * 10**6)
        stream.write(b"\nlast\n")
    for unit_bytes in (None, 3_000_000):
        source = TextFiles([path], format="lines", max_document_bytes=longest, unit_bytes=unit_bytes)
        tracemalloc.start()
        assert texts(source) == ["first", "last"]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert source.skipped == {"too_long": 1}
        assert peak < 3 * longest + 10_000_000


def test_units_follow_size_alone_and_keys_follow_content(tmp_path):
    for number in range(100):
        (tmp_path / f"{number:03}.txt").write_text(str(number) * 1000)
    source = TextFiles([tmp_path], unit_bytes=10_000)
    units = source.units()  # 10 files of 1,000 bytes, then 18 × 5 of 2,000
    assert len(units) == 19 and [unit.key for unit in source.units()] == [unit.key for unit in units]
    read = [record for unit in units for record in source.read(unit)]
    assert read == list(source.documents()) and all(isinstance(record, Document) for record in read)
    (tmp_path / "050.txt").write_text("changed")
    changed = [old.key != new.key for old, new in zip(units, source.units(), strict=False)]
    assert changed[9], "the piece with the file"
    assert not any(changed[:9]), "the pieces before it"
