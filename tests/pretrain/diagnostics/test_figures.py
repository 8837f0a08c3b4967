"""The pictures show what the runs have measured."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from matplotlib.figure import Figure

from pretrain.diagnostics import figures
from pretrain.diagnostics.attention import HEAD_MEASURES
from pretrain.diagnostics.forward import LAYER_MEASURES
from pretrain.diagnostics.measure import RunMeasures, split_run_name
from tests.helpers.marks import slow

MEASURES = (*HEAD_MEASURES, *LAYER_MEASURES)
LAYERS = 3
NOTE = "data differ: a (one); b (two)"


def grouped(*names, steps=(50, 100)):
    """Runs by group whose measures are (1 + place of the measure + layer + shift) · step / 100."""
    found = {}
    for index, name in enumerate(names):
        shift, rows = 0.1 * index**2, []
        for step in steps:
            row = {"step": step, "val_loss": 5.0 + shift, "val_bpb": 2.0 + shift}
            for at, measure in enumerate(MEASURES):
                for layer in range(LAYERS):
                    row[f"diagnostics/{measure}/layer_{layer}"] = (1 + at + layer + shift) * step / 100
            for measure in figures.BY_GROUP:
                row |= {f"diagnostics/{measure}/base/{kind}": 1e-3 * step for kind in ("decay", "no_decay")}
            rows.append(row | {"diagnostics/attention_distance/heads": [[1.0, 2.0]] * LAYERS})
        run = RunMeasures(name, *split_run_name(name), rows, rows[-1], LAYERS)
        found.setdefault(run.group, []).append(run)
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

    monkeypatch.setattr(figures, "save_figure", keeping)
    return kept


def panels(figure):
    """By title, the axes that show something."""
    return {axis.get_title(): axis for axis in figure.axes if axis.axison}


@pytest.mark.parametrize("groups", [2, *slow([1, 3])])
def test_curves_have_a_panel_for_each_measure_and_group(drawn, tmp_path, groups):
    figures.draw_all(grouped(*"abc"[:groups]), dict.fromkeys("abc", "a"), tmp_path)
    width, height = drawn["curves.png"].get_size_inches()
    assert 1 / 2 < width / height < 2
    shown = panels(drawn["curves.png"])
    assert len(shown) == groups * (len(MEASURES) + len(figures.BY_GROUP))
    for title, axis in shown.items():
        measure = title.split("\n")[0]
        assert (axis.get_yscale() == "log") == (measure in figures.LOGARITHMIC)
        assert len(axis.lines) == (2 if measure in figures.BY_GROUP.values() else LAYERS)
        assert axis.get_ylim() == shown[f"{measure}\na"].get_ylim(), "groups are on one scale"
    assert ("difference.png" in drawn) == (groups > 1)


@pytest.mark.parametrize("steps", [(1, 2), *slow([((100,),)])])
def test_ticks_are_whole(drawn, tmp_path, steps):
    figures.draw_all(grouped("a", "b", steps=steps), {"b": "a"}, tmp_path)
    for name, figure in drawn.items():
        for title, axis in panels(figure).items():
            assert all(tick == round(tick) for tick in axis.get_xticks()), (name, title)


def test_differences_to_the_baseline_with_what_does_not_compare_above(drawn, tmp_path):
    figures.draw_all(grouped("a-s1", "a-s2", "b-s1", "b-s2"), {"b": "a"}, tmp_path, [NOTE], loss="val_bpb")
    assert set(drawn) == {"curves.png", "layers.png", "difference.png", "difference_training.png"}
    assert all(figure.notes == [NOTE] for figure in drawn.values())
    by_layer, training = (panels(drawn[f"{name}.png"]) for name in ("difference", "difference_training"))
    # Of b − a the shifts are 0.4 − 0 and 0.9 − 0.1.
    line, zero = by_layer["Δ attention distance D (tokens)"].lines
    assert line.get_label() == "b − a" and list(line.get_ydata()) == pytest.approx([0.6] * LAYERS)
    assert list(zero.get_ydata()) == [0, 0]
    loss = training["Δ validation loss (bits per byte)"].lines[0]
    assert list(loss.get_xdata()) == [50, 100] and list(loss.get_ydata()) == pytest.approx([0.6, 0.6])
    half = training["Δ attention distance D (tokens), upper half"].lines[0]
    assert list(half.get_ydata()) == pytest.approx([0.3, 0.6])
    assert not any("nats)" in title and "loss" in title for title in training)
