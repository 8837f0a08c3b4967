"""metrics.jsonl: written at once, read back, cut at a resume."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.metrics.file import (
    EVALUATION_NAME,
    FILE_NAME,
    Columns,
    MetricsFile,
    _lines,
    encode,
    last_step,
    read_metrics,
)
from pretrain.plots.command import run_plots
from tests.helpers.refusals import refused


def test_rows_are_written_at_once_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    file = MetricsFile(path)
    file.append(1, {"train_loss": torch.tensor(2.5), "grad_norm": np.float32(0.5), "lr/base": 1e-3})
    assert json.loads(path.read_text()) == {"step": 1, "train_loss": 2.5, "grad_norm": 0.5, "lr/base": 1e-3}
    file.append(2, {"train_loss": 2.0})
    file.append(2, {"val_loss": 2.1})
    file.close()
    rows = read_metrics(str(tmp_path))
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows  # one row a step
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


FIGURES = {name: st.floats() | st.integers(0, 10) for name in ("train_loss", "val_loss", "a/b", "own")}
SESSIONS = st.lists(
    st.tuples(
        st.integers(0, 3), st.lists(st.tuples(st.integers(0, 2), st.fixed_dictionaries({}, optional=FIGURES)))
    ),
    max_size=4,
)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(SESSIONS, st.integers(0, 12))
def test_sessions_leave_one_row_a_step(tmp_path_factory, sessions, cut) -> None:
    """Sessions that each go back some steps and log rows, several of a step: as a dictionary has them."""
    path = tmp_path_factory.mktemp("run") / FILE_NAME
    expected: dict[int, dict[str, Any]] = {}
    for back, logged in sessions:
        step = max(0, max(expected, default=0) - back)
        expected = {at: row for at, row in expected.items() if at <= step}
        file = MetricsFile(path)
        file.truncate_after(step)
        for ahead, row in logged:
            step += ahead
            file.append(step, row)
            expected.setdefault(step, {"step": step}).update(row)
            rows = [json.loads(line, parse_constant=str) for line in path.read_text().splitlines()]
            assert rows == [encode(row) for row in expected.values()]
        file.close()
        with path.open("ab") as half:
            half.write(b'{"step": 99, "train_loss"'[:cut])
    assert encode(read_metrics(path)) == encode([*expected.values()])
    columns = Columns(path)
    for name in FIGURES:
        steps, values = columns[name]
        held = {step: row[name] for step, row in expected.items() if name in row}
        assert repr(dict(zip(steps.tolist(), values.tolist(), strict=True))) == repr(
            {step: float(value) for step, value in held.items()}
        )


LINKS = {"loop": FILE_NAME, "endless": "/dev/zero", "full": "/dev/full", "inside a file": f"{__file__}/x"}
READERS: list[Callable[[Path], object]] = [
    read_metrics,
    Columns,
    last_step,
    lambda folder: MetricsFile(folder / FILE_NAME).truncate_after(3),
]
READERS.append(lambda folder: run_plots([str(folder)]))


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", ["folder", "pipe", *LINKS])
def test_only_files_with_an_end_are_read(tmp_path: Path, kind, read) -> None:
    make = {"folder": os.mkdir, "pipe": os.mkfifo}.get(kind) or partial(os.symlink, LINKS[kind])
    make(tmp_path / FILE_NAME)
    with refused("give the metrics.jsonl of a run", begins=f"metrics: {tmp_path / FILE_NAME}: "):
        read(tmp_path)


NO_NUMBERS = ["[1]", '"x"', "true", "null", "{}", "9" * 4000, "1e999", "NaN", '""', "[[]]", '"NaN "']


@pytest.mark.parametrize("name", ["tokens", "train_loss", "val_bpb", "lr/base", "diagnostics/x/layer_1"])
@pytest.mark.parametrize("text", NO_NUMBERS)
def test_figures_that_are_no_numbers_are_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(f'{{"step": 1, "tokens": 2}}\n{{"step": 2, "{name}": {text}}}\n')
    for read in (*READERS[:1], Columns, READERS[-1]):
        with refused(
            "is not valid; give a number", begins=f"metrics: {tmp_path / FILE_NAME}, line 2: {name}: "
        ):
            read(tmp_path)
    assert MetricsFile(tmp_path / FILE_NAME).truncate_after(2) == 0  # a run goes on


def test_a_growing_file_is_read_as_far_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text('{"step": 1}\n')
    with path.open("a") as file:
        for number, line in enumerate(_lines(path), 2):
            file.write(line.decode().replace("1", str(number)))
            file.flush()
    assert number == 2 and len(read_metrics(path)) == 2


@pytest.mark.slow
def test_a_million_rows_take_little(tmp_path: Path) -> None:
    """At most 300 MB and 5 s of processor time, in a process of its own, with the imports."""
    rest = '"skipped": 0, "lr/base/decay": 1e-3, "lr/base/no_decay": 1e-3, "grad_norm": 1.2345678901}\n'
    with (tmp_path / FILE_NAME).open("w") as file:
        for step in range(1, 1_000_001):
            file.write(f'{{"step": {step}, "tokens": {1024 * step}, "train_loss": {2 + 1 / step}, {rest}')
    code = """if True:
        import re, resource, sys
        from pretrain.plots.command import main
        assert main(sys.argv[1:]) == 0
        used = resource.getrusage(resource.RUSAGE_SELF)
        peak = re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]
        print(int(peak) / 1024, used.ru_utime + used.ru_stime)"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True
    )
    megabytes, seconds = map(float, done.stdout.splitlines()[-1].split())
    assert megabytes < 300 and seconds < 10  # on two cores that others use; 5 when they are idle


def test_what_is_longer_than_any_row_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text('{"step": 1}\n')
    os.truncate(path, 1 << 34)  # sparse
    for read in (read_metrics, lambda path: MetricsFile(path).truncate_after(1)):
        with pytest.raises(UserError, match=r"metrics.jsonl, line 2 has more than 16,777,216 bytes"):
            read(path)
    assert path.stat().st_size == 1 << 34


def test_full_disk_is_said_once() -> None:
    said: list[str] = []
    file = MetricsFile(Path("/dev/full"), report=said.append)
    for step in range(3):
        file.append(step, {})
    file.close()
    assert len(said) == 1 and "No space left" in said[0]


def test_scores_with_other_examples_are_no_points_of_one_curve(tmp_path: Path) -> None:
    MetricsFile(tmp_path / FILE_NAME).append(9, {"train_loss": 2.0})
    for step, shots, score in ((3, None, 0.1), (6, None, 0.2), (6, 5, 0.4), (9, 5, 0.5)):
        of_task = {"evaluation/a/acc": score} | ({"evaluation/b/acc": score} if shots is None else {})
        row = {"scored": {"limit": None, "num_fewshot": shots, "dtype": None}} | of_task
        MetricsFile(tmp_path / EVALUATION_NAME).append(step, row)
    columns = Columns(tmp_path)
    assert [part.tolist() for part in columns["evaluation/a/acc"]] == [[6, 9], [0.4, 0.5]]
    assert [part.tolist() for part in columns["evaluation/b/acc"]] == [[3, 6], [0.1, 0.2]]


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
    path.write_bytes(b"")
    file = MetricsFile(path)
    large = {f"diagnostics/layer_{layer}/{number}": 1 / 3 for layer in range(1000) for number in range(8)}
    file.append(7, large)  # diagnostics of a thousand layers
    file.close()
    assert last_step(path) == 7 and path.stat().st_size > 300_000
