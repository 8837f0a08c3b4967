"""Results by training FLOPs and parameters, of runs whose heads grow too."""

from __future__ import annotations

import pytest

from pretrain.study.report.by_cost import draw_by_flops, draw_by_parameters
from pretrain.study.report.summaries import training_flops
from tests.helpers.planted_runs import result

GROWTH = {"criterion": "incrt", "start": 1, "maximum": 8}
LAYERS = 4


@pytest.fixture
def view(growing_view):
    """A head in every layer, two from step 20 on, four from step 60 on."""

    def heads_at(run, step):
        return (1 + (step >= 20) + 2 * (step >= 60),) * LAYERS

    return lambda variants: growing_view(variants, lambda run: 3.5 + 0.01 * run.seed, heads_at)


def by_hand(heads):
    """6 N_matmul + 12 L T A, of a llama block with heads of 16."""
    d, ffn, vocab, T = 128, 384, 2048, 256
    A = 16 * heads
    return 6 * (LAYERS * (4 * d * A + 3 * d * ffn) + d * vocab) + 12 * LAYERS * T * A


def test_flops_of_a_run_that_grows_are_those_of_its_heads_at_the_time(view):
    found = view({"grown": {"growth": GROWTH}})
    grown, uniform = found.summaries[""][1].runs[1], found.summaries[""][0].runs[1]
    tokens = 1024
    expected = tokens * (20 * by_hand(1) + 40 * by_hand(2) + 20 * by_hand(4))
    assert training_flops(grown) == pytest.approx(expected, rel=1e-12)
    assert training_flops(uniform) == pytest.approx(tokens * 80 * by_hand(8), rel=1e-12)


def test_a_run_without_a_checkpoint_has_no_cost(view):
    found = view({"narrow": {"heads": "4x4"}})
    assert training_flops(result(found.study.runs[0], [])) is None


@pytest.mark.parametrize("draw", [draw_by_flops, draw_by_parameters])
def test_every_run_and_every_mean_is_drawn(draw, tmp_path, view, kept_figures):
    found = view({"grown": {"growth": GROWTH}})
    assert draw(found, tmp_path / "x.png") == ""
    (axis,) = kept_figures["x.png"].axes
    lines = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axis.lines]
    assert [len(line) for line in lines] == [2, 1, 2, 1]  # the runs and the mean of each variant
    assert [y for _, y in lines[2]] == pytest.approx([3.51, 3.52]) and lines[3][0][1] == pytest.approx(3.515)
    assert lines[2][0][0] < lines[0][0][0]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_equal_costs_are_not_drawn(tmp_path, view):
    reason = draw_by_flops(view({"rising": {"heads": "2,4,8,8"}}), tmp_path / "x.png")
    assert reason == "in every comparison the finished runs have the same training FLOPs"
    assert not (tmp_path / "x.png").exists()
