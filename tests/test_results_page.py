"""The numbers and pictures of docs/results.md and of the studies' pages are those of the records."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from docs import results
from docs.regret import draw_regret, group_models
from pretrain.study.archive import write_archive
from pretrain.study.planning import parse_study
from pretrain.study.summaries import build_view
from tests.helpers.launch import ROOT
from tests.helpers.planted_runs import plant
from tests.pretrain.study.report.conftest import planted

TEXT = "".join(page.read_text("utf-8") for page in results.PAGES)
MARKED = [match for match in results.MARK.finditer(TEXT) if not match["study"].startswith("STUDY")]
STUDIES = sorted({match["study"] for match in MARKED})


HEADS = """
recipe: micro
seeds: 2
settings: {steps: 80, architecture: {d_model: 128}}
vary: {optimizer: {adamw: {}, muon: {optimizer: {kind: muon}}}}
baseline: adamw.a4
variants:
  adamw.a4: {heads: 4x4, architecture: {d_model: 64}}
  adamw.a2: {heads: 2x4, architecture: {d_model: 64}}
  adamw.b4: {heads: 4x4}
  adamw.b2: {heads: 2x4}
"""
TOKENS = """
recipe: micro
seeds: 2
settings: {global_batch_tokens: 512}
vary:
  optimizer: {adamw: {}, muon: {optimizer: {kind: muon}}}
  steps: [80, 100, 200]
"""


def finals(study):
    """The last validation loss of every run, read from the file alone: by variant and seed."""
    runs = json.loads((ROOT / f"results/{study}.json").read_text())["runs"]
    found = {}
    for name, run in runs.items():
        variant, seed = name.rsplit("-s", 1)
        found.setdefault(variant, {})[int(seed)] = [y for y in run["rows"]["val_loss"] if y is not None][-1]
    return found


def test_every_number_is_that_of_the_results():
    assert MARKED
    assert results.refresh(TEXT) == TEXT


def test_every_number_is_marked():
    """But for README and landing page, which also have numbers from elsewhere."""
    pages = [page for page in results.PAGES if page.name not in ("README.md", "index.md")]
    text = results.MARK.sub("", "".join(page.read_text("utf-8") for page in pages))
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|arXiv \S+", "", text, flags=re.DOTALL)
    assert set(re.findall(r"\d+\.\d+|\d+ %", text)) <= {"95 %"}


def test_differences_by_hand():
    """Of two variants, paired by seed; those of a study without a baseline are compared by a linear model."""
    checked = 0
    for match in MARKED:
        variants = match["of"].split(" - ")
        values = finals(match["study"])
        if match["value"] == "difference" and len(variants) == 2 and set(variants) <= values.keys():
            one, other = (values[name] for name in variants)
            differences = [one[seed] - other[seed] for seed in one if seed in other]
            low, high = ttest_1samp(differences, 0).confidence_interval(0.95)
            expected = results.interval(float(np.mean(differences)), low, high)
            assert match["text"] == expected
            checked += 1
    assert checked


def test_tokens_by_hand(monkeypatch, tmp_path):
    """A planted record whose loss falls by 0.3 for each e-fold of tokens."""
    study = parse_study(TOKENS, "tokens-small", tmp_path / "tokens-small")
    loss = {run.name: 5 - 0.3 * math.log(run.run.steps) for run in study.runs}
    for found in planted(study, loss):
        plant(found)
    write_archive(study, tmp_path / "tokens-small.json")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.view.cache_clear()
    try:
        assert results.slope("adamw") == pytest.approx(-0.3)
        assert results.slope("tokens-small") == pytest.approx(-0.3)  # of all runs of a study
        text = results.tokens("tokens-small", "adamw steps=100 - steps=200")
        assert text == "−50 [−50, −50]"  # half of the tokens
    finally:
        results.view.cache_clear()


def test_regret_by_hand(tmp_path):
    """Two widths; the best of each has none, the others their paired differences from it."""
    study = parse_study(HEADS, "s", tmp_path / "s")
    loss = {run.name: 4 + 0.01 * at * run.seed for at, run in enumerate(study.runs)}
    found = build_view(study, planted(study, loss))
    groups = dict(group_models(found))
    assert list(groups) == ["adamw, width 64", "adamw, width 128"]
    wide = groups["adamw, width 128"]
    assert [(point.heads, point.head_dim) for point in wide] == [(4, 32), (2, 64)]
    value = {(run.variant, run.seed): loss[run.name] for run in study.runs}
    expected = [value["adamw.b2", seed] - value["adamw.b4", seed] for seed in (1, 2)]
    assert list(wide[0].regret.values()) == [0.0, 0.0]
    assert list(wide[1].regret.values()) == pytest.approx(expected) and min(expected) > 0
    assert draw_regret(found, tmp_path / "regret.svg", "Heading")


@pytest.mark.slow
def test_another_result_is_noticed(monkeypatch, tmp_path):
    for study in STUDIES:
        values = json.loads((ROOT / f"results/{study}.json").read_text())
        for run in values["runs"].values():
            run["rows"]["val_loss"] = [y and 1.01 * y for y in run["rows"]["val_loss"]]
        (tmp_path / f"{study}.json").write_text(json.dumps(values))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.view.cache_clear()
    try:
        assert results.refresh(TEXT) != TEXT
    finally:
        results.view.cache_clear()


@pytest.mark.slow
def test_pictures_are_drawn_from_the_results(tmp_path):
    drawn = 0
    for page in results.PAGES:
        for path in results.draw(page.read_text("utf-8"), tmp_path):
            assert path.read_bytes() == (page.parent / path.relative_to(tmp_path)).read_bytes()
            drawn += 1
    assert drawn
