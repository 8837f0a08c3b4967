"""The tables, pictures and sentences of a designed experiment, of planted runs."""

from __future__ import annotations

import numpy as np

from pretrain.study.report.page import terminal_lines, write_report
from pretrain.study.summaries import build_view
from pretrain.utils.format import NOTHING
from tests.helpers.planted_runs import planned_study
from tests.pretrain.study.report.conftest import SETTINGS, planted, rows_of, table_of

LAYERS = {f"heads[{layer}]": [2, 4, 8, 16] for layer in range(4)}
OF_LAST = {"2": 0.06, "4": 0.02, "8": 0.0, "16": 0.0}


def study_in(folder, seeds=2, **changes):
    values = {"method": "orthogonal", "runs": 16, "vary": LAYERS} | changes
    return planned_study(folder, recipe="micro", seeds=seeds, settings=SETTINGS, **values)


def loss(run):
    """Only the last layer matters; runs of a seed differ by a hash of their levels."""
    *others, last = run.variant.split(".")
    noise = np.random.default_rng([run.seed, *map(int, others), int(last)]).normal(scale=1e-3)
    return 4.0 + 0.1 * run.seed + OF_LAST[last] + noise


def test_a_report_has_effects_and_pictures(tmp_path):
    contrasts = {"few late": "heads[3]=2 - mean(heads[3]=8, heads[3]=16)"}
    study = study_in(tmp_path, contrasts=contrasts, predict={"rising": "2,4,8,16"})
    view = build_view(study, planted(study, loss))
    files = {path.name for path in write_report(view)}
    assert files == {"index.html", "effects.svg"}
    effects = {(row["factor"], row["level"]): row for row in table_of(view, "effects")}
    assert len(effects) == 16
    shown = effects["heads[3]", "2"]
    assert shown["runs"] == "8"
    assert shown["effect [95 % interval]"].startswith("+0.04")
    assert abs(float(effects["heads[0]", "2"]["effect [95 % interval]"].split()[0])) < 0.002
    assert rows_of(view, "variance")["heads[3]"]["share"] > rows_of(view, "variance")["heads[0]"]["share"]
    contrast = rows_of(view, "contrasts")["few late"]
    assert contrast["of"] == contrasts["few late"]
    assert contrast["difference [95 % interval]"].startswith("+0.0")
    assert rows_of(view, "predictions")["rising"]["levels"] == "2, 4, 8, 16"
    printed = "\n".join(terminal_lines(view))
    assert "Effects of levels" in printed
    assert "2.2.2.2 " not in printed  # sixteen results would hide what matters
    assert "each is confounded with interactions of two other factors" in printed
    assert "Lack of fit: F = " in printed
    assert "adjusted p" in printed


def test_an_interaction_is_not_known_until_the_runs_can_bear_it(tmp_path):
    formula = (
        "(heads[3]=2.heads[0]=2 - heads[3]=16.heads[0]=2) - (heads[3]=2.heads[0]=8 - heads[3]=16.heads[0]=8)"
    )
    study = study_in(tmp_path, seeds=1, method="grid", runs=None, contrasts={"by first": formula})
    early = {run.name: loss(run) for run in study.runs[:40]}
    view = build_view(study, planted(study, early))
    said = "by first: not known; so few runs do not show interactions."
    assert any(said in line for line in terminal_lines(view))
    contrast = rows_of(view, "contrasts")["by first"]
    assert {contrast[name] for name in ("p", "adjusted p", "difference [95 % interval]")} == {NOTHING}
    view = build_view(study, planted(study, loss))
    contrast = rows_of(view, "contrasts")["by first"]
    assert abs(float(contrast["difference [95 % interval]"].split()[0])) < 0.001


def test_too_few_runs_give_a_sentence_and_no_table(tmp_path):
    study = study_in(tmp_path, seeds=1)
    view = build_view(study, planted(study, {run.name: loss(run) for run in study.runs[:5]}))
    assert {path.name for path in write_report(view)} == {"index.html"}
    assert table_of(view, "effects") == []
    said = "No analysis yet: 5 finished runs for 13 coefficients; at least one more is needed."
    assert any(said in line for line in terminal_lines(view))
