"""A metrics.jsonl that was edited by hand: lines that are not rows are left out."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.metrics.file import MetricsFile, read_metrics

SOUND = b'{"step": 1, "train_loss": 2.0}\n'


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": true}',
        b'{"step": -1}',
        b'{"step": 1.0}',
        b"5",
        b"[" * 100_000,
        b'{"step": 2, "text": "\xff"}',
    ],
    ids=lambda line: repr(line[:20]),
)
def test_lines_that_are_no_row(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line + b"\n" + SOUND)
    assert read_metrics(tmp_path) == [{"step": 1, "train_loss": 2.0}]
    assert MetricsFile(path).truncate_after(5) == 1
    assert path.read_bytes() == SOUND


values = st.none() | st.integers() | st.floats() | st.text(max_size=3)
rows = st.dictionaries(st.sampled_from(["step", "tokens"]), values).map(lambda row: json.dumps(row).encode())


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=40) | rows, max_size=6))
def test_any_bytes_are_read(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(b"\n".join(lines))
    assert all(row["step"] >= 0 for row in read_metrics(path))
