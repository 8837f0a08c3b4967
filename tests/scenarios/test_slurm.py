"""The scripts of slurm/ on a real SLURM of two nodes: submitted, signalled, killed, requeued, continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers import slurm
from tests.helpers.launch import ROOT, launch
from tests.helpers.training import curve, nano_arguments

WHY_NOT = slurm.unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_NOT is not None, reason=f"real SLURM: {WHY_NOT}")]
STEPS = (
    "--steps 16 --checkpoint.every 4 --checkpoint.background true",
    "--logging.every 1 --logging.seconds 0",
)
# Nodes without GPUs, one task on each.
NODES = ("--gres=none", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
ENVIRONMENT = {**slurm.ENVIRONMENT, "DATA": "unused"}


@pytest.fixture(autouse=True)
def no_job_left(cluster):
    """A test that fails must not leave a job behind that the next one waits for."""
    yield
    cluster.end_jobs()


@pytest.fixture(scope="module")
def whole(small_folder, tmp_path_factory):
    """The curve of an undisturbed run of two ranks on one node, started without SLURM."""
    return undisturbed(small_folder, tmp_path_factory.mktemp("whole"), *STEPS)


def undisturbed(small_folder, runs, *settings):
    """The curve of two ranks on one node, started without SLURM, that reach their last step."""
    finished = launch(nano_arguments(small_folder, runs, "--config 124m", *settings), 2)
    assert finished.returncode == 0, finished.output
    return curve(runs / "nano")


def submit(cluster, small_folder, runs, *more, options=NODES, env=None):
    """sbatch slurm/124m.sh with a model and steps of a few seconds."""
    given = [*options, f"--output={runs}/job-%j.log", "--exclusive", "slurm/124m.sh"]
    arguments = nano_arguments(small_folder, runs, "--config 124m", *STEPS, *more)
    return cluster.submit(*given, *arguments, env={**ENVIRONMENT, **(env or {})})


def ranks_of(job):
    """Process numbers of the ranks, rank 0 first."""
    found = job.processes("pretrain/main.py")
    ranks = {int(process.environ()["RANK"]): process.pid for process in found if "RANK" in process.environ()}
    return [ranks[rank] for rank in sorted(ranks)]


def check_continued(job, runs, whole):
    """The job is requeued once, and its curve is that of a run that nothing happened to."""
    assert job.wait() == "COMPLETED", job.log
    assert job.restarts == 1 and "resume   from" in job.log
    assert curve(runs / "nano") == whole


# With --export=NONE nothing of the submitting shell's environment reaches the job: .venv is the checkout's
# own then.
@pytest.mark.parametrize("options", [NODES, (*NODES, "--export=NONE")], ids=["all", "export=NONE"])
def test_two_nodes_give_the_curve_of_one(cluster, small_folder, tmp_path, whole, options):
    if "--export=NONE" in options and not (ROOT / ".venv/bin/activate").is_file():
        pytest.skip("needs the checkout's .venv (make setup)")
    job = submit(cluster, small_folder, tmp_path, options=options)
    assert job.wait() == "COMPLETED", job.log
    assert "ranks    2, on" in job.log and job.restarts == 0
    again = (
        "sbatch --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --gres=none --partition=debug slurm/124m.sh"
    )
    assert again in job.log
    assert (tmp_path / ".slurm").is_dir()  # beside the log
    assert curve(tmp_path / "nano") == whole


def test_a_signal_is_saved_requeued_and_continued(cluster, small_folder, tmp_path, whole):
    job = submit(cluster, small_folder, tmp_path)
    job.wait_for("step  6/16")
    job.signal("USR1")
    job.wait_for("requeued, to continue automatically")
    check_continued(job, tmp_path, whole)
    assert "Traceback" not in job.log


def test_while_data_are_prepared(cluster, small_folder, tmp_path):
    """Nothing is there to be saved: the job ends at once, and its next life prepares what is missing."""
    settings = ("--data", "builtin", "--data_root", str(tmp_path / "data"), "--steps", "4")
    job = submit(cluster, small_folder, tmp_path, *settings)
    cluster.wait_until(lambda: any((tmp_path / "data").glob(".*")), 60, "preparation")
    job.signal("USR1")
    job.wait_for("stopped; requeued, failure 1 of at most 3 since the last new checkpoint")
    assert "step 1/4" not in job.log
    assert job.wait() == "COMPLETED", job.log
    assert job.restarts == 1 and "Traceback" not in job.log
    assert [row["step"] for row in curve(tmp_path / "nano")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("number", "status", "minutes"), [(signal.SIGKILL, 137, 10), (signal.SIGSTOP, 76, 0.1)]
)
def test_a_rank_that_is_killed_or_hangs(cluster, small_folder, tmp_path, whole, number, status, minutes):
    job = submit(cluster, small_folder, tmp_path, f"--interruption.hang_minutes {minutes}")
    job.wait_for("step  7/16")
    os.kill(ranks_of(job)[1], number)
    job.wait_for(f"failed with exit status {status}; requeued, failure 1 of at most 3 since the last new")
    if number == signal.SIGSTOP:
        stacks = list((tmp_path / "nano/stacks").glob("*/stacks_rank_00000.txt"))
        assert "trainer.py" in stacks[0].read_text()
    check_continued(job, tmp_path, whole)


def test_a_killed_launcher_ends_the_job_and_the_same_line_continues(cluster, small_folder, tmp_path, whole):
    job = submit(cluster, small_folder, tmp_path)
    job.wait_for("step  7/16")
    shells = job.processes("slurm_script")  # the batch script lies in slurmd's spool folder
    assert shells
    for process in shells:
        process.kill()
    assert job.wait() in ("FAILED", "CANCELLED", "NODE_FAIL")
    again = submit(cluster, small_folder, tmp_path)
    assert again.wait() == "COMPLETED", again.log
    assert curve(tmp_path / "nano") == whole


def test_a_node_that_goes_down_requeues_the_job(cluster, small_folder, tmp_path):
    # More steps than it can make while SLURM waits for the node; the rate does not depend on how many there
    # are. So many steps would be compiled, which rounds differently.
    constant = ("--schedule.kind", "wsd", "--schedule.warmup", "2", "--schedule.decay", "0")
    constant += ("--compile", "false")
    expected = undisturbed(small_folder, tmp_path / "undisturbed", *STEPS, *constant, "--steps", "24")
    job = submit(cluster, small_folder, tmp_path, *constant, "--steps", "100000")
    job.wait_for("step      7/100000")
    cluster.kill_node("n2")
    try:
        cluster.wait_until(lambda: job.state == "PENDING", 90, "requeue after the node went down")
    finally:
        cluster.start_node("n2")
    job.wait_for("resume   from")
    before = len(curve(tmp_path / "nano"))
    cluster.wait_until(lambda: len(curve(tmp_path / "nano")) >= max(before, 8) + 4, 60, "more steps")
    job.signal("TERM")
    # Cancelled before SLURM has requeued it, the job would be requeued all the same.
    cluster.wait_until(lambda: job.restarts == 2, 60, "requeue after SIGTERM")
    cluster.call("scancel", job.number)
    rows = curve(tmp_path / "nano")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 12
    assert rows[:23] == expected[: min(len(rows), 23)]  # the last step is validated in any case


def test_cancelled_for_good(cluster, small_folder, tmp_path):
    job = submit(cluster, small_folder, tmp_path, "--steps", "100000", "--compile", "false")
    job.wait_for("step      5/100000")
    cluster.call("scancel", job.number)
    assert job.wait() == "CANCELLED"
    cluster.wait_until(lambda: "ended by SLURM (scancel, or a node that failed)" in job.log, 60, "last words")
    assert job.restarts == 0
    saved = (tmp_path / "nano" / "latest").read_text()
    assert int(saved.removeprefix("step_")) >= 5


def test_a_study_as_an_array(cluster, small_folder, tmp_path):
    (tmp_path / "two.yaml").write_text(f"""
