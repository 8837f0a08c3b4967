"""``head-schedules study``: what it prints, what it refuses."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from pretrain.run.folder import RunLock
from pretrain.study.command import main
from pretrain.study.planning import parse_study
from pretrain.study.running import run, slurm
from pretrain.study.running.scheduler import write_study
from tests.helpers.launch import ROOT
from tests.pretrain.study.running.test_scheduler import TEXT


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "three.yaml"
    path.write_text(TEXT)
    return str(path)


def test_list_says_how_far_each_run_is_and_which_the_study_does_not_name(file, capsys, tmp_path):
    (tmp_path / "o/prism-s9").mkdir(parents=True)
    (tmp_path / "o/prism-s9/config.yaml").write_text("")
    assert main(["list", file, "--out", "o"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and lines[2].split() == ["1", "prism-s1", "missing", "0/5"]
    assert lines[-1] == "the folder also holds 1 run that the study does not name: prism-s9"


def test_a_dry_run_writes_nothing(file, capsys, tmp_path):
    assert main(["run", file, "--dry_run", "--out", str(tmp_path / "o")]) == 0
    text = capsys.readouterr().out
    assert "6: 3 variants x 2 seeds" in text and "to do    6 runs" in text
    assert not (tmp_path / "o").exists()
    single = tmp_path / "single.yaml"
    single.write_text(re.sub("seeds: .*", "seeds: 1", Path(file).read_text()))
    assert main(["run", str(single), "--dry_run", "--out", str(tmp_path / "o")]) == 0
    assert "3: 3 variants x 1 seed, in" in capsys.readouterr().out


def submitted(arguments, capsys):
    """The sbatch lines of a dry run, each without its first word and without script and folder."""
    assert main(["run", *arguments, "--dry_run", "--slurm"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("would run")]
    return [line[3:-2] for line in lines]


def test_an_array_asks_for_no_more_ranks_than_the_batch_allows(file, capsys, tmp_path):
    """The default batch of TEXT has four sequences; b's has sixteen."""
    assert submitted([file], capsys) == [
        ["--array=0-5", "--job-name=three", "--ntasks-per-node=4", "--gres=gpu:4"]
    ]
    given = [file, "--parallel", "2", "--sbatch=--gres=gpu:1 --time=1:00"]  # those who say it are heard
    assert submitted(given, capsys) == [["--array=0-5%2", "--job-name=three", "--gres=gpu:1", "--time=1:00"]]
    mixed = TEXT.replace("prism: {}", "b: {global_batch_tokens: 4096}")
    (tmp_path / "mixed.yaml").write_text(mixed)
    assert submitted(["mixed.yaml"], capsys) == [
        ["--array=1,4", "--job-name=mixed"],
        ["--array=0,2-3,5", "--job-name=mixed", "--ntasks-per-node=4", "--gres=gpu:4"],
    ]


