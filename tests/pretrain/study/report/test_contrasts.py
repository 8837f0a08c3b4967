"""Contrasts of a report, by hand and by scipy; what cannot be compared is left out with its reason."""

from __future__ import annotations

import pytest
import yaml
from scipy.stats import ttest_1samp

from pretrain.study.command import main
from tests.helpers.planted_runs import plant
from tests.pretrain.study.report.conftest import planted, small_study, view

VARIANTS = {"uniform": {"heads": "8x4"}, "rising": {"heads": "2,4,8,8"}, "falling": {"heads": "8,8,4,2"}}
CONTRASTS = {
    "order": "one.rising - one.falling",
    "order by width": "(one.rising - one.falling) - (two.rising - two.falling)",
}
WIDTHS = {"width": {"one": {}, "two": {"architecture": {"d_model": 256}}}}
LOSSES = {
    "one": {"uniform": [3.5, 3.6, 3.4], "rising": [3.48, 3.55, 3.44], "falling": [3.51, 3.57, 3.49]},
    "two": {"uniform": [3.1, 3.2, 3.0], "rising": [3.12, 3.21, 3.04], "falling": [3.11, 3.19, 3.01]},
}


def study_of(*folder, **more):
    given = {"baseline": "uniform", "variants": VARIANTS, "vary": WIDTHS, "contrasts": CONTRASTS}
    return small_study(*folder, **given, **more)


def loss(run):
    width, variant = run.variant.split(".")
    return LOSSES[width][variant][run.seed - 1]


def of_two(value):
    """An option of planted that the runs of the second width have."""
    return lambda run: value if run.variant.startswith("two") else None


def test_values_and_intervals_by_hand():
    order, by_width = (found.values for found in view(study_of(), loss).contrasted)
    assert order == pytest.approx({1: -0.03, 2: -0.02, 3: -0.05})
    assert by_width == pytest.approx({1: -0.04, 2: -0.04, 3: -0.08})  # a difference of differences, whole
    assert order.mean == pytest.approx(-0.1 / 3)


def test_a_seed_counts_when_all_its_runs_are_finished():
    found = view(study_of(), loss, without=("two-rising-s2", "one-falling-s3")).contrasted
    order, by_width = (each.values for each in found)
    assert list(order) == [1, 2] and list(by_width) == [1] and by_width.interval is None


def test_p_is_adjusted_for_the_primary_ones_alone():
    both = view(study_of(), loss).contrasted
    ps = [ttest_1samp(list(each.values.values()), 0).pvalue for each in both]
    assert [each.p for each in both] == pytest.approx(ps)
    first, second = sorted(ps)
    assert sorted(each.adjusted for each in both) == pytest.approx([2 * first, max(2 * first, second)])
    one = view(study_of(primary=["order by width"]), loss).contrasted
    assert [each.adjusted for each in one] == [None, pytest.approx(ps[1])]


@pytest.mark.parametrize(
    ("data", "named"),
    [({"data": [("deadbeef", "1")]}, "64 windows of c0ffee00 x 1"), ({"tokenizer": "other"}, "0f0f")],
)
def test_another_text_or_tokenizer_is_left_out_with_the_reason(data, named):
    found = view(study_of(), loss, data=of_two(data))
    order, by_width = found.contrasted
    assert order.values and not by_width.values
    said = f"contrast order by width: several texts or tokenizers: {named}"
    assert found.caveats[-1].startswith(said)


def test_the_command_reports_contrasts_of_the_file_that_it_is_given(tmp_path, capsys):
    """On terminal and page; a folder may have been run before its study had contrasts."""
    study = study_of(tmp_path / "old")
    values = yaml.safe_load(study.text)
    del values["contrasts"]
    for run in planted(study, loss):
        plant(run)
    (tmp_path / "old/study.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (tmp_path / "new.yaml").write_text(study.text)
    (tmp_path / "old/gone-s1").mkdir()
    (tmp_path / "old/gone-s1/config.yaml").write_text("")

    assert main(["report", str(tmp_path / "new.yaml"), "--out", str(tmp_path / "old")]) == 0
    said = capsys.readouterr().out
    page = (tmp_path / "old/report/index.html").read_text()
    assert "one.rising - one.falling" in said and "<h2>Contrasts</h2>" in page
    assert "-0.0333 [-0.0713, +0.0046]" in said
    assert "Left out: the folder also holds 1 run that the study does not name: gone-s1." in page

    assert main(["report", str(tmp_path / "old")]) == 0
    assert "one.rising - one.falling" not in capsys.readouterr().out
