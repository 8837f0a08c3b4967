"""The picture of heads that grow: the counts that metrics.jsonl shows, of each run and in the mean."""

from __future__ import annotations

from pretrain.study.costs import head_history
from pretrain.study.report.growing import draw_growing_heads, mean_heads
from tests.helpers.planted_runs import result
from tests.pretrain.study.report.conftest import growing_view

GROWTH = {"criterion": "incrt", "start": 1, "maximum": 8}
LAYERS = 4


def grown_view(variants):
    """Layer 3 gets heads at step 20, and at 40 (seed 1) or 60 (seed 2); the others keep one."""

    def heads_at(run, step):
        full = 40 if run.seed == 1 else 60
        return (1, 1, 1, 1 + (step >= 20) + 2 * (step >= full))

    return growing_view(variants, lambda run: 3.5, heads_at)


def test_the_history_is_that_of_the_rows():
    uniform, grown = grown_view({"grown": {"growth": GROWTH}}).summaries[""]
    history = dict(head_history(grown.runs[1]))
    assert [history[step][3] for step in (0, 20, 40, 80)] == [1, 2, 4, 4]
    assert {counts[:3] for counts in history.values()} == {(1, 1, 1)}
    assert head_history(uniform.runs[1]) == [(0, (8,) * 4), (80, (8,) * 4)]
    assert head_history(result(uniform.runs[1].planned, [])) == []


def test_runs_and_means_are_drawn(tmp_path, kept_figures):
    found = grown_view({"grown": {"growth": GROWTH}, "other": {"growth": GROWTH | {"grow_share": 0.5}}})
    means = mean_heads([head_history(run) for run in found.summaries[""][1].finished if run.saved])
    assert [means[3][step] for step in (0, 20, 40, 60, 80)] == [1, 2, 3, 4, 4]
    assert set(means[0]) == {1}
    assert draw_growing_heads(found, tmp_path / "x.png") == ""
    shown = [axis for axis in kept_figures["x.png"].axes if axis.axison]
    assert [axis.get_title() for axis in shown] == [
        f"{name}, 2\N{NO-BREAK SPACE}seeds" for name in ("grown", "other")
    ]
    labels = [line.get_label() for line in shown[0].lines]
    assert labels[::3] == [f"layer {layer}" for layer in range(LAYERS)]
    assert len(labels) == LAYERS * 3  # two runs and their mean
    assert [line.get_ydata()[-1] for line in shown[0].lines[::3]] == [1, 1, 1, 4]
    places = [line.get_transform().transform((0, 1))[1] for line in shown[0].lines[::3]]
    assert places == sorted(set(places))  # none hides another
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_fixed_heads_are_not_drawn(tmp_path):
    reason = draw_growing_heads(grown_view({"narrow": {"heads": "4x4"}}), tmp_path / "x.png")
    assert reason == "no finished run has heads that grow"
    assert not (tmp_path / "x.png").exists()
