"""The scripts of slurm/ around a training, on a real SLURM of two nodes: prepare, convert, evaluate, also
beside a run that trains."""

from __future__ import annotations

import json
import shutil

import pytest

from pretrain import convert
from pretrain.evaluation import command as evaluation
from pretrain.prepare.command import main as prepare_main
from tests.helpers import slurm
from tests.helpers.items import write_data_sets
from tests.helpers.launch import launch
from tests.helpers.small_corpus import SMALL_VOCABULARY, small_paths
from tests.helpers.training import nano_arguments

WHY_NOT = slurm.unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_NOT is not None, reason=f"real SLURM: {WHY_NOT}")]
TASKS = "piqa,wikitext"
TWO_TASKS = ("--gres=none", "--ntasks-per-node=2", "--cpus-per-task=1")


def ended_well(cluster, tmp_path, *arguments):
    """Submit, wait for the end, and return what was printed."""
    job = cluster.submit(f"--output={tmp_path}/%j.log", *arguments, env=slurm.ENVIRONMENT)
    assert job.wait() == "COMPLETED", job.log
    return job.log


@pytest.fixture(scope="module")
def run(small_folder, tmp_path_factory):
    """A run with a context long enough for the items of a task."""
    runs = tmp_path_factory.mktemp("runs")
    finished = launch(nano_arguments(small_folder, runs, "--architecture.context_length 128 --micro_batch 1"))
    assert finished.returncode == 0, finished.output
    return runs / "nano"


def test_prepare_over_an_array(cluster, tmp_path):
    """Two tasks make what one process makes; the last one merges."""
    texts = [str(path) for path in small_paths()]
    settings = ["--text", *texts, "--train_tokenizer", str(SMALL_VOCABULARY), "--validation_fraction", "0.2"]
    assert prepare_main([*settings, "--out", str(tmp_path / "alone")]) == 0
    settings[-4:-2] = ["--tokenizer", str(tmp_path / "alone" / "tokenizer")]
    options = ("--array=0-1", "--cpus-per-task=1", "--mem-per-cpu=0", f"--output={tmp_path}/%a.log")
    command = ("slurm/prepare.sh", *settings, "--out", str(tmp_path / "shared"))
    job = cluster.submit(*options, *command, env=slurm.ENVIRONMENT)
    job.wait_for_array(120)
    said = "\n".join((tmp_path / f"{task}.log").read_text() for task in (0, 1))
    for name in ("training.bin", "training.idx", "validation.bin", "validation.idx"):
        assert (tmp_path / "shared" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), said


def test_convert(cluster, run, tmp_path):
    command = ("--cpus-per-task=1", "--mem=0", "slurm/convert.sh", str(run), "--out", str(tmp_path / "hf"))
    said = ended_well(cluster, tmp_path, *command)
    assert "logits   max" in said
    assert convert.main([str(run), "--out", str(tmp_path / "here")]) == 0
    weights = "model.safetensors"
    assert (tmp_path / "hf" / weights).read_bytes() == (tmp_path / "here" / weights).read_bytes()


def test_evaluate_on_two_ranks(cluster, run, tmp_path):
    pytest.importorskip("lm_eval")
    data_sets = write_data_sets(tmp_path / "data_sets")
    arguments = [str(run), "--tasks", TASKS, "--data_dir", str(data_sets), "--out"]
    ended_well(cluster, tmp_path, *TWO_TASKS, "slurm/evaluate.sh", *arguments, str(tmp_path / "cluster.json"))
    assert evaluation.main([*arguments, str(tmp_path / "here.json")]) == 0
    found, expected = (
        json.loads((tmp_path / f"{name}.json").read_text())["scores"] for name in ("cluster", "here")
    )
    assert found == pytest.approx(expected)


def test_a_job_follows_a_run_in_another_job(cluster, small_folder, tmp_path):
    """It begins before the run, and is stopped and requeued, as ahead of a time limit: each checkpoint is
    scored once, and the job ends with the run."""
    pytest.importorskip("lm_eval")
    data_sets = write_data_sets(tmp_path / "data_sets")
    one = ("--gres=none", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=1")
    log = f"--output={tmp_path}/%x-%j.log"
    follow = (
        "--follow",
        str(tmp_path / "nano"),
        "--tasks",
        "piqa",
        "--limit",
        "4",
        "--data_dir",
        str(data_sets),
    )
    follower = cluster.submit(*one, log, "slurm/evaluate.sh", *follow, env=slurm.ENVIRONMENT)
    follower.wait_for("waiting  for checkpoints")
    follower.signal("USR1")
    follower.wait_for("stopped; requeued, failure 1 of at most 3")
    settings = ("--config 124m --architecture.context_length 128 --micro_batch 1 --checkpoint.keep_last 9",)
    arguments = nano_arguments(small_folder, tmp_path, *settings)
    environment = {**slurm.ENVIRONMENT, "DATA": "unused"}
    training = cluster.submit(*one, log, "slurm/124m.sh", *arguments, env=environment)
    assert training.wait() == "COMPLETED", training.log
    assert follower.wait() == "COMPLETED", follower.log
    assert follower.restarts == 1 and "has all its steps; checkpoints scored: 3" in follower.log
    rows = map(json.loads, (tmp_path / "nano/evaluation.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows] == [4, 8, 12]


def test_a_job_that_follows_a_run_that_is_gone_ends(cluster, run, tmp_path):
    """With exit code 2, which is not requeued."""
    pytest.importorskip("lm_eval")
    gone = tmp_path / "run"
    shutil.copytree(run, gone)
    shutil.rmtree(gone / "checkpoints/step_000012")
    one = ("--gres=none", "--ntasks-per-node=1", "--cpus-per-task=1", f"--output={tmp_path}/%j.log")
    data_sets = write_data_sets(tmp_path / "data_sets")
    arguments = ("--tasks", "piqa", "--limit", "4", "--data_dir", str(data_sets), "--follow_timeout", "1")
    job = cluster.submit(*one, "slurm/evaluate.sh", "--follow", str(gone), *arguments, env=slurm.ENVIRONMENT)
    assert job.wait() == "FAILED" and job.restarts == 0
    assert job.record["ExitCode"] == "2:0"
    assert "run has 8 of 12 steps, no process trains it, and nothing was written for 1 s" in job.log
    assert "step 8: piqa/acc" in job.log, job.log
