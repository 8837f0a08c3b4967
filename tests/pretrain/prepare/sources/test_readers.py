"""Lines and JSON arrays against the standard readers, however a file is cut and wherever a chunk ends."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.prepare.sources import readers
from pretrain.prepare.sources.files import TextFiles

_TEXT = st.text(st.sampled_from('ab\u00e9"\\,[]{}\n\t '), max_size=8)
_VALUES = st.recursive(
    st.one_of(_TEXT, st.integers(), st.none(), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXT, inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    lines=st.lists(st.text(st.sampled_from("ab\u00e9 "), max_size=12), max_size=30),
    ending=st.sampled_from(["\n", "\r\n"]),
    last_ends=st.booleans(),
    unit=st.integers(1, 60),
    longest=st.integers(0, 14),
)
def test_pieces_of_a_file_give_each_line_once(tmp_path_factory, lines, ending, last_ends, unit, longest):
    path = tmp_path_factory.mktemp("lines") / "file.jsonl"
    data = ending.join([*lines, ""] if last_ends else lines).encode()
    path.write_bytes(data)
    expected = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    if expected[-1] == b"":
        expected.pop()
    read = []
    for piece in TextFiles([path], unit_bytes=unit).units():
        with path.open("rb") as stream:
            read += list(readers.read_lines(stream, *piece.place[2:], longest))
    # The "\r" of a line end counts against the limit as well.
    lengths = [len(line) for line in data.split(b"\n")]
    assert read == [
        line if length <= longest else None for line, length in zip(expected, lengths, strict=False)
    ]


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
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    written = around + text + around.replace("\ufeff", "")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(readers, "_CHUNK", chunk)
        elements = list(readers.read_array(io.BytesIO(written.encode()), 10**6))
    assert [json.loads(element or b"") for element in elements] == values


@pytest.mark.parametrize(
    "data", [b"", b"  ", b"[", b'["a"', b'["a", "b]', b'["a"] x', b'["a"]["b"]', b"{}", b'x["a"]']
)
def test_what_is_no_array_is_an_error(data):
    with pytest.raises(ValueError):
        list(readers.read_array(io.BytesIO(data), 100))
