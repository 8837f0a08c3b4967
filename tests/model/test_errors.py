"""The line of bad input."""

from model.errors import UserError


def test_a_notebook_shows_the_line():
    """IPython asks for it by this name."""
    assert UserError("heads: 5")._render_traceback_() == ["error: heads: 5"]


def test_a_message_is_one_line_of_bounded_length():
    assert str(UserError("name: a\nb\x1b[2J\udc80é")) == r"name: a\nb\x1b[2J\udc80é"
    text = str(UserError("name: " + "x" * 10**6 + ": give a shorter one"))
    assert len(text) < 2000 and text.startswith("name: x") and text.endswith("give a shorter one")
