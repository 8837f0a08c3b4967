"""metrics.jsonl: written at once, read back, cut at a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pretrain.metrics.file import FILE_NAME, MetricsFile, last_step, read_metrics


def test_rows_are_written_at_once_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    file = MetricsFile(path)
    file.append(1, {"train_loss": torch.tensor(2.5), "grad_norm": np.float32(0.5), "lr/base": 1e-3})
    assert json.loads(path.read_text()) == {"step": 1, "train_loss": 2.5, "grad_norm": 0.5, "lr/base": 1e-3}
    file.append(2, {"train_loss": 2.0})
    file.append(2, {"val_loss": 2.1})
    file.close()
    rows = read_metrics(tmp_path)
    assert rows[1] == {"step": 2, "train_loss": 2.0, "val_loss": 2.1}
    assert [row["step"] for row in rows] == [1, 2]


def test_non_finite_numbers_leave_valid_json(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / FILE_NAME)
    file.append(1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / FILE_NAME).read_text(), parse_constant=refuse)
    row = read_metrics(tmp_path)[0]
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf


def test_resume_drops_rows_of_the_lost_future(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    file = MetricsFile(path)
    for step in range(1, 8):
        file.append(step, {"train_loss": float(step)})
    with path.open("a") as half:
        half.write('{"step": 8, "train_l')
    assert file.truncate_after(5) == 3
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]
    file.append(6, {"train_loss": 6.5})
    assert read_metrics(path)[-1] == {"step": 6, "train_loss": 6.5}
    assert sorted(p.name for p in tmp_path.iterdir()) == [FILE_NAME]
    untouched = path.stat().st_mtime_ns
    assert file.truncate_after(6) == 0
    assert path.stat().st_mtime_ns == untouched
    assert MetricsFile(tmp_path / "absent").truncate_after(0) == 0


VALUES = st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.integers(max_value=-1)
NO_ROWS = st.dictionaries(st.sampled_from(["step", "tokens"]), VALUES).map(
    lambda row: json.dumps(row).encode()
)
NOISE = st.binary(max_size=40).map(lambda line: b"#" + line.replace(b"\n", b""))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**63 - 1) | NO_ROWS | NOISE, max_size=6))
@example([b"[" * 100_000, 3, b'{"a":' * 100_000, b'{"step": 2, "text": "\xff"}', b"5"])
def test_lines_that_are_no_row_are_left_out(tmp_path_factory, lines) -> None:
    """Whole numbers stand for the rows of those steps; anything else is no row."""
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    steps = [line for line in lines if isinstance(line, int)]
    rows = [b'{"step": %d}' % line if isinstance(line, int) else line for line in lines]
    path.write_bytes(b"".join(row + b"\n" for row in rows))
    assert read_metrics(path) == [{"step": step} for step in sorted(set(steps))]
    assert MetricsFile(path).truncate_after(2**63) == len(lines) - len(steps)
    assert path.read_text() == "".join(f'{{"step": {step}}}\n' for step in steps)


def test_full_disk_is_said_once() -> None:
    said: list[str] = []
    file = MetricsFile(Path("/dev/full"), report=said.append)
    for step in range(3):
        file.append(step, {})
    file.close()
    assert len(said) == 1 and "No space left" in said[0]


def test_the_last_step_is_read_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    assert last_step(path) == 0
    file = MetricsFile(path)
    for step in range(1, 4000):
        file.append(step, {"train_loss": 2.5, "diagnostics/x": [0.1] * 8})
    file.close()
    assert last_step(path) == 3999
    with path.open("ab") as handle:
        handle.write(b'{"step": 4000, "train_l')  # being written
    assert last_step(path) == 3999
