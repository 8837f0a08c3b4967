"""What a preparation prints, on a terminal and into a log."""

from __future__ import annotations

import io

import pytest

from pretrain.data.making.progress import Progress
from pretrain.prepare.progress import ProgressPrinter


def report(megabytes: float, total: float = 100, seconds: float = 10, before: float = 0) -> Progress:
    return Progress(
        "tokenizing", 5, 7, int(megabytes * 1e6), int(total * 1e6), seconds, int(before * 1e6), counted=True
    )


def test_figures():
    assert str(report(20)) == "tokenizing: 5 documents, 20.0 of 100.0 MB, 7 tokens, 2.0 MB/s, 40s left"
    assert str(report(100)) == "tokenizing: 5 documents, 100.0 of 100.0 MB, 7 tokens, 10.0 MB/s"
    assert str(report(20, total=0)).endswith("20.0 MB, 7 tokens, 2.0 MB/s")
    assert str(Progress("reading x")) == "reading x"


def test_the_rate_leaves_out_what_an_earlier_process_had_done():
    assert report(60, before=40).rate == pytest.approx(2e6)
    assert report(60, before=40).seconds_left == pytest.approx(20)
    assert report(40, before=40).seconds_left is None


def test_a_log_has_a_line_every_few_seconds_and_the_last_one():
    now = [0.0]
    stream = io.StringIO()
    printer = ProgressPrinter(stream, every_seconds=10, clock=lambda: now[0])
    printer(Progress("reading"))
    for second in range(35):
        now[0] = second
        printer(report(second + 1))
    printer(report(100))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "reading" and "100.0 of" in lines[-1]
    assert [line.split()[3] for line in lines[1:-1]] == ["11.0", "21.0", "31.0"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar():
    stream = Terminal()
    printer = ProgressPrinter(stream)
    printer(report(20, total=0))
    printer(report(20))
    printer(report(100))
    drawn = stream.getvalue()
    assert "20%" in drawn and "100%" in drawn and "40s left" in drawn and "\r" in drawn
