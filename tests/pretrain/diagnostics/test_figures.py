"""The pictures show what is there: no bar without a beginning, no layer 0.5, no band without a name."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from matplotlib.figure import Figure

from pretrain.diagnostics import figures
from pretrain.diagnostics.attention import HEAD_MEASURES
from pretrain.diagnostics.forward import LAYER_MEASURES
from pretrain.diagnostics.measure import RunFigures, group_and_seed

LAYERS = 3
NOTE = "data differ: a (one); b (two)"


def run(name, steps=(50, 100), shift=0.0):
    rows = []
    for step in steps:
        row = {"step": step, "tokens": 10 * step, "val_loss": 5.0 + shift, "val_bpb": 2.0 + shift}
        for at, measure in enumerate(
            (*HEAD_MEASURES, *LAYER_MEASURES, "lambda_q_initial", "lambda_k_initial")
        ):
            for layer in range(LAYERS):
                row[f"diagnostics/{measure}/layer_{layer}"] = (1 + at + layer + shift) * step / 100
        for name_of_group in ("base/decay", "base/no_decay"):
            for measure in figures.BY_GROUP:
                row[f"diagnostics/{measure}/{name_of_group}"] = 1e-3 * step
        row["diagnostics/attention_distance/heads"] = [[1.0, 2.0]] * LAYERS
        rows.append(row)
    return RunFigures(name, *group_and_seed(name), rows, rows[-1], LAYERS)


def grouped(*names, steps=(50, 100)):
    found = {}
    for index, name in enumerate(names):
        found.setdefault(group_and_seed(name)[0], []).append(run(name, steps, shift=0.1 * index**2))
    return found


@pytest.fixture
def drawn(monkeypatch):
    """File name -> figure of every picture; not written, which takes seconds each."""
    kept = {}

    @contextmanager
    def keeping(path, setting, rows, columns, *, size, dpi, notes=(), **subplots):
        kept[path.name] = figure = Figure(figsize=size)
        figure.notes = list(notes)
        yield figure, figure.subplots(rows, columns, **subplots)

    monkeypatch.setattr(figures, "saved_figure", keeping)
    return kept


def panels(figure):
    return [axis for axis in figure.axes if axis.axison]


def ticks(axis):
    low, high = axis.get_xlim()
    return [tick for tick in axis.get_xticks() if low <= tick <= high]


def legend(figure):
    return [text.get_text() for entry in figure.legends for text in entry.get_texts()]


def test_logarithmic_panels_have_points_and_others_bars_from_zero(drawn, tmp_path):
    figures.draw_layers(grouped("a", "b"), tmp_path / "layers.png")
    titles = {figures.TITLES[measure]: measure for measure in figures.TITLES}
    for axis in panels(drawn["layers.png"]):
        logarithmic = titles[axis.get_title()] in figures.LOGARITHMIC
        assert (axis.get_yscale() == "log") == logarithmic
        assert (not axis.patches) == logarithmic
        if not logarithmic:
            assert axis.get_ylim()[0] == 0


@pytest.mark.parametrize("steps", [(100,), (1, 2)])
def test_ticks_are_whole_and_steps_begin_at_zero(drawn, tmp_path, steps):
    figures.draw_all(grouped("a", "b", steps=steps), "a", tmp_path)
    assert set(drawn) == {"curves.png", "layers.png", "difference.png", "difference_training.png"}
    for name, figure in drawn.items():
        for axis in panels(figure):
            found = ticks(axis)
            assert found and all(tick == round(tick) for tick in found), (name, axis.get_title(), found)
            if axis.get_xlabel() == "step":
                low, high = axis.get_xlim()
                assert low == 0 and high >= steps[-1]


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_curves_are_not_a_ribbon(drawn, tmp_path, groups):
    figures.draw_curves(grouped(*"abc"[:groups]), tmp_path / "curves.png")
    width, height = drawn["curves.png"].get_size_inches()
    assert 1 / 1.7 < width / height < 1.7
    shown = panels(drawn["curves.png"])
    assert len(shown) == groups * (len(HEAD_MEASURES) + len(LAYER_MEASURES) + 2 + len(figures.BY_GROUP))


def test_groups_are_on_one_scale(drawn, tmp_path):
    figures.draw_curves(grouped("a", "b"), tmp_path / "curves.png")
    first, second, *_ = panels(drawn["curves.png"])
    assert first.get_title() == "a" and second.get_title() == "b"
    assert first.get_ylim() == second.get_ylim() and second.get_ylabel() == ""


@pytest.mark.parametrize("seeds", [1, 2])
def test_bands_are_named(drawn, tmp_path, seeds):
    names = [f"{group}-s{seed}" for group in "ab" for seed in range(1, seeds + 1)]
    figures.draw_all(grouped(*names), "a", tmp_path)
    for name, figure in drawn.items():
        named = any("one standard deviation over the seeds" in text for text in legend(figure))
        assert named == (seeds > 1), name
    assert any("dots" in text for text in legend(drawn["layers.png"]))


def test_what_does_not_compare_stands_above(drawn, tmp_path):
    figures.draw_all(grouped("a", "b"), "a", tmp_path, [NOTE], loss="val_bpb")
    assert all(figure.notes == [NOTE] for figure in drawn.values())
    titles = [axis.get_title() for axis in panels(drawn["difference_training.png"])]
    assert "Δ validation loss (bits per byte)" in titles and not any(
        "nats)" in t and "loss" in t for t in titles
    )