def test_a_task_keeps_its_number_when_the_study_changes(file, capsys, tmp_path):
    def task(number):
        code = main(["task", file, number, "--out", "o"])
        out, err = capsys.readouterr()
        return Path(out.split()[1]).stem if code == 0 else (code, err)

    assert [task(str(number)) for number in (0, 1, 3)] == ["uniform-s1", "prism-s1", "uniform-s2"]
    Path(file).write_text(TEXT.replace("seeds: 2", "seeds: 3").replace("prism: {},", "new: {heads: 2x4},"))
    assert [task(str(number)) for number in (0, 2, 3)] == ["uniform-s1", "descending-s1", "uniform-s2"]
    code, said = task("1")
    assert code == 2 and said == (
        "error: array: task 1 (prism-s1, which the study does not name any more) is no run of three; "
        "cancel it (scancel); valid: --array=0,2-3,5-10\n"
    )
    assert [task(str(number)) for number in (6, 10)] == ["new-s1", "descending-s3"]
    assert Path("o/tasks.txt").read_text().split()[5:8] == ["descending-s2", "new-s1", "new-s2"]
    assert main(["list", file, "--out", "o"]) == 0
    numbers = {line.split()[1]: line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert numbers["uniform-s2"] == "3" and numbers["new-s1"] == "6" and "prism-s1" not in numbers


def test_a_second_session_changes_nothing(file, capsys, tmp_path):
    """It is refused before it has written anything, and told of an option that there is."""
    folder = tmp_path / "o"
    write_study(parse_study(TEXT, "three", folder))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (tmp_path / "three.yaml").write_text(TEXT.replace("steps: 5", "steps: 6"))
    lock = RunLock(folder)
    try:
        assert main(["run", file, "--out", str(folder)]) == 2
    finally:
        lock.release()
    said = capsys.readouterr().err
    assert said.startswith(f"error: out: {folder} is in use by process {os.getpid()}")
    assert said.endswith("wait for it, stop it, or give another --out\n")
    assert {path: path.read_bytes() for path in before} == before


def test_a_study_is_written_and_submitted(file, capsys, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(run, "submit", lambda line: calls.append(line) or "7")
    assert main(["run", file, "--slurm", "--out", "o"]) == 0
    assert len(calls) == 1 and (tmp_path / "o/study.yaml").is_file()
    assert "submitted job 7: sbatch --array=0-5" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--dry_run"], ["--slurm"], ["--slurm", "--dry_run"]])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT + "ds_config: none.json\n", "error: ds_config: "),
        (TEXT + "ds_config: FOLDER/bad.json\n", "zero_optimization.contigous_gradients is unknown"),
        (TEXT.replace("steps: 5", "steps: 5, data: data/none"), "error: data: 'data/none' is not a folder"),
        (TEXT.replace("steps: 5", "steps: 5, global_batch_tokens: 1000"), "1000 is not a multiple"),
    ],
)
def test_what_cannot_begin_writes_nothing(file, capsys, monkeypatch, tmp_path, text, said, more):
    monkeypatch.setattr(run, "submit", lambda line: pytest.fail("submitted"))
    (tmp_path / "bad.json").write_text('{"zero_optimization": {"stage": 2, "contigous_gradients": true}}')
    (tmp_path / "far.yaml").write_text(text.replace("FOLDER", str(tmp_path)))
    assert main(["run", "far.yaml", *more]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_what_jobs_would_not_find_is_refused(file, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "submit", lambda line: pytest.fail("submitted"))
    (tmp_path / "mine.json").write_text((ROOT / "ds_configs/zero1.json").read_text())
    (tmp_path / "far.yaml").write_text(f"{TEXT}ds_config: mine.json\n")
    assert main(["run", "far.yaml", "--dry_run"]) == 0 and capsys.readouterr()
    assert main(["run", "far.yaml", "--slurm"]) == 2
    error = capsys.readouterr().err
    assert "mine.json" in error and "give an absolute path" in error
    assert len(error.splitlines()) == 1 and not (tmp_path / "runs").exists()


def test_jobs_have_the_study_s_recipe(file, capsys, monkeypatch, tmp_path):
    """They read the study's folder, from wherever they run."""
    (tmp_path / "mine.yaml").write_text(
        "model: prism-micro\nvocab_size: 2048\noptimizer.weight_decay: 0.05\n"
    )
    Path(file).write_text(TEXT.replace("recipe: micro", "recipe: mine.yaml"))
    monkeypatch.setattr(run, "submit", lambda line: "7")
    assert main(["run", file, "--slurm", "--out", str(tmp_path / "o")]) == 0
    (tmp_path / "mine.yaml").unlink()
    monkeypatch.chdir("/")
    assert main(["task", str(tmp_path / "o"), "1"]) == 0
    recipe = Path(capsys.readouterr().out.splitlines()[-1])
    assert "weight_decay: 0.05" in recipe.read_text()


def test_damaged_files_of_a_run(file, capsys, tmp_path):
    run = tmp_path / "o/prism-s1"
    run.mkdir(parents=True)
    (run / "latest").write_bytes(b"\xff\xfe")
    assert main(["list", file, "--out", "o"]) == 0
    assert "unfinished" in capsys.readouterr().out
    (run / "config.yaml").write_text("- 1")
    assert main(["run", file, "--dry_run", "--out", "o"]) == 2
    assert "o/prism-s1/config.yaml" in capsys.readouterr().err
    assert main(["task", file, "1", "--out", "o"]) == 2


def test_a_task_writes_what_it_reads_and_says_how_many_ranks_share_its_batch(file, capsys, tmp_path):
    mark = tmp_path / "o/logs/prism-s2.failed"  # of an earlier attempt
    mark.parent.mkdir(parents=True)
    mark.write_text("exit code 1: error: data: gone\n")
    assert main(["list", file, "--out", "o"]) == 0 and "data: gone" in capsys.readouterr().out
    for given, used in (("8", "4"), ("1", "1")):
        assert main(["task", file, "4", "--out", str(tmp_path / "o"), "--ranks", given]) == 0
        ds_config, config, ranks = capsys.readouterr().out.split()
        assert ds_config.endswith("ds_configs/zero2.json") and ranks == used
        assert config == str(tmp_path / "o/configs/prism-s2.yaml")
        assert yaml.safe_load((tmp_path / "o/study.yaml").read_text())["baseline"] == "uniform"
    assert not mark.exists()


BAD_INPUT = [
    ("run FILE --parallel 0", "parallel: 0 is not valid"),
    ("run FILE --parallel 1000", "parallel: 1000 runs at a time"),
    ("run FILE --sbatch x", "sbatch: options of sbatch without --slurm"),
    ("run FILE --slurm --sbatch='", "argument --sbatch: invalid split value"),
    ("run FILE --dry_run --out .h", "out: '.h' is not valid; give a folder whose name"),
    ("run FILE --paralel 2", "--paralel: unknown flag; did you mean '--parallel'"),
    ("list FILE --parallel 2", "--parallel: not a flag of this command, but of 'run'"),
    ("run FILE --slurm", "slurm: no sbatch on this machine"),
    ("run nothing", "study: no file or study 'nothing'"),
    ("task FILE 6", "array: task 6 is no run of three; cancel it (scancel); valid: --array=0-5"),
    ("task FILE x", "array: task x is no run of three"),
    ("task FILE only", "array: task only is no run of three"),
    ("report FILE", "does not exist; run it first"),
    ("report .", "has no study.yaml"),
    ("power FILE", "pilot: none is not valid; give the folder of a study"),
    ("power FILE --pilot none", "study: no file or study 'none'"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD_INPUT)
def test_bad_input_is_one_line(file, capsys, monkeypatch, arguments, said):
    monkeypatch.setattr(run, "_devices", list)
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    assert main(arguments.replace("FILE", file).split()) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and len(error.splitlines()) == 1


@pytest.mark.slow
def test_a_task_reads_its_own_run_alone_and_a_plan_opens_each_corpus_once(
    file, capsys, monkeypatch, tmp_path
):
    variants = "".join(f"  v{number}: {{optimizer: {{learning_rate: {number}}}}}\n" for number in range(300))
    head = "seeds: 1\nbaseline: v1\nsettings: {steps: 5, data: mine, global_batch_tokens: 1024}\nvariants:\n"
    (tmp_path / "three.yaml").write_text(head + variants)  # v0 has no valid rate
    assert main(["task", file, "7", "--out", "o"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "o/configs/v7-s1.yaml"
    assert [path.name for path in (tmp_path / "o/configs").iterdir()] == ["v7-s1.yaml"]
    assert main(["list", file]) == 2
    assert f"study: {file}: variant v0: optimizer.learning_rate: 0 is not valid" in capsys.readouterr().err

    (tmp_path / "three.yaml").write_text(head + variants.replace("rate: 0}", "rate: 1000.0}"))
    (tmp_path / "mine").mkdir()
    assert main(["run", file, "--dry_run"]) == 2
    assert "error: data: 'mine' has no meta.json" in capsys.readouterr().err
    opened = []
    monkeypatch.setattr("pretrain.assembly.data.open_data", lambda run, report: opened.append(run.data))
    monkeypatch.setattr("pretrain.plan.corpora.find_corpora", lambda run: None)
    assert main(["run", file, "--dry_run"]) == 0
    assert opened == ["mine"]


def test_flags_replace_settings(file, capsys, tmp_path):
    assert main(["list", file, "--settings.steps", "3", "--settings.optimizer.learning_rate", "1.0e-3"]) == 0
    assert "0/3" in capsys.readouterr().out
    assert main(["list", file, "--settings.stesp", "3"]) == 2
    assert "did you mean '--settings.steps'" in capsys.readouterr().err
    assert main(["task", file, "0", "--out", "o", "--settings.steps", "3"]) == 0
    assert yaml.safe_load((tmp_path / "o/study.yaml").read_text())["settings"]["steps"] == 3


def test_printed_commands_name_the_users_file_or_folder(file, capsys, tmp_path):
    tune = "tune: {optimizer.learning_rate: [1.0e-3, 2.0e-3]}\npilot_seeds: [7]\n"
    (tmp_path / "my.yaml").write_text(TEXT + tune)
    assert main(["report", "my.yaml", "--out", "o"]) == 2
    assert "; run it first: head-schedules study run my.yaml --out o\n" in capsys.readouterr().err
    (tmp_path / "o").mkdir()
    (tmp_path / "o/study.yaml").write_text(TEXT + tune)
    assert main(["record", "o"]) == 2
    assert "no run of o is finished; head-schedules study run o\n" in capsys.readouterr().err


def test_the_schema_is_printed(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["vary"]["description"].startswith("Factors")
