"""Pictures of a report: what they show, with which labels, and which are left out."""

from __future__ import annotations

import dataclasses
from itertools import combinations, pairwise

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from PIL import Image

from model.errors import UserError
from pretrain.study.report import compared, panels
from pretrain.study.report.pictures import PICTURES, draw_all
from tests.pretrain.study.report.conftest import keeping_figures, small_study, view

SCHEDULES = {"uniform": "8x4", "rising": "2,4,8,8", "falling": "8,8,4,2", "narrow": "4x4"}
EFFECTS = {"uniform": 0.0, "rising": -0.02, "falling": 0.01, "narrow": 0.005, "again": 0.0}


def compared_view(comparisons, losses=lambda run: 3.5, seeds=3, **options):
    return view(small_study(seeds=seeds, effect=0.02, comparisons=comparisons), losses, **options)


def full_view():
    """Two sizes of four schedules and a check of equal runs; one run is missing."""
    variants = {name: {"heads": heads} for name, heads in SCHEDULES.items()}
    variants["again"] = {"heads": "8x4", "seed_shift": 1000}
    comparisons = {
        "small": {"baseline": "uniform", "variants": variants},
        "large": {
            "settings": {"architecture": {"d_model": 256}},
            "baseline": "uniform",
            "variants": variants,
        },
    }

    def more(run):
        heads = run.run.build_model_config().heads
        distances = {
            f"diagnostics/attention_distance/layer_{layer}": 40.0 + 10 * layer + count + run.seed
            for layer, count in enumerate(heads)
        }
        return distances | {"evaluation/piqa/acc": 0.6 + 0.01 * run.seed - EFFECTS[run.variant]}

    def losses(run):
        wobble = 0.003 * ((7 * run.seed + len(run.variant)) % 5)
        return 3.5 + EFFECTS[run.variant] + 0.02 * run.seed + wobble

    return compared_view(comparisons, losses, more=more, without=("small-rising-s3",))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The pictures of full_view: their folder, what draw_all returns, and every figure by its file."""
    folder = tmp_path_factory.mktemp("report")
    with keeping_figures() as made:
        found = draw_all(full_view(), folder)
    for figure in made.values():
        figure.draw_without_rendering()  # places are those of the resolution that it was saved with
    return folder, found, made


def shown_axes(figure):
    return [axis for axis in figure.axes if axis.axison]


def test_every_picture_is_drawn_and_is_a_png(drawn):
    folder, found, _ = drawn
    # No heads grow, and all variants cost the same: see test_growing.py and test_over_cost.py.
    left_out = {path.stem for path, reason in found.items() if reason}
    assert left_out == {"growing_heads", "training_flops", "parameters"}
    assert {path.stem for path in folder.iterdir()} == PICTURES.keys() - left_out
    for path in folder.iterdir():
        with Image.open(path) as image:
            image.load()
            assert image.format == "PNG" and min(image.size) > 200


@pytest.mark.parametrize(
    ("file", "x", "y"),
    [
        ("schedules.png", "layer", "heads of the layer (log)"),
        ("gap_over_tokens.png", "tokens", "Δ validation loss\n(nats per token)"),
        (
            "gap_by_scale.png",
            "parameters, by comparison",
            "Δ validation loss (nats per token)\nlower is better",
        ),
        ("total_heads.png", "total heads of all layers", "validation loss\n(nats per token)"),
    ],
)
def test_axes_say_what_they_show_and_its_unit(drawn, file, x, y):
    for axis in shown_axes(drawn[2][file]):
        assert (axis.get_xlabel(), axis.get_ylabel()) == (x, y)


def test_results_and_distances_say_their_units_and_how_many_seeds_there_are(drawn):
    shown = shown_axes(drawn[2]["results.png"])
    assert [axis.get_xlabel() for axis in shown[-2:]] == [
        "validation loss (nats per token)",
        "Δ validation loss (nats per token); lower is better",
    ]
    assert [axis.get_title().replace("\xa0", " ") for axis in shown[:3]] == [
        "small: results, 2 to 3 seeds",
        "small: Δ against the baseline, 2 to 3 pairs",
        "large: results, 3 seeds",
    ]
    rows = [label.get_text() for label in shown[0].get_yticklabels()]
    assert rows == ["uniform (baseline)", "rising (2 of 3)", "falling", "narrow", "again (other seeds)"]
    labels = {axis.get_ylabel() for axis in shown_axes(drawn[2]["attention_distance.png"])}
    assert labels == {"attention distance D (tokens)", "ΔD (tokens)"}


def test_the_forest_shows_every_pair_and_the_interval(drawn):
    summary = next(s for s in full_view().summaries["large"] if s.variant == "rising")
    axis = shown_axes(drawn[2]["results.png"])[3]
    place = 1
    assert any(list(line.get_xdata()) == [0, 0] for line in axis.lines)
    singles = [line for line in axis.lines if list(line.get_ydata()) == [place] * 3]
    assert list(singles[0].get_xdata()) == pytest.approx(list(summary.differences.values()))
    (low, high) = next(
        (bar.get_segments()[0][0][0], bar.get_segments()[0][1][0])
        for bar in axis.collections
        if bar.get_segments()[0][0][1] == place
    )
    assert (low, high) == pytest.approx((summary.differences.interval.low, summary.differences.interval.high))


def test_the_gap_is_that_of_the_pairs(drawn):
    axis = shown_axes(drawn[2]["gap_over_tokens.png"])[1]
    line = next(bars.lines[0] for bars in axis.containers if bars.get_label() == "falling − uniform")
    summary = full_view().summaries["large"][2]
    assert line.get_xdata()[-1] == 80 * 512
    assert line.get_ydata()[-1] == pytest.approx(sum(summary.differences.values()) / 3)


def test_distance_differences_are_those_of_the_pairs(drawn):
    relative = shown_axes(drawn[2]["attention_distance.png"])[1]
    rising = next(line for line in relative.lines if len(line.get_xdata()) == 4)
    assert list(rising.get_ydata()) == pytest.approx(
        [2 - 8, 4 - 8, 0, 0]
    )  # as planted: D has one token a head


def test_no_text_lies_on_other_text(drawn):
    for file, figure in drawn[2].items():
        for axis in shown_axes(figure):
            ticks = zip(axis.get_xticks(), axis.get_xticklabels(), strict=True)
            low, high = axis.get_xlim()  # ticks beyond are not drawn
            labels = [label for place, label in ticks if low <= place <= high]
            labels += [*axis.get_yticklabels(), axis.xaxis.label, axis.yaxis.label]
            texts = [text for text in [*labels, axis.title, *axis.texts] if text.get_text()]
            for one, other in combinations(texts, 2):
                apart = not one.get_window_extent().overlaps(other.get_window_extent())
                assert apart, (file, one.get_text(), other.get_text())


def in_two_baselines():
    """a's baseline is small, b's is large; each has the other as a variant."""
    heads = {"small": {"heads": "4x4"}, "large": {"heads": "8x4"}, "rising": {"heads": "2,4,8,8"}}
    wide = {"architecture": {"d_model": 256}}
    return compared_view(
        {
            "a": {"baseline": "small", "variants": heads},
            "b": {"baseline": "large", "variants": heads, "settings": wide},
        },
        lambda run: 3.5 + EFFECTS.get(run.variant, 0.0),
    )


def test_lines_of_one_panel_are_told_apart_without_colour():
    """Neighbours differ in lightness by a third of its range at least."""
    counts = ("8x4", "4x4", "2x4", "1x4", "16x4", "32x4", "64x4", "2,4,8,8")
    heads = {name: {"heads": each} for name, each in zip("abcdefgh", counts, strict=True)}
    styles = panels.line_styles(compared_view({"one": {"baseline": "a", "variants": heads}}))
    colors = [to_rgb(styles[name]["color"]) for name in "bcdefgh"]
    lightness = [0.299 * r + 0.587 * g + 0.114 * b for r, g, b in colors]
    apart = (max(lightness) - min(lightness)) / 3
    assert all(abs(one - other) > apart for one, other in pairwise(lightness))
    assert len({(style["linestyle"], style["marker"]) for style in styles.values()}) == 8
    two = panels.line_styles(in_two_baselines())
    assert len({(style["linestyle"], style["marker"]) for style in two.values()}) == 3
    assert two["small"]["color"] == two["large"]["color"] == "black"


def test_every_scale_names_its_own_baseline(tmp_path, kept_figures):
    assert compared.draw_gap_by_scale(in_two_baselines(), tmp_path / "scale.png") == ""
    (axis,) = kept_figures["scale.png"].axes
    assert axis.get_legend_handles_labels()[1] == ["rising − small or large"]
    ticks = [label.get_text().split("\n")[1:] for label in axis.get_xticklabels()]
    assert ticks == [["a", "(baseline small)"], ["b", "(baseline large)"]]


def test_the_gap_by_scale_is_that_of_the_pairs(drawn):
    (axis,) = shown_axes(drawn[2]["gap_by_scale.png"])
    found = full_view()
    for container, place in zip(axis.containers, range(1, 5), strict=True):
        shown = [found.summaries[name][place].differences.mean for name in ("small", "large")]
        assert list(container.lines[0].get_xdata()) == [0, 1]
        assert list(container.lines[0].get_ydata()) == pytest.approx(shown)


def test_the_effect_is_drawn_in_its_own_unit_alone(tmp_path, kept_figures):
    in_nats = full_view()
    in_bits = dataclasses.replace(in_nats, measure="val_bpb")
    for file, found in (("nats.png", in_nats), ("bits.png", in_bits)):
        compared.draw_results(found, tmp_path / file)
    said = [
        any("the effect that" in text.get_text() for text in kept_figures[file].legends[0].get_texts())
        for file in ("nats.png", "bits.png")
    ]
    assert said == [True, False]
    assert [len(kept_figures[file].axes[1].patches) for file in ("nats.png", "bits.png")] == [1, 0]


@pytest.mark.parametrize("lines", [3, 5])
def test_the_spread_of_many_lines_is_shown_beside_one_another(tmp_path, kept_figures, lines):
    """Bands of more than three lines would hide one another."""
    variants = {name: {"heads": f"{2**place}x4"} for place, name in enumerate("abcdef"[: lines + 1])}
    comparisons = {"one": {"baseline": "a", "variants": variants}}
    found = compared_view(comparisons, lambda run: 3.5 + 0.001 * run.seed**2 * len(run.variant))
    compared.draw_gap_over_tokens(found, tmp_path / "gap.png")
    (axis,) = kept_figures["gap.png"].axes
    bands = [isinstance(found, PolyCollection) for found in axis.collections]
    assert bands == [lines == 3] * lines
    if lines == 5:
        assert {found.get_segments()[0][0][0] for found in axis.collections} == {80 * 512}
        shifts = [found.get_transform().transform((0, 0))[0] for found in axis.collections]
        assert shifts == sorted(set(shifts))


def test_pictures_without_figures_are_left_out_with_a_reason(tmp_path):
    (tmp_path / "scores.png").write_bytes(b"of an earlier report")
    variants = {"control": {}, "slow": {"lr_rules": ["upper_qk"]}}
    found = compared_view({"one": {"baseline": "control", "variants": variants}})
    drawn = {path.name: reason for path, reason in draw_all(found, tmp_path).items()}
    assert {file for file, reason in drawn.items() if not reason} == {"results.png", "gap_over_tokens.png"}
    assert "same heads" in drawn["schedules.png"] and "zero-shot" in drawn["scores.png"]
    assert {path.name for path in tmp_path.iterdir()} == {"results.png", "gap_over_tokens.png"}


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "report").write_text("a file")
    found = compared_view(
        {"one": {"baseline": "a", "variants": {"a": {"heads": "8x4"}, "b": {"heads": "4x4"}}}}, seeds=1
    )
    with pytest.raises(UserError, match=r"schedules\.png"):
        compared.draw_schedules(found, tmp_path / "report" / "schedules.png")
