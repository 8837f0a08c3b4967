"""JSON arrays and CSV files as people have them: against the standard readers, or refused in one line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tracemalloc

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.data.sources import readers, records
from pretrain.data.sources.files import TextFiles

_TEXT = st.text(st.sampled_from('ab\u00e9"\\,[]{}\n\t '), max_size=8)
_VALUES = st.recursive(
    st.one_of(_TEXT, st.integers(), st.none(), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXT, inner, max_size=3)),
    max_leaves=6,
)


def texts(source: TextFiles) -> list[str]:
    return [document.text for document in source.documents()]


@settings(max_examples=300, deadline=None)
@given(
    values=st.lists(_VALUES, max_size=6),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
    chunk=st.integers(1, 30),
    around=st.sampled_from(["", " \r\n", "\ufeff"]),
)
def test_the_elements_of_an_array_are_those_of_the_standard_reader(values, indent, ascii_only, chunk, around):
    if around == "\ufeff":
        chunk += 3
    written = (
        around + json.dumps(values, indent=indent, ensure_ascii=ascii_only) + around.replace("\ufeff", "")
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(records, "_CHUNK", chunk)
        elements = list(records.read_array(io.BytesIO(written.encode()), 10**6))
    assert [json.loads(element or b"") for element in elements] == values


@pytest.mark.parametrize(
    "data", [b"", b"  ", b"[", b'["a"', b'["a", "b]', b'["a"] x', b'["a"]["b"]', b"{}", b'x["a"]']
)
def test_what_is_no_array_is_an_error(data):
    with pytest.raises(ValueError):
        list(records.read_array(io.BytesIO(data), 100))


def test_arrays_lines_and_compressed_ones_give_the_same_documents(tmp_path):
    rows = [{"id": number, "text": f'document "{number}" é, [x]\n'} for number in range(50)]
    expected = [row["text"] for row in rows]
    array = json.dumps(rows, indent=1).encode()
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "array.json").write_bytes(array)
    (tmp_path / "array.json.gz").write_bytes(gzip.compress(array))
    with pyarrow.CompressedOutputStream(str(tmp_path / "array.json.zst"), "zstd") as stream:
        stream.write(array)
    (tmp_path / "lines.json").write_bytes(lines)
    (tmp_path / "strings.json").write_text(json.dumps(expected))
    for path in sorted(tmp_path.iterdir()):
        source = TextFiles([path])
        source.check()
        assert texts(source) == expected and not source.skipped, path.name


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_csv_is_what_the_standard_writer_wrote(tmp_path, ending):
    rows = [[str(number), f'say "{number}",\tthen\nmore é\u2028'] for number in range(50)]
    written = io.StringIO()
    csv.writer(written, delimiter="\t" if ending == "tsv" else ",").writerows([["id", "body"], *rows])
    data = b"\xef\xbb\xbf" + written.getvalue().encode()
    (tmp_path / f"a.{ending}").write_bytes(data)
    (tmp_path / f"b.{ending}.gz").write_bytes(gzip.compress(data))
    with pyarrow.CompressedOutputStream(str(tmp_path / f"c.{ending}.zst"), "zstd") as stream:
        stream.write(data)
    for path in sorted(tmp_path.iterdir()):
        source = TextFiles([path], column="body", unit_bytes=100)
        source.check()
        assert texts(source) == [row[1] for row in rows], path.name
        assert source.describe()["formats"] == [ending] and source.describe()["column"] == "body"


def test_rows_that_cannot_be_used_are_counted(tmp_path):
    (tmp_path / "a.csv").write_bytes(
        b"text,id\ngood,1\n\nhalf, of a text,2\n,3\nbad \xff,4\nzero \0,5\n" + b"x" * 60 + b",6\n"
    )
    source = TextFiles([tmp_path], max_document_bytes=50)
    assert texts(source) == ["good"]
    assert source.skipped == {"extra_fields": 1, "empty": 1, "invalid_utf8": 1, "binary": 1, "too_long": 1}
    (tmp_path / "a.csv").unlink()
    (tmp_path / "b.json").write_text(json.dumps(["good", {"id": 1}, 5, "x" * 51, {"text": "y" * 1000}, ""]))
    source = TextFiles([tmp_path], max_document_bytes=50)
    assert texts(source) == ["good"]
    assert source.skipped == {"missing_column": 2, "too_long": 2, "empty": 1}


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "a.csv",
            "title,body\nx,y\n",
            r"a\.csv' have no 'text'; valid: --column with one of title, body, or --format",
        ),
        ("a.json", '[{"body": 1}]', r"a\.json' have no 'text'; valid: --column with one of body"),
        (
            "a.json",
            '{\n "text": "a"\n}\n',
            r"a\.json' is neither a JSON array nor JSON Lines; valid: .*--format text",
        ),
        ("a.json", '{"data": [\n{"text": "a"}\n]}\n', r"a\.json' is neither"),
        ("a.json", '"text"', r"a\.json' is neither"),
        ("a.json", '["a", "b"', r"a\.json' is truncated or damaged \(the array does not end\)"),
        ("a.csv", 'text\n"a\nb\n', r"a\.csv' is truncated or damaged \(line 3: unexpected end of data\)"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, name, data, message):
    (tmp_path / name).write_text(data)
    with pytest.raises(UserError, match=message) as refused:
        source = TextFiles([tmp_path])
        source.check()
        texts(source)
    assert "\n" not in str(refused.value)
    assert texts(TextFiles([tmp_path], format="text")) == [data]


def test_files_that_were_text_before_are_another_corpus_now(tmp_path):
    """The fingerprint of a folder without them stays, so that folders prepared before are still recognised."""
    (tmp_path / "a.txt").write_text("a")
    before = TextFiles([tmp_path]).fingerprint()
    assert before == TextFiles([tmp_path], format="auto").fingerprint()
    (tmp_path / "b.json").write_text('["b"]')
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pretrain.data.sources.files._once_text", lambda _: False)
        old = TextFiles([tmp_path]).fingerprint()
    assert TextFiles([tmp_path]).fingerprint() != old


def test_a_large_array_costs_no_memory(tmp_path):
    path = tmp_path / "a.json"
    with path.open("wb") as stream:
        stream.write(b'["first"')
        for _ in range(20):
            stream.write(b', {"text": "' + b"x" * 10**6 + b'"}')
        stream.write(b', ["' + b"y" * 20_000_000 + b'"], "last"]')
    source = TextFiles([path], max_document_bytes=300_000)
    tracemalloc.start()
    assert texts(source) == ["first", "last"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert source.skipped == {"too_long": 21}
    assert peak < 12_000_000, "four times the longest document is kept, and a chunk"
    assert readers.format_of(path, "auto") == "json"
