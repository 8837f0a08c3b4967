"""The scripts of slurm/ without a SLURM: what they would run, and what they refuse."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from tests.helpers.launch import ROOT
from tests.helpers.marks import slow

SRUN = "would run: srun --kill-on-bad-exit=1 --wait=0 --cpu-bind=cores --distribution=block:block"


def bash(*arguments, **environment):
    """Run a script of slurm/; SLURM's own variables are those of the test alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    command, variables = ["bash", *arguments], kept | environment
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


def write_tools(folder, **scripts):
    """Commands that stand for programs of a cluster."""
    folder.mkdir(exist_ok=True)
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("script", "arguments", "tasks"),
    [
        ("757m.sh", "--seed 2", "4 nodes, 8"),
        ("354m.sh", "--data data/x\\ y", "2 nodes, 8"),
        ("124m.sh", "", "1 nodes, 8"),
        ("evaluate.sh", "runs/x", "1 nodes, 8"),
        ("convert.sh", "runs/x", "1 nodes, 1"),
    ],
)
def test_a_dry_run_shows_both_ways(script, arguments, tasks):
    """What it would run here, and in a job of so many tasks."""
    recipe = script.removesuffix(".sh")
    training = f"pretrain/main.py --ds_config ds_configs/zero2.json --config {recipe} --data data/fineweb"
    commands = {"evaluate": ("deepspeed --module ", "pretrain.evaluation")}
    commands["convert"] = ("python -m ", "pretrain.convert")
    launcher, entry = commands.get(recipe, ("deepspeed ", training))
    done = bash(f"slurm/{script}", *shlex.split(arguments), "--dry_run", SLURM="0")
    assert done.returncode == 0, done.stderr
    assert f"would run: {launcher}{entry} {arguments}".rstrip() + "\n" in done.stdout
    assert f"{tasks} tasks each" in done.stdout and SRUN in done.stdout
    assert f"bash slurm/task.sh {entry} {arguments}".rstrip() in done.stdout


HERE = {
    "convert.sh {folder} --out {folder}/out": "error: run:",
    "evaluate.sh {folder} --tasks piqa": "error: model:",
    "prepare.sh --text {folder}/none.txt --out {folder}/out": "error: text:",
    "124m.sh --steps 0": "error: steps:",
}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "said"), HERE.items())
def test_scripts_run_here_too(tmp_path, command, said):
    """SLURM=0 starts the command itself: its own one line and exit code, not the launcher's."""
    script, *given = command.format(folder=tmp_path).split()
    done = bash(f"slurm/{script}", *given, SLURM="0", VENV=sys.prefix)
    assert said in done.stdout + done.stderr and "ModuleNotFoundError" not in done.stderr
    assert done.returncode == 2


def test_a_dry_run_of_an_array():
    arguments = ["--text", "a b.txt", "--out", "data/x", "--dry_run"]
    array = {"ID": "7", "MIN": "4", "MAX": "11", "COUNT": "8"}
    places = {f"SLURM_ARRAY_TASK_{name}": value for name, value in array.items()}
    done = bash("slurm/prepare.sh", *arguments, SLURM="0", **places)
    command = "python -m pretrain.prepare --text a\\ b.txt --out data/x --shard 3/8"
    assert done.returncode == 0 and done.stdout == f"would run: {command}\n"
    gaps = bash("slurm/prepare.sh", *arguments, SLURM="0", **places | {"SLURM_ARRAY_TASK_COUNT": "2"})
    assert gaps.returncode == 2 and gaps.stderr.startswith("error: --array: 4 to 11 with gaps is not valid; ")


