"""Results by total heads, training FLOPs and parameters, of runs whose heads grow too."""

from __future__ import annotations

import pytest

from model.heads import parse_heads
from pretrain.config.run_config import RunConfig
from pretrain.growth.settings import GrowthConfig
from pretrain.study.costs import training_flops
from pretrain.study.report.over_cost import (
    beside_heads,
    draw_by_flops,
    draw_by_parameters,
    draw_by_total_heads,
    order,
)
from tests.helpers.planted_runs import result
from tests.pretrain.study.report.conftest import growing_view, small_study, view

GROWTH = {"criterion": "incrt", "start": 1, "maximum": 8}
LAYERS = 4


def grown_view(variants):
    """A head in every layer, two from step 20 on, four from step 60 on."""

    def heads_at(run, step):
        return (1 + (step >= 20) + 2 * (step >= 60),) * LAYERS

    return growing_view(variants, lambda run: 3.5 + 0.01 * run.seed, heads_at)


def by_hand(heads):
    """6 N_matmul + 12 L T A, of a llama block with heads of 16."""
    d, ffn, vocab, T = 128, 384, 2048, 256
    A = 16 * heads
    return 6 * (LAYERS * (4 * d * A + 3 * d * ffn) + d * vocab) + 12 * LAYERS * T * A


def test_flops_of_a_run_that_grows_are_those_of_its_heads_at_the_time():
    found = grown_view({"grown": {"growth": GROWTH}})
    grown, uniform = found.summaries[""][1].runs[1], found.summaries[""][0].runs[1]
    tokens = 1024
    expected = tokens * (20 * by_hand(1) + 40 * by_hand(2) + 20 * by_hand(4))
    assert training_flops(grown) == pytest.approx(expected, rel=1e-12)
    assert training_flops(uniform) == pytest.approx(tokens * 80 * by_hand(8), rel=1e-12)
    assert training_flops(result(found.study.runs[0], [])) is None  # without a checkpoint


@pytest.mark.parametrize("draw", [draw_by_flops, draw_by_parameters, draw_by_total_heads])
def test_every_run_and_every_mean_is_drawn(draw, tmp_path, kept_figures):
    found = grown_view({"grown": {"growth": GROWTH}})
    assert draw(found, tmp_path / "x.png") == ""
    (axis,) = kept_figures["x.png"].axes
    lines = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axis.lines]
    assert [len(line) for line in lines] == [1, 2, 1, 2]  # the mean and the runs of each variant
    assert [y for _, y in lines[3]] == pytest.approx([3.51, 3.52]) and lines[2][0][1] == pytest.approx(3.515)
    assert lines[3][0][0] < lines[1][0][0]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_equal_costs_are_not_drawn(tmp_path):
    reason = draw_by_flops(grown_view({"rising": {"heads": "2,4,8,8"}}), tmp_path / "x.png")
    assert reason == "in every comparison the finished runs have the same training FLOPs"
    assert not (tmp_path / "x.png").exists()


def test_total_heads_are_those_of_variants_that_differ_in_heads_alone(tmp_path, kept_figures):
    """An order is a line through the means of its totals."""
    heads = {"a": "8x4", "b": "2,4,8,16", "c": "4x4", "d": "16x4"}
    variants = {name: {"heads": text} for name, text in heads.items()}
    variants["fast"] = {"heads": "1x4", "optimizer": {"learning_rate": 1.0e-3}}
    study = small_study(baseline="a", variants=variants)
    found = view(study, lambda run: {"a": 3.5, "c": 3.6, "d": 3.7}.get(run.variant, 3.0) + 0.01 * run.seed)
    assert draw_by_total_heads(found, tmp_path / "x.png") == ""
    (axis,) = kept_figures["x.png"].axes
    lines = {line.get_label(): line for line in axis.lines}
    assert list(lines["constant"].get_xdata()) == [16, 32, 64]
    assert list(lines["constant"].get_ydata()) == pytest.approx([3.62, 3.52, 3.72])
    assert list(lines["ascending"].get_xdata()) == [30]


@pytest.mark.parametrize(
    ("heads", "word"),
    [
        ("4x3", "constant"),
        ("2,4,4", "ascending"),
        ("4,4,2", "descending"),
        ("2,4,2", "mixed"),
        ("3", "constant"),
    ],
)
def test_order(heads, word):
    assert order(parse_heads(heads)) == word


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"model": "prism-tiny"}, []),
        ({"heads": "6x6"}, []),
        ({"architecture": {"heads": "6x6"}}, []),
        ({"steps": 5}, ["steps"]),
        ({"architecture": {"d_model": 384}}, ["d_model"]),
        ({"model": "uniform-micro"}, ["layers"]),
        ({"growth": GrowthConfig(criterion="incrt")}, ["growth.criterion"]),
    ],
)
def test_what_differs_beside_heads_is_named(changes, fields):
    base = {"model": "uniform-tiny"}
    assert beside_heads(RunConfig(**base | changes), RunConfig(**base))[: len(fields) or None] == fields
