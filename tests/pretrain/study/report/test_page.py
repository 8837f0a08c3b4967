"""The report's files: whole in themselves, the same twice, and saying what the numbers say."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from model.errors import UserError
from pretrain.study.report.page import terminal_lines, write_report
from pretrain.study.results import load_results
from pretrain.study.summaries import build_view
from tests.helpers.planted_runs import plant, result
from tests.pretrain.study.report.conftest import planted, small_study, view

TITLE = "Does <order> matter & *why*?"
VARIANTS = {"uniform": {"heads": "8x4"}, "rising": {"heads": "2,4,8,8"}, "near": {"heads": "4x4"}}
# Differences of rising: -0.02, -0.03, -0.025; of near: +0.01, -0.01, +0.002.
LOSSES = {"uniform": (3.50, 3.56, 3.47), "rising": (3.48, 3.53, 3.445), "near": (3.51, 3.55, 3.472)}
FINALS = {f"{name}-s{s}": loss for name, losses in LOSSES.items() for s, loss in enumerate(losses, 1)}
VOID = {"meta", "img", "br"}


def study_in(*folder, **changes):
    values = {"title": TITLE, "machine": "2 CPU cores", "baseline": "uniform", "variants": VARIANTS}
    return small_study(*folder, **(values | changes))


def written_in(folder, finals=FINALS, changes=None, **options):
    """The page of a report on planted results, and what it shows."""
    study = study_in(folder, **(changes or {}))
    found = build_view(study, planted(study, finals, **options))
    write_report(found)
    return (folder / "report" / "index.html").read_text(encoding="utf-8"), found


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A study's folder with planted runs, one of them failed, and its report: page, view and files."""
    folder = tmp_path_factory.mktemp("study")
    study = study_in(folder)
    for found in planted(study, FINALS):
        if found.planned.name == "near-s3":
            found = result(found.planned, found.rows[:4], failure="error: <out> of disk")
        plant(found)
    found = build_view(study, load_results(study))
    files = write_report(found)
    return files[0].read_text(encoding="utf-8"), found, files


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
    text, _, files = report
    pictures = [path for path in files if path.suffix == ".svg"]
    sources = Page(text).sources
    assert len(sources) == len(pictures) >= 1
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "http" not in text and "@import" not in text and "url(" not in text


def test_texts_are_escaped(report):
    text = report[0]
    assert "<order>" not in text and "<out>" not in text
    texts = Page(text).texts
    assert TITLE in texts  # as the reader sees it
    assert any("error: <out> of disk" in found for found in texts)


def test_the_page_begins_with_what_there_is(report):
    order = [
        "What is compared",
        "8 of 9 runs are finished",
        "near-s3: failed at step 40 of 80",
        "<h2>Results",
        "<th>variant",
        "<h2>Runs",
        "<h2>Figures",
    ]
    places = [report[0].index(part) for part in order]
    assert places == sorted(places)


def test_a_second_report_has_the_same_bytes(report):
    files = report[2]
    folder = files[0].parent.parent
    before = {path: path.read_bytes() for path in files}
    study = study_in(folder)
    assert write_report(build_view(study, load_results(study))) == files
    assert {path: path.read_bytes() for path in files} == before
    assert set((folder / "report").iterdir()) == set(files)


def test_the_terminal_has_the_title_and_the_results():
    said = list(terminal_lines(view(study_in(), FINALS)))
    assert said[0] == TITLE  # t(2) = 4.302653: ± 0.0124 around -0.025
    assert any("2,4,8x2  3 of 3  3.4850 ± 0.0427  -0.0250 [-0.0374, -0.0126]" in row for row in said)


def test_bits_per_byte_take_the_place_of_the_studys_measure(tmp_path):
    page, found = written_in(tmp_path, changes={"seeds": 1}, data=lambda run: {"tokenizer": run.variant})
    assert "tokenizers differ, so bits per byte are compared" in page
    assert found.measure == "val_bpb"
    assert found.summaries[1].differences == pytest.approx({1: -0.02 / 3})


def test_different_validation_texts_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(UserError, match="different texts"):
        written_in(tmp_path, data=lambda run: {"data": [(run.variant, "1")]})
    assert not (tmp_path / "report").exists()


def test_a_study_that_has_not_begun_has_a_report(tmp_path):
    page, _ = written_in(tmp_path, {})
    assert "0 of 9 runs are finished" in page and re.search("Not begun: .* and 6 more", page)
    Page(page)
