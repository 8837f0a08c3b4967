"""The training curves: drawn from what the metrics say."""

import pytest

from pretrain.metrics.file import MetricsFile
from pretrain.plots import _rows, _series, main


def write_run(folder, steps):
    folder.mkdir()
    file = MetricsFile(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        row = {
            "tokens": step * 10,
            "train_loss": 5 / step,
            "grad_norm": float("inf") if step == 2 else 1.0,
            "lr/base/decay": 1e-3,
        }
        file.append(step, row | ({"val_loss": 6 / step} if step % 2 == 0 else {}))
    file.close()


def test_draws_one_picture_of_several_runs(tmp_path, capsys):
    for name in ("a", "b"):
        write_run(tmp_path / name, 6)
    main([str(tmp_path / "a"), str(tmp_path / "b")])
    picture = tmp_path / "a/plots/training.png"
    assert capsys.readouterr().out == f"wrote {picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_series_are_the_rows_that_have_the_figure(tmp_path):
    write_run(tmp_path / "a", 5)
    assert _series(_rows(tmp_path / "a"), "val_loss") == ([20, 40], [3.0, 1.5])


@pytest.mark.parametrize("content", [None, ""])
def test_bad_input(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: run: ")


@pytest.mark.parametrize("out", ["a.xyz", "folder", "file/a.png", "x" * 300 + ".png"])
def test_pictures_that_cannot_be_written(tmp_path, capsys, out):
    write_run(tmp_path / "run", 4)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / out)]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
