"""Documents of files of every format: every one once, and what is bad is skipped, counted or refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from model.errors import UserError
from pretrain.prepare.sources.files import TextFiles, detect_format
from pretrain.prepare.sources.streams import MAX_DOCUMENT_BYTES
from tests.helpers.refusals import refused

LOOK_LIKE_VALUES = ["NA", "null", "nan", "007", "1.50", "true", "2020-01-01"]
DOCUMENTS = LOOK_LIKE_VALUES + [
    f'document "{number}" \u00e9,\tthen\u2028\n[x] NA\n' * 3 for number in range(50)
]


def texts(source: TextFiles) -> list[str]:
    return [document.text for document in source.documents()]


def json_lines(documents: Iterable[str]) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in documents).encode()


def separated(documents: Iterable[str], delimiter: str) -> bytes:
    written = io.StringIO()
    csv.writer(written, delimiter=delimiter).writerows([["id", "text"], *(["1", text] for text in documents)])
    return b"\xef\xbb\xbf" + written.getvalue().encode()


def parquet(values: Any, name: str = "text", twice: bool = False, **options: object) -> bytes:
    stream = io.BytesIO()
    table = pyarrow.table({"other": [{"text": 1, "b": 2}] * len(values), name: values})
    if twice:
        table = table.append_column(name, [table[name].combine_chunks()])
    pyarrow.parquet.write_table(table, stream, **options)
    return stream.getvalue()


def zst(data: bytes) -> bytes:
    stream = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(stream, "zstd") as compressed:
        compressed.write(data)
    return stream.getvalue().to_pybytes()


ROWS = [{"text": text, "id": number} for number, text in enumerate(DOCUMENTS)]
FORMS = {
    "a.jsonl": json_lines(DOCUMENTS),
    "lines.json": json_lines(DOCUMENTS),
    "array.json": json.dumps(ROWS, indent=1).encode(),
    "strings.json": json.dumps(DOCUMENTS).encode(),
    "a.csv": separated(DOCUMENTS, ","),
    "a.tsv": separated(DOCUMENTS, "\t"),
    "a.parquet": parquet(DOCUMENTS, row_group_size=7),
    "dictionary.parquet": parquet(pyarrow.array(DOCUMENTS).dictionary_encode()),
    "large.parquet": parquet(pyarrow.array(DOCUMENTS, pyarrow.large_string())),
    "view.parquet": parquet(pyarrow.array(DOCUMENTS, pyarrow.string_view())),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_format_gives_the_same_documents_however_it_is_cut_and_compressed(tmp_path, name):
    (tmp_path / name).write_bytes(FORMS[name])
    if not name.endswith("parquet"):
        half = len(FORMS[name]) // 2
        parts = gzip.compress(FORMS[name][:half]) + gzip.compress(FORMS[name][half:])
        (tmp_path / f"{name}.gz").write_bytes(parts)
        (tmp_path / f"{name}.zst").write_bytes(zst(FORMS[name]))
    for path in tmp_path.iterdir():
        for unit_bytes in (None, 100, 1):
            # Some of these texts have tabs and line ends.
            format = "csv" if ".tsv" in path.name else "auto"
            source = TextFiles([path], format=format, unit_bytes=unit_bytes)
            source.check()
            assert texts(source) == DOCUMENTS and not source.skipped, (path.name, unit_bytes)
            cut = unit_bytes is not None and path.name in ("a.jsonl", "lines.json", "a.parquet")
            assert (len(source.units()) > 5) == cut
        assert source.describe()["formats"] == [detect_format(path, format)]
        assert source.describe()["column"] == "text"


def test_what_quotes_mean_in_tsv(tmp_path):
    """They may enclose several records, of which nothing would be noticed."""
    path = tmp_path / "a.tsv"
    path.write_text('label\ttext\n0\t"Great start\n1\tplain\n1\tends here"\n0\tlast\n')
    asked = "--format tsv takes quotes as text, --format csv as the ends of a field"
    with refused("line 4 of", "ends a field in quotes with line ends and tabs", asked):
        texts(TextFiles([path]))
    assert texts(TextFiles([path], format="tsv")) == ['"Great start', "plain", 'ends here"', "last"]
    assert texts(TextFiles([path], format="csv")) == ["Great start\n1\tplain\n1\tends here", "last"]
    path.write_text('text\tlabel\n"abc\t1\ndef"\t2\nlast\t0\n')
    with refused("line 3 of", asked):
        texts(TextFiles([path]))
    path.rename(tmp_path / "a.TSV")
    assert texts(TextFiles([tmp_path / "a.TSV"], format="csv")) == ["abc\t1\ndef", "last"]
    path.write_text('text\n"Hello" he said\n')
    with refused("line 2 of", "expected after", asked):
        texts(TextFiles([path]))
    assert texts(TextFiles([path], format="tsv")) == ['"Hello" he said']
    path.write_text('text\tlabel\n"a ""b""\nc"\t1\n')
    assert texts(TextFiles([path])) == ['a "b"\nc']
    (tmp_path / "a.tsv.csv").write_text('text,label\n"a, b",1\n')
    assert texts(TextFiles([tmp_path / "a.tsv.csv"])) == ["a, b"]


def test_a_folder_of_several_formats_names_each(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_bytes(json_lines(["two"]))
    described = TextFiles([tmp_path]).describe()
    assert described["formats"] == ["jsonl", "text"] and described["column"] == "text"
    (tmp_path / "b.jsonl").unlink()
    assert "formats" not in TextFiles([tmp_path]).describe()


def test_plain_text_is_a_document_a_file_or_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\r\nthree")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"four\n"))
    assert texts(TextFiles([tmp_path])) == ["one\n\ntwo\r\nthree", "four\n"]
    source = TextFiles([tmp_path], format="lines")
    assert texts(source) == ["one", "two", "three", "four"] and source.skipped == {"empty": 1}
    assert source.fingerprint() != TextFiles([tmp_path]).fingerprint()


def test_paths_may_be_files_folders_and_globs_and_count_once(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for text, name in enumerate(("a.txt", "sub/b.txt", "sub/c.md", ".hidden/d", "sub/.e"), start=1):
        (tmp_path / name).write_text(str(text))
    for paths, expected in (
        ([tmp_path], ["1", "2", "3"]),
        ([tmp_path / "**" / "*.txt"], ["1", "2"]),
        ([tmp_path / "**"], ["1", "2", "3"]),
        ([tmp_path / "**" / "*b*"], ["2", "3"]),  # a file, and the files of a folder
        ([tmp_path / "su*"], ["2", "3"]),
        ([tmp_path / "*"], ["1", "2", "3"]),
        ([tmp_path / "sub" / "c.md", tmp_path], ["3", "1", "2"]),
    ):
        assert texts(TextFiles(paths)) == expected


@pytest.mark.parametrize("path", ["missing", "*.nothing", "void"])
def test_paths_that_give_no_file_are_refused(tmp_path, path):
    (tmp_path / "void").mkdir()
    with pytest.raises(UserError, match="text: "):
        TextFiles([tmp_path / path])


def test_bad_json_lines_are_skipped_and_counted(tmp_path):
    good = b'{"text": "good"}'
    bad = {
        "empty": [b'{"text": ""}', b'{"text": " \\n"}', b'{"text": null}'],
        "no_text": [b'{"text": 3}', b'{"text": ["a"]}'],
        "missing_column": [b'{"txt": "a"}', b"[1]", b"3"],
        "invalid_json": [b"{", b'{"text": "a}'],
        "too_deep": [b"[" * 100_000],
        "invalid_utf8": [b'{"text": "caf\xe9"}', b'{"text": "\\ud800"}'],
        "binary": [b'{"text": "a\\u0000b"}', b'{"text": "a\0b"}'],
        "too_long": [b'{"text": "' + b"x" * 100 + b'"}', b'{"other": "' + b"x" * 1000 + b'"}'],
    }
    lines = [line for group in bad.values() for line in (*group, good)]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + good + b"\n\n" + b"\n".join(lines) + b"\n  \n")
    source = TextFiles([tmp_path], max_document_bytes=100 - 1)
    assert texts(source) == ["good"] * (1 + len(bad))
    counts = {reason: len(group) for reason, group in bad.items()}
    # A line of 100,000 brackets is beyond what a record of this limit may take.
    del counts["too_deep"]
    assert source.skipped == counts | {"too_long": 3}
    source = TextFiles([tmp_path], max_document_bytes=10**6)
    assert len(texts(source)) == 1 + len(bad) + 1
    assert source.skipped["too_deep"] == 1


_RAW = pyarrow.array([b"good", b"caf\xe9", None, b" ", b"a\0b", b"x" * 99], pyarrow.binary())
NOT_UTF8 = pyarrow.StringArray.from_buffers(len(_RAW), *_RAW.buffers()[1:], _RAW.buffers()[0])


@pytest.mark.parametrize(
    ("name", "data", "skipped"),
    [
        (
            "a.csv",
            b"text,id\ngood,1\n\nhalf, of a text,2\n,3\nbad \xff,4\nzero \0,5\n" + b"x" * 60 + b",6\n",
            {"extra_fields": 1, "empty": 1, "invalid_utf8": 1, "binary": 1, "too_long": 1},
        ),
        ("b.csv", b"id,text\n1,good\n2\n", {"missing_column": 1}),
        (
            "a.json",
            json.dumps(["good", {"id": 1}, 5, "x" * 51, {"text": "y" * 1000}, ""]).encode(),
            {"missing_column": 2, "too_long": 2, "empty": 1},
        ),
        ("a.parquet", parquet(NOT_UTF8), {"invalid_utf8": 1, "empty": 2, "binary": 1, "too_long": 1}),
    ],
)
def test_a_bad_record_costs_that_record(tmp_path, name, data, skipped):
    (tmp_path / name).write_bytes(data)
    source = TextFiles([tmp_path], max_document_bytes=50)
    source.check()
    assert texts(source) == ["good"] and source.skipped == skipped


@pytest.mark.parametrize(
    ("name", "cut", "readable"),
    [
        ("a.jsonl.gz", lambda text: gzip.compress(json_lines(text), 1)[:-20_000], True),
        ("a.jsonl.zst", lambda text: zst(json_lines(text))[:-20_000], True),
        ("a.parquet", lambda text: parquet(text)[:-10], False),
        ("a.jsonl.gz", lambda text: b"no gzip at all", False),
    ],
)
def test_damaged_files_are_refused_or_taken_up_to_the_damage(tmp_path, name, cut, readable):
    generator = random.Random(0)
    documents = ["".join(generator.choices("abcdefgh ", k=100)) for _ in range(6_000)]
    (tmp_path / name).write_bytes(cut(documents))
    (tmp_path / "z.jsonl").write_text('{"text": "sound"}\n')
    message = r"a\.\w+[^ ]*' is truncated or damaged \(.*--skip_damaged"
    with pytest.raises(UserError, match=message) as refusal:
        texts(TextFiles([tmp_path]))
    assert "\n" not in str(refusal.value)
    source = TextFiles([tmp_path], skip_damaged=True)
    *read, last = texts(source)
    assert read == documents[: len(read)] and last == "sound"
    assert (len(read) > 1000) == readable and source.skipped == {"damaged_file": 1}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        *((name, b"") for name in ("a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.txt")),
        ("a.parquet", parquet(pyarrow.array([], pyarrow.string()))),
    ],
)
def test_empty_files_are_counted_and_refused_alone(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=r"no usable document in 'text' \(1 empty\)"):
        texts(TextFiles([tmp_path]))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"body": 1, "id": 1}\n' * 3, r"a\.jsonl' have no 'text'; valid: --column with"),
        ("a.csv", b"title,body\nx,y\n", r"a\.csv' has no column 'text'; valid: --column .* title, body"),
        ("a.csv", b"text,id,text\nx,1,y\n", r"a\.csv' has 2 columns 'text'"),
        ("a.json", b"[" * 100_000, r"a\.json' is nested deeper than Python reads .*900 levels.* JSON Lines"),
        ("a.json", b'[{"body": 1}]', r"a\.json' have no 'text'; valid: --column with"),
        ("a.json", b'{\n "text": "one"\n}\n', r"a\.json' does not begin with JSON; give an object per line"),
        ("a.json", b'["a", "b"', r"a\.json' is truncated or damaged \(Expecting"),
        ("a.json", b'["a", {"text": bad}]', r"a\.json' is truncated or damaged \(Expecting"),
        (
            "a.csv",
            b'text\n"a\nb\n',
            r"a\.csv' is truncated or damaged \(line 3: unexpected end of data; ",
        ),
        ("a.parquet", parquet(["x"], "body"), r"a\.parquet' has no column 'text'; .* other, body"),
        ("a.parquet", parquet([1]), r"column: 'text' .* holds int64, not text"),
        ("a.parquet", parquet(["x"], "text", twice=True), r"a\.parquet' has 2 columns 'text'"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message) as refused:
        source = TextFiles([tmp_path])
        source.check()
        texts(source)
    assert "\n" not in str(refused.value)
    if not name.endswith(".parquet"):
        assert texts(TextFiles([tmp_path], format="text")) == [data.decode()]


def test_files_that_name_their_text_differently(tmp_path):
    (tmp_path / "a.csv").write_text("title,abstract\nx,one\n")
    (tmp_path / "b.jsonl.gz").write_bytes(
        gzip.compress(b'{"text": "two"}\n{"abstract": "three", "text": "x"}\n')
    )
    (tmp_path / "c.parquet").write_bytes(parquet(["four"]))
    (tmp_path / "d.json").write_text('[{"body": "five"}]')
    columns = "abstract,text,body"
    source = TextFiles([tmp_path], column=columns)
    source.check()
    assert texts(source) == ["one", "two", "three", "four", "five"]
    assert source.settings() != TextFiles([tmp_path], column="text,abstract,body").settings()
    (tmp_path / "a.csv").write_text('"abstract,text,body",text\nliteral,x\n')
    assert texts(TextFiles([tmp_path], column=columns))[0] == "literal"
    for column, name in (("text", "a.csv"), ("abstract", "b.jsonl.gz")):
        (tmp_path / "a.csv").write_text("title,abstract\nx,one\n")
        (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "two"}\n'))
        with pytest.raises(UserError, match=rf"{name}.*; where files differ, such as --column text,abstract"):
            source = TextFiles([tmp_path / "a.csv", tmp_path / "b.jsonl.gz"], column=column)
            source.check()
            texts(source)


def test_one_record_with_the_column_is_enough(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n{"text": "b"}\n')
    TextFiles([tmp_path]).check()


def test_a_very_long_line_costs_no_memory(tmp_path):
    """20 MB here; the slow test below has 100 MB."""
    check_long_line(tmp_path, 20_000_000, 300_000)


@pytest.mark.slow
def test_a_line_of_100_megabytes(tmp_path):
    check_long_line(tmp_path, 100_000_000, MAX_DOCUMENT_BYTES)


def check_long_line(folder: Path, size: int, longest: int) -> None:
    with (folder / "a.txt").open("wb") as stream:
        stream.write(b"first\n")
        for _ in range(size // 10**6):
            stream.write(b"x" * 10**6)
        stream.write(b"\nlast\n")
    for unit_bytes in (None, 3_000_000):
        source = TextFiles([folder], format="lines", max_document_bytes=longest, unit_bytes=unit_bytes)
        assert peak_of(source, ["first", "last"]) < 3 * longest + 10_000_000
        assert source.skipped == {"too_long": 1}


def peak_of(source: TextFiles, expected: list[str]) -> int:
    """Bytes that are held at most while *source* is read."""
    tracemalloc.start()
    assert texts(source) == expected
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak
