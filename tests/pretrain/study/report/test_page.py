"""The report's files: whole in themselves, the same twice, and saying what the numbers say."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from scipy.stats import ttest_1samp

from model.errors import UserError
from pretrain.study.comparable import check_comparable
from pretrain.study.report.page import intervals_say, write_report
from pretrain.study.report.summaries import View
from pretrain.study.results import load_results
from tests.helpers.planted_runs import planned_study, plant, planted_rows, result

TITLE = "Does <order> matter & *why*?"
VARIANTS = {"uniform": {"heads": "8x4"}, "rising": {"heads": "2,4,8,8"}, "near": {"heads": "4x4"}}
# Differences of rising: -0.02, -0.03, -0.025; of near: +0.01, -0.01, +0.002.
FINALS = {
    "uniform-s1": 3.50, "uniform-s2": 3.56, "uniform-s3": 3.47,
    "rising-s1": 3.48, "rising-s2": 3.53, "rising-s3": 3.445,
    "near-s1": 3.51, "near-s2": 3.55, "near-s3": 3.472,
}  # fmt: skip
VOID = {"meta", "img", "br"}


def study_in(folder, **changes):
    values = {
        "title": TITLE,
        "recipe": "micro",
        "seeds": 3,
        "machine": "2 CPU cores",
        "settings": {"steps": 80, "global_batch_tokens": 512},
        "baseline": "uniform",
        "variants": VARIANTS,
    }
    return planned_study(folder, **(values | changes))


def results_of(study, finals=FINALS, **options):
    return [
        result(run, planted_rows(run, finals[run.name]) if run.name in finals else [], **options)
        for run in study.runs
    ]


def view_of(study, results):
    return View(study, results, check_comparable(study, results))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A study's folder with planted runs, one of them failed, and its report."""
    folder = tmp_path_factory.mktemp("study")
    study = study_in(folder)
    for found in results_of(study):
        if found.planned.name == "near-s3":
            plant(result(found.planned, found.rows[:4]), failed="error: <out> of disk")
        else:
            plant(found)
    written = write_report(study, load_results(study, folder), folder)
    return study, folder, written


class Page(HTMLParser):
    """Sources, references and texts of a page; every tag must be closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.sources, self.texts = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert tag not in {"script", "link", "iframe"}
        self.sources += [value for name, value in attributes if name in {"src", "href", "srcset"}]
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_needs_no_other_file(report):
    _, folder, written = report
    text = (folder / "report" / "index.html").read_text(encoding="utf-8")
    page = Page(text)
    pictures = [path for path in written if path.suffix == ".png"]
    assert len(page.sources) == len(pictures) >= 4
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert "http" not in text and "@import" not in text and "url(" not in text


def test_texts_are_escaped(report):
    _, folder, _ = report
    text = (folder / "report" / "index.html").read_text(encoding="utf-8")
    assert "<order>" not in text and "<out>" not in text
    texts = Page(text).texts
    assert TITLE in texts  # as the reader sees it
    assert any("error: <out> of disk" in found for found in texts)
    markdown = (folder / "report" / "report.md").read_text(encoding="utf-8")
    assert markdown.startswith("# Does &lt;order&gt; matter &amp; \\*why\\*?\n")


def test_markdown_shows_names_as_they_are(tmp_path):
    study = study_in(
        tmp_path,
        variants={"uniform": {"heads": "8x4"}, "_a_|b](c)": {"heads": "4x4"}},
        title="__x__",
        seeds=1,
    )
    write_report(study, results_of(study, {}), tmp_path)
    text = (tmp_path / "report" / "report.md").read_text()
    assert text.startswith("# \\_\\_x\\_\\_\n")
    assert "| \\_a\\_\\|b]\\(c) |" in text


def test_markdown_links_to_the_pictures_beside_it(report):
    _, folder, written = report
    links = re.findall(
        r"!\[[^\]]*\]\(([^)]+)\)", (folder / "report" / "report.md").read_text(encoding="utf-8")
    )
    assert links == [path.name for path in written if path.suffix == ".png"]
    assert all((folder / "report" / link).is_file() for link in links)


def test_the_page_begins_with_what_there_is(report):
    _, folder, _ = report
    text = (folder / "report" / "report.md").read_text(encoding="utf-8")
    order = [
        "## What is compared", "rising, near with uniform", "8 of 9 runs are finished",
        "near-s3: failed at step 40 of 80", "data order: the same; first weights: the same",
        "## What the intervals say", "## Results", "| variant |", "## Runs", "## Figures", "## Left out",
    ]  # fmt: skip
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "scores.png: no finished run has measured zero-shot scores" in text


def test_the_numbers_are_the_runs(report):
    _, folder, _ = report
    numbers = json.loads((folder / "report" / "results.json").read_text(encoding="utf-8"))
    assert {run["name"]: run["result"] for run in numbers["runs"]} == {**FINALS, "near-s3": None}
    uniform, rising, near = numbers["comparisons"][0]["variants"]
    assert uniform["interval"] is None and uniform["baseline"] is None and uniform["differences"] == {}
    assert rising["differences"] == pytest.approx({"1": -0.02, "2": -0.03, "3": -0.025})
    expected = ttest_1samp(list(rising["differences"].values()), 0).confidence_interval(0.95)
    assert (rising["interval"]["low"], rising["interval"]["high"]) == pytest.approx(
        tuple(expected), abs=1e-12
    )
    assert rising["excludes_zero"] and set(near["differences"]) == {"1", "2"}
    assert list(rising["gap_over_tokens"])[-1] == str(80 * 512)


def test_a_second_report_has_the_same_bytes(report):
    study, folder, written = report
    before = {path: path.read_bytes() for path in written}
    assert write_report(study, load_results(study, folder), folder) == written
    assert {path: path.read_bytes() for path in written} == before
    assert {path.name for path in (folder / "report").iterdir()} == {path.name for path in written}


def test_what_the_intervals_say_is_counted():
    study = study_in(Path("runs/said"))
    lines = intervals_say(view_of(study, results_of(study)))
    # t(2) = 4.302653: ± 0.0124 around -0.025, and ± 0.0250 around 0.0007.
    assert (
        lines[0]
        == "rising − uniform: -0.0250 [-0.0374, -0.0126], 3 pairs. The interval excludes zero: lower than uniform."
    )
    assert lines[1] == "near − uniform: +0.0007 [-0.0243, +0.0257], 3 pairs. The interval includes zero."
    assert lines[2].startswith("2 comparisons made; 1 interval excludes zero.")
    assert "0.1 of 2 would do so by chance" in lines[2]


def test_one_pair_has_no_interval():
    study = study_in(Path("runs/one"), seeds=1)
    lines = intervals_say(view_of(study, results_of(study)))
    assert lines[0] == "rising − uniform: 1 pair, no interval."
    assert lines[-1].startswith("No interval")


def test_other_seeds_are_said(tmp_path):
    variants = {"uniform": {"heads": "8x4"}, "again": {"heads": "8x4", "seed_shift": 100}}
    study = study_in(Path("runs/again"), variants=variants)
    finals = FINALS | {f"again-s{seed}": 3.5 + 0.01 * seed for seed in (1, 2, 3)}
    assert (
        "Other seeds (not paired in data or weights)."
        in intervals_say(view_of(study, results_of(study, finals)))[0]
    )


def test_several_versions_of_the_code_are_said(tmp_path):
    study = study_in(tmp_path, seeds=1)
    results = results_of(study)
    results[1] = result(results[1].planned, results[1].rows, world={"code": ["other"]})
    write_report(study, results, tmp_path)
    text = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "several versions of the code" in text and "other (rising-s1)" in text


def test_bits_per_byte_take_the_place_of_the_studys_measure(tmp_path):
    study = study_in(tmp_path, seeds=1)
    results = results_of(study)
    results[1] = result(results[1].planned, results[1].rows, data={"tokenizer": "other"})
    write_report(study, results, tmp_path)
    text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "The study asks for val_loss; val_bpb is compared instead." in text and "tokenizers differ" in text
    numbers = json.loads((tmp_path / "report" / "results.json").read_text(encoding="utf-8"))
    assert numbers["measure"] == "val_bpb"
    assert numbers["comparisons"][0]["variants"][1]["differences"] == pytest.approx({"1": -0.02 / 3})


def test_different_validation_texts_are_refused_and_nothing_is_written(tmp_path):
    study = study_in(tmp_path, seeds=1)
    results = results_of(study)
    results[1] = result(results[1].planned, results[1].rows, data={"data": [["deadbeef", "1"]]})
    with pytest.raises(UserError, match="different texts"):
        write_report(study, results, tmp_path)
    assert not (tmp_path / "report").exists()


def test_a_study_that_has_not_begun_has_a_report(tmp_path):
    study = study_in(tmp_path)
    write_report(study, results_of(study, {}), tmp_path)
    text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "0 of 9 runs are finished" in text and text.count(": missing") == 2 * 9
    Page((tmp_path / "report" / "index.html").read_text(encoding="utf-8"))


def test_a_run_that_diverged_is_in_the_report(tmp_path):
    study = study_in(tmp_path)
    write_report(study, results_of(study, FINALS | {"rising-s2": float("inf")}), tmp_path)
    numbers = json.loads((tmp_path / "report" / "results.json").read_text(encoding="utf-8"))
    assert numbers["comparisons"][0]["variants"][1]["values"]["2"] == "Infinity"
    assert numbers["comparisons"][0]["variants"][1]["interval"] is None
