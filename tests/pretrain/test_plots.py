"""The training curves: drawn from what the metrics say."""

import html
import json
import re
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest

from pretrain import report
from pretrain.checkpoint.state import DataIdentity, TrainingState
from pretrain.data.tokenizer import SentencePieceTokenizer, tokenizer_hash
from pretrain.metrics.file import Columns, MetricsFile, encode
from pretrain.plots.command import MOST_POINTS, _curve, main, smooth
from pretrain.utils.plotting import curve_colors
from tests.helpers.refusals import refusal


def write_rows(folder, *rows):
    folder.mkdir(exist_ok=True)
    file = MetricsFile(folder / "metrics.jsonl")
    for step, row in rows:
        usual = {"tokens": step * 10, "lr/base/decay": 1e-3, "grad_norm": 1.0, "train_loss": 5 / step}
        file.append(step, usual | row)
    file.close()


def write_run(folder, steps):
    rows = {step: {} if step % 2 else {"val_loss": 6 / step} for step in range(1, steps + 1)}
    rows[2]["grad_norm"] = float("inf")
    write_rows(folder, *rows.items())


def texts(out, *folders):
    """The texts in the picture that the command draws of *folders*."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert main([*map(str, folders), "--out", str(out)]) == 0
    return [html.unescape(text) for text in re.findall(r">([^<>]+)</text>", out.read_text())]


def test_draws_one_picture_of_several_runs(tmp_path, capsys):
    for name in ("a", "b"):
        write_run(tmp_path / name, 6)
    main([str(tmp_path / "a"), str(tmp_path / "b")])
    picture = tmp_path / "a/plots/comparison.png"  # the run has its own
    assert capsys.readouterr().out == f"wrote    {picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_whose_gradients_were_never_finite_is_drawn(tmp_path):
    write_rows(tmp_path / "a", *((step, {"grad_norm": float("inf")}) for step in (1, 2, 3)))
    assert main([str(tmp_path / "a")]) == 0


def test_runs_of_one_name_are_told_apart(tmp_path, monkeypatch):
    for parent in ("one", "two"):
        (tmp_path / parent).mkdir()
        write_run(tmp_path / parent / "a", 4)
    folders = [tmp_path / parent / "a" for parent in ("one", "two")]
    assert {*map(str, folders)} <= {*texts(tmp_path / "both.svg", *folders)}
    monkeypatch.chdir(folders[0])
    write_run(tmp_path / "b", 4)
    assert {"a", "b"} <= {*texts(tmp_path / "here.svg", ".", "../../b")}


def test_no_two_of_many_curves_have_one_color():
    assert curve_colors(10) == [f"C{index}" for index in range(10)]
    assert len({*curve_colors(24)}) == 24


def test_tokens_are_counted_from_zero_in_short_numbers(tmp_path):
    write_rows(tmp_path, (1, {"tokens": 2_500_000}))
    found = texts(tmp_path / "curves.svg", tmp_path)
    assert {"500k", "1M", "2.5M"} <= set(found) and not any("00000" in text for text in found)


def test_series_are_the_rows_that_have_the_figure(tmp_path):
    write_run(tmp_path / "a", 5)
    tokens, losses = _curve(Columns(tmp_path / "a"), "val_loss")
    assert (tokens.tolist(), losses.tolist()) == ([20, 40], [3.0, 1.5])


def test_a_long_curve_keeps_its_ends_and_every_spike(tmp_path):
    """The line of a picture is that of all rows: drawn with few points it has the same highest and lowest."""
    steps = 3 * MOST_POINTS
    spikes = {7: 1e6, steps // 2: -1e6, steps - 3: float("inf")}
    rows = [{"step": n, "tokens": 2 * n, "train_loss": spikes.get(n, n % 10)} for n in range(1, steps + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(encode(row))}\n" for row in rows))
    tokens, losses = _curve(Columns(tmp_path), "train_loss")
    assert len(tokens) <= MOST_POINTS + 2 and (tokens[0], tokens[-1]) == (2, 2 * steps)
    drawn = dict(zip(tokens.tolist(), losses.tolist(), strict=True))
    assert {2 * n: value for n, value in spikes.items()}.items() <= drawn.items()


def test_a_smoothed_curve_is_the_means_of_its_neighbours():
    steps = np.arange(1, 151)
    values = np.sin(steps) + 5 / steps
    values[70] = np.inf
    tokens, means = smooth(10 * steps, values)
    for index in (0, 68, 69, 70, 147):  # 2 % of 150 rows are 3
        near = values[index : index + 3]
        assert means[index] == pytest.approx(near[np.isfinite(near)].mean(), rel=1e-12)
        assert tokens[index] == 10 * steps[index + 1]
    assert len(means) == 148 and smooth(steps[:4], values[:4])[1] == pytest.approx(values[:4])
    assert np.isnan(smooth(steps[:1], np.array([np.nan]))[1]).all()


def checkpoint(folder, step, **changes):
    """A checkpoint as far as comparing needs it; *changes* are to the data, ``run_`` ones to the run."""
    settings = {"data": "corpora/a", "document_mask": False, "validation": {"sequences": 8, "data": None}}
    of_run = [key for key in changes if key.startswith("run_")]
    settings |= {key.removeprefix("run_"): changes.pop(key) for key in of_run}
    data = DataIdentity(**{"tokenizer": "t", "data": [("aaaaaaaa", "1")]} | changes)
    state = TrainingState(step=step, run=settings, data=data, model={"context_length": 64})
    path = folder / "checkpoints" / f"step_{step:06d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text(state.to_json())
    return path


WINDOWS = "validation windows differ"
A, B = "a aaaaaaaa", "b bbbbbbbb"  # corpora, as they are named


@pytest.mark.parametrize(
    ("steps", "changes", "lines"),
    [
        (6, {}, []),
        (6, {"run_seed": 2}, []),
        (6, {"run_data": "corpora/copy"}, []),
        (4, {}, ["steps differ: 6 (a); 4 (b)"]),
        (
            6,
            {"data": [("bbbbbbbb", "1")], "run_data": "corpora/b"},
            [
                f"data differ: {A} (a); {B} (b)",
                f"{WINDOWS}: 8 of 64 tokens of {A} (a); 8 of 64 tokens of {B} (b)",
            ],
        ),
        (
            6,
            {"run_validation": {"sequences": 9, "data": None}},
            [f"{WINDOWS}: 8 of 64 tokens of {A} (a); 9 of 64 tokens of {A} (b)"],
        ),
        (
            6,
            {"run_document_mask": True},
            ["document masks differ: in one another's sight (a); kept apart (b)"],
        ),
        (6, None, ["no checkpoint says what b was trained on"]),
    ],
)
def test_what_does_not_compare_is_said_and_drawn(tmp_path, capsys, steps, changes, lines):
    for name, length in (("a", 6), ("b", steps)):
        write_run(tmp_path / name, length)
    checkpoint(tmp_path / "a", 6)
    if changes is not None:
        checkpoint(tmp_path / "b", steps, **changes)
    drawn = " ".join(texts(tmp_path / "curves.svg", tmp_path / "a", tmp_path / "b"))
    assert capsys.readouterr().err == "".join(f"warning: {line}\n" for line in lines)
    for line in lines:
        assert line in drawn


def test_losses_of_different_tokenizers_are_drawn_in_bits_per_byte(tmp_path, capsys):
    for name, size in (("a", 280), ("b", 290)):
        write_run(tmp_path / name, 6)
        text = [f"{n} bottles stand on shelf {7 * n}\n" for n in range(200)]
        tokenizer = SentencePieceTokenizer.train(text, size)
        tokenizer.save(checkpoint(tmp_path / name, 6, tokenizer=tokenizer_hash(tokenizer)) / "tokenizer")
    folders, out = (tmp_path / "a", tmp_path / "b"), tmp_path / "curves.svg"
    line = refusal(capsys, main, *folders, "--out", out)  # none of them has bits per byte
    assert "error: runs: tokenizers differ: b from a (different vocabulary" in line
    for folder in folders:
        write_rows(folder, (7, {"val_bpb": 2.0}))
    drawn = " ".join(texts(out, *folders))
    assert "validation loss (bits per byte)" in drawn and "nats per token)" not in drawn


@pytest.mark.parametrize("content", [None, ""])
def test_bad_input(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert refusal(capsys, main, tmp_path).startswith("error: run: ")


@pytest.mark.parametrize("out", ["a.xyz", "folder", "file/a.png", "x" * 300 + ".png"])
def test_pictures_that_cannot_be_written(tmp_path, capsys, out):
    write_run(tmp_path / "run", 4)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    refusal(capsys, main, tmp_path / "run", "--out", tmp_path / out)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_finished_run_without_a_picture_gets_one(tmp_path):
    """Its last session was killed after the final save."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(1, {"tokens": 10, "train_loss": 5.0, "grad_norm": 1.0})
    file.close()
    session = SimpleNamespace(
        state=SimpleNamespace(step=1),
        run=SimpleNamespace(folder=tmp_path, resume="auto"),
        finished=True,
        hooks=[],
    )
    picture = tmp_path / "plots" / "training.png"
    lines = report.describe_finished(session, [], ["step_000001 was fetched"])
    assert "is already finished at step 1" in lines[-1] and lines[0].endswith("step_000001 was fetched")
    drawn = picture.stat().st_mtime_ns
    report.describe_finished(session, [])
    assert picture.stat().st_mtime_ns == drawn
