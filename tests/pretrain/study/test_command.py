"""``python -m pretrain.study``: what it prints, what it refuses."""

from __future__ import annotations

import pytest

from pretrain.study import command, slurm
from pretrain.study.command import main
from pretrain.study.slurm import array_of
from tests.pretrain.study.test_scheduler import TEXT


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "three.yaml"
    path.write_text(TEXT)
    return str(path)


def test_list_names_the_studies(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    assert "direction-small" in text and "2 CPU cores" in text


def test_list_says_how_far_each_run_is(file, capsys):
    assert main(["list", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and lines[2].split() == ["1", "prism-s1", "missing", "0/5"]


def test_a_dry_run_writes_nothing(file, capsys, tmp_path):
    assert main(["run", file, "--dry_run", "--out", str(tmp_path / "o")]) == 0
    text = capsys.readouterr().out
    assert "6: 3 variants x 2 seeds" in text and "to do    6 runs" in text
    assert (
        "paired   prism, descending with uniform, seed by seed: data order: the same; first weights: the same"
        in text
    )
    assert not (tmp_path / "o").exists()


def test_the_array_that_a_dry_run_of_slurm_shows(file, capsys):
    assert (
        main(["run", file, "--dry_run", "--slurm", "--parallel", "2", "--sbatch", "--gres=gpu:1 --time=1:00"])
        == 0
    )
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("would run"))
    assert line.split()[2:7] == ["sbatch", "--array=0-5%2", "--job-name=three", "--gres=gpu:1", "--time=1:00"]


def test_arrays_are_short():
    assert array_of([0, 1, 2, 3]) == "0-3"
    assert array_of([0, 2, 3, 4, 9, 10], 4) == "0,2-4,9-10%4"


def test_a_task_writes_what_it_reads(file, capsys, tmp_path):
    assert main(["task", file, "4", "--out", str(tmp_path / "o")]) == 0
    ds_config, config = capsys.readouterr().out.split()
    assert ds_config.endswith("ds_configs/zero2.json") and config == str(tmp_path / "o/configs/prism-s2.yaml")
    assert (tmp_path / "o/study.yaml").read_text() == TEXT


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "FILE", "--parallel", "0"], "parallel: 0 is not valid"),
        (["run", "FILE", "--parallel", "1000"], "parallel: 1000 runs at a time"),
        (["run", "FILE", "--sbatch", "x"], "sbatch: options of sbatch without --slurm"),
        (["run", "FILE", "--paralel", "2"], "did you mean '--parallel'"),
        (["run", "nothing"], "study: no file or study 'nothing'"),
        (["task", "FILE", "6"], "array: task 6 is beyond the 6 runs of three; valid: --array=0-5"),
        (["report", "FILE"], "does not exist; run it first"),
        (["report", "."], "has no study.yaml"),
        (["power", "FILE", "--sd", "0.1", "--effect", "0.1", "--parallel", "0"], "parallel: 0 is not valid"),
        ([], "COMMAND"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(file, capsys, monkeypatch, arguments, said):
    monkeypatch.setattr(command, "_devices", list)
    assert main([file if argument == "FILE" else argument for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and len(error.splitlines()) == 1


@pytest.mark.parametrize("place", ["latin.yaml", "old/study.yaml"])
def test_a_study_that_is_not_utf_8_is_one_line(tmp_path, monkeypatch, capsys, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / place).write_bytes(TEXT.replace("recipe", "title: \u00fc\nrecipe", 1).encode("latin-1"))
    assert main(["list", place.removesuffix("/study.yaml")]) == 2
    assert capsys.readouterr().err == f"error: study: {place} is not UTF-8 text\n"


def test_data_that_is_not_there_is_said_before_anything_is_written(file, capsys, tmp_path):
    (tmp_path / "far.yaml").write_text(TEXT.replace("steps: 5", "steps: 5, data: data/none"))
    assert main(["run", "far.yaml"]) == 2
    assert "data/none" in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_without_sbatch(file, capsys, monkeypatch):
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    assert main(["run", file, "--slurm"]) == 2
    assert "slurm: no sbatch on this machine" in capsys.readouterr().err
