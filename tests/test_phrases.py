"""Phrases that the style sheet advises against are found, and none is left in code and documentation."""

from __future__ import annotations

import pytest

from docs import phrases

MODULE = '''"""Goes on {place} the others."""
beside = 1  # said once
print("it refuses", beside)
'''


def test_none_is_left():
    assert phrases.find_all(phrases.FILES) == []


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setattr(phrases, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(MODULE.format(place="beside"))
    return path


def test_strings_and_comments_are_read_and_names_are_not(module):
    places = [line.split(": ")[:2] for line in phrases.find(module)]
    assert sorted(places) == [
        ["module.py:1", "'Goes on'"],
        ["module.py:1", "'beside'"],
        ["module.py:2", "'said once'"],
        ["module.py:3", "'refuses'"],
    ]


def test_an_accepted_place_is_left_out_and_missed_when_it_is_gone(module, monkeypatch):
    monkeypatch.setitem(phrases.ACCEPTED, "module.py", ["Goes on beside", "it refuses"])
    assert [line.split(": ")[0] for line in phrases.find(module)] == ["module.py:2"]
    module.write_text(MODULE.format(place="after"))
    assert any("'Goes on beside': accepted, but not there" in line for line in phrases.find(module))


def test_a_page_is_read_without_its_code(module):
    page = module.with_name("page.md")
    page.write_text("It is said.\n\n    beside\n\n```text\nanew\n```\n`of itself`, too.\n")
    assert [line.split(": ")[0] for line in phrases.find(page)] == ["page.md:1", "page.md:8"]