recipe: micro
seeds: 2
settings: {{data: {small_folder}, steps: 2, global_batch_tokens: 512, micro_batch: 8,
           checkpoint: {{every: 0}}, logging: {{wandb: disabled}}}}
baseline: prism
variants: {{prism: {{model: prism-nano}}, gpt2: {{model: gpt2-nano}}}}
""")
    options = ["--gres=none", "--ntasks-per-node=2", "--cpus-per-task=1", "--array=0-3"]
    options += [f"--output={tmp_path}/%a.log"]
    command = ("slurm/study.sh", str(tmp_path / "two.yaml"), "--out", str(tmp_path / "runs"))
    job = cluster.submit(*options, *command, env=ENVIRONMENT)
    names = {f"{model}-s{seed}" for model in ("prism", "gpt2") for seed in (1, 2)}
    job.wait_for_array(300)
    assert all((tmp_path / "runs" / name / "checkpoints" / "step_000002").is_dir() for name in names)
    command = [sys.executable, "-m", "pretrain.study", "list", str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = [line.split()[1:3] for line in done.stdout.splitlines()[1:]]
    assert listed == [[name, "finished"] for name in ("prism-s1", "gpt2-s1", "prism-s2", "gpt2-s2")]
    for task in range(4):  # two tasks cannot share eight sequences in micro-batches of eight
        log = (tmp_path / f"{task}.log").read_text()
        assert "ranks    1 of the job's 2 tasks" in log and "ranks    1, on" in log
