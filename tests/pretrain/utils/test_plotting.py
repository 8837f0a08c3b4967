import subprocess
import sys
from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.utils.plotting import _short_count, save_figure


def test_a_figure_is_written_at_the_end_of_the_block(tmp_path):
    path = tmp_path / "new" / "a.png"
    with save_figure(path, "out", 2, 3, size=(4, 2), dpi=50, squeeze=False) as (figure, axes):
        assert axes.shape == (2, 3) and not path.exists()
        axes[0][0].plot([1, 2])
        figure.suptitle("two by three")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and int.from_bytes(data[16:20], "big") == 200


def test_notes_stand_above_the_axes_in_full(tmp_path):
    note = "data differ: " + "; ".join(f"corpus {number} of some run" for number in range(20))
    with save_figure(tmp_path / "a.png", "out", size=(4, 2), dpi=50, notes=[note, "steps differ"]) as (
        figure,
        _,
    ):
        lines = figure.get_suptitle().split("\n")
    assert " ".join(lines) == f"{note} steps differ" and max(map(len, lines)) <= 56


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (950, "950"), (100_000, "100k"), (2_500_000, "2.5M"), (1.5e9, "1.5B")]
)
def test_counts_are_short(value, text):
    assert _short_count(value) == text


def test_what_cannot_be_written_is_said_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    nameless = "is not the name of a picture; give a file that ends with .png"
    for path, said in {
        tmp_path / "a.nope": nameless,
        tmp_path / "a": nameless,
        tmp_path: nameless,
        Path(): nameless,
        tmp_path / "file" / "a.png": "cannot write",
    }.items():
        with (
            pytest.raises(UserError, match=f"--plot: .*{said}") as caught,
            save_figure(path, "--plot", size=(1, 1), dpi=50),
        ):
            pass
        assert "\n" not in str(caught.value)


def test_an_error_while_drawing_leaves_no_file(tmp_path):
    with pytest.raises(KeyError), save_figure(tmp_path / "a.png", "out", size=(1, 1), dpi=50):
        raise KeyError("no such figure")
    assert not list(tmp_path.iterdir())


def test_no_display_and_no_pyplot_is_needed(tmp_path):
    code = (
        "import sys; from pathlib import Path; from pretrain.utils.plotting import save_figure\n"
        "with save_figure(Path(sys.argv[1]), 'out', size=(1, 1), dpi=50): pass\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.png")], check=True)