def test_containers_mounts_and_networks():
    done = bash("slurm/124m.sh", "--dry_run", SLURM="0", CONTAINER="nvcr.io/x", MOUNTS="/data:/data")
    assert f"--container-mounts={ROOT}:{ROOT}\\,/data:/data" in done.stdout.replace("\\:", ":")
    done = bash("slurm/124m.sh", "--dry_run", SLURM="0", CONTAINER="my.sif")
    assert "apptainer exec --nv my.sif" in done.stdout
    line = ". slurm/launch.sh; settings; echo $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME"
    assert bash("-c", line, INTERFACE="ib0").stdout == "ib0 ib0\n"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study of four runs with two sequences a step."""
    file = tmp_path_factory.mktemp("study") / "four.yaml"
    settings = "{recipe: micro, seeds: 2, settings: {global_batch_tokens: 512}, baseline: a, "
    file.write_text(settings + "variants: {a: {heads: 8x4}, b: {heads: 4x4}}}")
    return str(file)


@pytest.mark.slow
def test_a_study_runs_all_or_says_how(study, tmp_path):
    given = [study, "--out", str(tmp_path)]
    alone = bash("slurm/study.sh", *given, "--dry_run", SLURM="0")
    assert alone.returncode == 0 and "to do    4 runs" in alone.stdout
    no_array = bash("slurm/study.sh", *given, SLURM_JOB_ID="7")
    assert no_array.returncode == 2 and "--array=0-3" in no_array.stderr
    beyond = bash("slurm/study.sh", *given, SLURM_JOB_ID="7", SLURM_ARRAY_TASK_ID="4")
    assert beyond.returncode == 2 and "valid: --array=0-3" in beyond.stderr


def empty_environment(folder):
    """One that changes nothing when it is activated."""
    (folder / "none/bin").mkdir(parents=True, exist_ok=True)
    (folder / "none/bin/activate").touch()
    return str(folder / "none")


JOB = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NODELIST": "node1"}


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "started"), [("8", "2"), ("1", "1")])
def test_a_task_of_a_study_starts_as_many_ranks_as_its_batch_allows(study, tmp_path, tasks, started):
    """srun takes its number of tasks from the environment."""
    write_tools(tmp_path, srun='echo "srun: $SLURM_NTASKS of ${SLURM_NTASKS_PER_NODE:-any}"', scontrol="")
    job = JOB | {"SLURM_NTASKS": tasks, "SLURM_NTASKS_PER_NODE": tasks}
    job |= {"VENV": empty_environment(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = bash("slurm/study.sh", study, "--out", str(tmp_path / "o"), **job)
    assert done.returncode == 0, done.stderr
    assert f"srun: {started} of {'any' if tasks != started else tasks}" in done.stdout
    assert ("ranks    2 of the job's 8 tasks" in done.stdout) == (tasks != started)
    assert (tmp_path / "o/configs/b-s2.yaml").is_file()


ONE_TASK = "srun --nodes=1 --ntasks=1 --export=ALL --container-image=nvcr.io/x"
ASKED = {"my.sif": "apptainer exec {} python -m pretrain.study task", "nvcr.io/x": ONE_TASK}


@pytest.mark.slow
@pytest.mark.parametrize(("container", "asked"), ASKED.items())
def test_a_study_in_a_container(study, tmp_path, container, asked):
    """The host has no Python: the study is asked in the container what to run."""
    tools, calls = tmp_path / "tools", tmp_path / "calls"
    if container == "my.sif":
        (tmp_path / container).touch()
        container = str(tmp_path / container)
    in_container = f'echo "${{0##*/}} $*" >> {calls}; while [ "$1" != python ]; do shift; done; shift'
    started = dict.fromkeys(("apptainer", "srun"), f'{in_container}; exec {sys.executable} "$@"')
    host = {"python": "echo called on the host >&2; exit 127", "scontrol": "echo NodeAddr=node1"}
    write_tools(tools, **started, **host)
    job = JOB | {"CONTAINER": container}
    given = [study, "--out", str(tmp_path / "out"), "--dry_run"]
    done = bash("slurm/study.sh", *given, PATH=f"{tools}:/usr/bin:/bin", **job)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert calls.read_text().startswith(asked.format(container))
    assert "bash slurm/task.sh pretrain/main.py --ds_config ds_configs/zero2.json --config" in done.stdout
    assert container in done.stdout.splitlines()[-1]


def test_without_slurm_there_is_no_container(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/activate").write_text("echo activated\n")
    line = "SLURM=0; . slurm/launch.sh; activate"
    given = {"VENV": str(tmp_path), "CONTAINER": str(tmp_path / "my.sif")}
    (tmp_path / "my.sif").touch()
    assert bash("-c", line, **given).stdout == "activated\n"
    inside = bash("-c", line.removeprefix("SLURM=0; "), **given)
    assert (inside.stdout, inside.stderr, inside.returncode) == ("", "", 0)


WRONG = {
    ("FAILURES", "unlimited"): "error: FAILURES: 'unlimited' is not valid; give a whole number",
    ("VENV", "/typo"): "error: VENV: '/typo' has no bin/activate; give the folder of an environment",
    ("CONTAINER", "/typo.sif"): "error: CONTAINER: no file '/typo.sif'; give an image",
}


@pytest.mark.parametrize(("variable", "said"), WRONG.items())
def test_a_wrong_variable_is_bad_input(tmp_path, variable, said):
    job = Job(tmp_path)
    assert not job.start(0, True, **dict([variable])) and (job.code, job.said.strip()) == (2, said)


def test_a_controller_that_restarts_ends_no_job(tmp_path):
    """Each request of it is made again; and if it does not come back, the job still starts."""
    job = Job(tmp_path)
    tool = tmp_path / "tools/scontrol"
    answer = tool.read_text()
    error = "{ echo Unable to contact slurm controller >&2; exit 1; }"
    busy = f"echo x >> {tmp_path}/asked; [ $(($(wc -l < {tmp_path}/asked) % 3)) = 0 ] || {error}\n"
    tool.write_text(answer.replace("\n", f"\n{busy}", 1))
    assert job.start(75, True) and "sbatch" in (tmp_path / "line").read_text()
    tool.write_text(answer.replace("\n", f'\n[ "$1 $2" != "show job" ] || {error}\n', 1))
    assert job.start(75, True) and (tmp_path / "line").read_text() == "\n"


@pytest.mark.slow
def test_a_study_without_what_it_needs():
    for arguments, settings, said in (
        ([], {}, "error: study: none given"),
        (["direction"], {}, "error: SLURM: this is not a job"),
        (["no-such-study"], {"SLURM": "0"}, "error: study: no file or study 'no-such-study'"),
    ):
        done = bash("slurm/study.sh", *arguments, **settings)
        assert done.returncode == 2 and done.stderr.startswith(said)
        assert len(done.stderr.splitlines()) == 1


class Job:
    """A job whose tasks end as the test says, on a SLURM of two commands; each start is one of its lives."""

    def __init__(self, folder, time_limit="1-00:00:00", command=f"{ROOT}/slurm/124m.sh"):
        self.folder, self.starts = folder, 0
        (folder / "log").touch()
        # The task: saves a step, or not, and fails.
        srun = f'[ ! -f {folder}/saves ] || rm -f "$FAILURES_FILE"; echo "$SUBMIT_LINE" > {folder}/line\n'
        record = f"JobId=7 TimeLimit={time_limit} Partition=big Account=(null) "
        record += f"Command={command} WorkDir={ROOT}"
        scontrol = f'case "$*" in "show job"*) echo "{record} TresPerNode=gres:gpu:8 StdOut=x" ;;'
        scontrol += (
            f" requeue*) [ ! -f {folder}/stays ] || exit 1; kill $PPID; touch {folder}/requeued ;; esac"
        )
        write_tools(folder / "tools", srun=f"{srun}exit $(cat {folder}/status)", scontrol=scontrol, sleep="")

    def start(self, status, saves, *arguments, script="slurm/124m.sh", cwd=ROOT, **environment):
        """One life; whether the job was requeued, and what was printed."""
        (self.folder / "requeued").unlink(missing_ok=True)
        (self.folder / "saves").unlink(missing_ok=True)
        (self.folder / "status").write_text(str(status))
        if saves:
            (self.folder / "saves").touch()
        variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        variables |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "2"}
        variables |= {"SLURM_NTASKS_PER_NODE": "8", "SLURM_NTASKS": "16", "SLURM_CPUS_PER_TASK": "12"}
        variables |= {"SLURM_RESTART_COUNT": str(self.starts), "VENV": empty_environment(self.folder)}
        variables |= {"PATH": f"{self.folder}/tools:{os.environ['PATH']}", **environment}
        self.starts += 1
        with (self.folder / "log").open("w+") as log:
            command = ["bash", script, *arguments]
            done = subprocess.run(command, cwd=cwd, env=variables, stdout=log, stderr=subprocess.STDOUT)
            log.seek(0)
            self.said = log.read()
        self.code = done.returncode
        return (self.folder / "requeued").exists()


STATUSES = [1, 75, 75, 75, 1, 75, 75, 1, 75, 1]


def starts_of(job, lives, **environment):
    """How many of *lives*, of a status and whether a step is saved, begin before the job ends for good."""
    for number, (status, saves) in enumerate(lives, 1):
        if not job.start(status, saves, **environment):
            return number
    return None


@pytest.mark.parametrize(
    ("lives", "limit", "ends"),
    [
        ([(status, True) for status in STATUSES], 3, None),
        ([(status, False) for status in STATUSES], 3, 4),
        *slow(
            [
                ([(75, False)] * 9, 3, 4),
                ([(75, True)] * 9, 0, None),
                ([(1, True)] * 9, 1, None),
            ]
        ),
        ([(1, True)], 0, 1),
        # A new checkpoint resets the count; the crash after it is the first failure.
        ([(1, False), (137, False), (76, False), (1, True), (75, False), (1, False), (1, False)], 3, 7),
        ([(75, True), (2, True)], 3, 2),
        ([(75, True), (3, True)], 3, 2),
        ([(75, True), (130, True)], 3, 2),
    ],
)
def test_requeues_need_a_new_checkpoint(tmp_path, lives, limit, ends):
    assert starts_of(Job(tmp_path), lives, FAILURES=str(limit)) == ends


def test_a_job_that_may_not_be_requeued_ends_as_its_tasks_did(tmp_path):
    job = Job(tmp_path)
    (tmp_path / "stays").touch()
    assert not job.start(75, True) and job.code == 75
    assert "SLURM does not requeue it" in job.said.splitlines()[-1]


@pytest.mark.slow
def test_a_studys_run_that_fails_for_good_is_marked(study, tmp_path):
    """As list prints it."""
    job, given = Job(tmp_path), [study, "--out", str(tmp_path / "o")]
    mark = tmp_path / "o/logs/b-s2.failed"
    start = {"script": "slurm/study.sh", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "7"}
    for number in range(4):
        assert job.start(1, False, *given, **start) == (number < 3)
        assert mark.exists() == (number == 3)
    assert "failed with exit status 1" in mark.read_text()
    listed = subprocess.run(
        [sys.executable, "-m", "pretrain.study", "list", *given], cwd=ROOT, capture_output=True, text=True
    )
    assert "failed (job 7_3 failed with exit status 1)" in listed.stdout, listed.stderr
    assert job.start(75, True, *given, **start) and not mark.exists()  # submitted again
    for code in (2, 3):  # by which a pilot that diverged counts as tried
        assert not job.start(code, False, *given, **start)
        assert f"failed with exit status {code}" in mark.read_text()


def test_starts_that_died_with_their_node_are_counted(tmp_path):
    """Their scripts never came to their end."""
    job = Job(tmp_path)
    assert job.start(75, True)
    (tmp_path / ".slurm/7.failures").write_text("4")
    assert not job.start(75, True)
    assert "job 7 lost its node: failure 4 since the last new checkpoint" in job.said


# Of the job and of its warning; the seconds of one that is rejected.
LIMITS = [
    ("00:06:00", "", 360),
    ("00:04:59", "", 299),
    ("00:06:01", "", None),
    ("1-00:00:00", "", None),
    ("UNLIMITED", "", None),
    ("00:05:00", "USR1@60", None),
]


@pytest.mark.parametrize(("limit", "warning", "seconds"), LIMITS)
def test_a_time_limit_must_be_longer_than_the_warning(tmp_path, limit, warning, seconds):
    job = Job(tmp_path, limit)
    assert job.start(75, True, SBATCH_SIGNAL=warning) == (seconds is None)
    if seconds is not None:
        said = (
            f"error: --time: the time limit of {seconds} s leaves no time ahead of the warning, up to 360 s"
        )
        assert job.code == 2 and job.said.startswith(said) and len(job.said.splitlines()) == 1


def test_the_line_that_submits_the_job_again(tmp_path):
    job = Job(tmp_path, command=f"{ROOT}/slurm/124m.sh --name a b")
    job.start(75, True, "--name", "a b", DATA="data/my own")
    again = shlex.split((tmp_path / "line").read_text())
    expected = ["env", "DATA=data/my own", f"VENV={tmp_path}/none", "sbatch", "--nodes=2"]
    expected += ["--time=1-00:00:00", "--partition=big", "slurm/124m.sh", "--name", "a b"]
    assert again == expected


def test_the_line_of_a_job_that_was_submitted_elsewhere(tmp_path):
    job = Job(tmp_path, command="/home/a b/my jobs/124m.sh")
    job.start(75, True, SLURM_SUBMIT_DIR="/home/a b")
    again = shlex.split((tmp_path / "line").read_text())
    assert again[-3:] == ["--partition=big", f"--chdir={ROOT}", "my jobs/124m.sh"]


def test_where_the_jobs_own_files_go(tmp_path):
    """Beside the log, or where JOB_FILES says; a folder that cannot be written is one line."""
    job = Job(tmp_path)
    assert job.start(1, False) and (tmp_path / ".slurm/7.failures").read_text() == "1\n"
    assert job.start(1, False, JOB_FILES=f"{tmp_path}/own") and (tmp_path / "own/7.failures").exists()
    assert not job.start(1, False, JOB_FILES=f"{tmp_path}/log/own") and job.code == 2
    assert job.said.startswith("error: JOB_FILES: ") and len(job.said.splitlines()) == 1


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "slurm").glob("*.sh")))
def test_from_another_folder_a_job_says_what_to_do(tmp_path, script):
    if script in ("launch.sh", "task.sh"):
        return
    job = Job(tmp_path)
    assert not job.start(1, False, script=f"{ROOT}/slurm/{script}", cwd=tmp_path) and job.code == 2
    assert job.said == (
        f"error: --chdir: {tmp_path} is not the repository; submit from there, or give --chdir=REPOSITORY\n"
    )
