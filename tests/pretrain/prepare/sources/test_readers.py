"""Lines, however a file is cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.prepare.sources import readers
from pretrain.prepare.sources.files import TextFiles


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
