"""The folder that an export or import writes: nothing is left of a failure, and of two at once one wins."""

import pytest

from model.errors import UserError
from pretrain.hf.new_folder import new_folder


def test_of_two_at_once_one_wins(tmp_path, monkeypatch):
    """The second is in the middle of writing when the first one ends."""
    out = tmp_path / "hf" / "model"
    with pytest.raises(UserError, match=r"cannot write .* is there already"), new_folder(out) as late:
        (late / "config.json").write_text("late")
        monkeypatch.setattr("os.getpid", lambda: 1)  # of the other process: hidden names have it
        with new_folder(out) as early:
            (early / "config.json").write_text("early")
    assert (out / "config.json").read_text() == "early"
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    words = r"^out: cannot write .*No such .*/a/b"
    with pytest.raises(UserError, match=words), new_folder(tmp_path / "model") as partial:
        (partial / "a" / "b").write_text("")
    assert list(tmp_path.iterdir()) == []
