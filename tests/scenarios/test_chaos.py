"""One run, many faults at random moments: it completes, and its curve is that of a run without any. Its heads
grow.

CHAOS_FAULTS=30 CHAOS_EACH=5 CHAOS_SEED=1 python -m pytest -m slow tests/scenarios/test_chaos.py -s
CHAOS_FLAGS="--context_parallel 2" adds settings of the run.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.state import read_state
from tests.helpers.items import write_data_sets
from tests.helpers.launch import Running, launch, start
from tests.helpers.small_disk import small_disk
from tests.helpers.training import curve, nano_arguments

FAULTS = int(os.environ.get("CHAOS_FAULTS", "8"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
RANKS = 2
STEPS = 10 * FAULTS + 20
SETTINGS = (
    f"--steps {STEPS} --checkpoint.every 3 --checkpoint.keep_last 3 --validation.every 7",
    "--validation.sequences 40 --logging.every 1 --logging.seconds 0 --skip_spikes 6 "
    "--checkpoint.background true",
    "--growth.criterion incrt --growth.interval 6 --growth.calibration 2 --growth.maximum 6 --growth.start 3",
    "--growth.grow_above 0.1 --growth.prune_below 0.0999 --growth.patience 2",
    *filter(None, [os.environ.get("CHAOS_FLAGS")]),
)

Moment = Callable[[Running, random.Random, Path], None]
"""Waits until a fault is to come."""


def signals(*numbers: signal.Signals) -> Callable[[Running, random.Random, Path], None]:
    """Signals to one rank, at once one after the other."""

    def fault(running: Running, generator: random.Random, folder: Path) -> None:
        rank = generator.randrange(RANKS)
        for number in numbers:
            running.kill(rank, number)

    return fault


def stop_for_a_while(running: Running, generator: random.Random, folder: Path) -> None:
    """A rank that sleeps and comes back harms nobody; then the whole machine is gone."""
    rank = generator.randrange(RANKS)
    running.kill(rank, signal.SIGSTOP)
    time.sleep(generator.uniform(0.5, 3))
    running.kill(rank, signal.SIGCONT)
    time.sleep(generator.uniform(0, 2))
    running.kill()


def damage_the_newest(running: Running, generator: random.Random, folder: Path) -> None:
    """Power goes, and the newest checkpoint loses the end of a file."""
    running.kill()
    for process in running.processes:
        process.wait()
    checkpoints = sorted((folder / "checkpoints").glob("step_*"))
    if len(checkpoints) > 1:
        files = sorted(path for path in checkpoints[-1].rglob("*") if path.is_file() and path.stat().st_size)
        victim = generator.choice(files)
        os.truncate(victim, generator.randrange(victim.stat().st_size))


def full_disk(running: Running, generator: random.Random, folder: Path) -> None:
    """Somebody else fills the disk, but for a few kilobytes, until the run has given up."""
    room = generator.choice([0, 4096, 65536])
    filler = folder.parent / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        file.write(bytes(max(0, shutil.disk_usage(folder.parent).free - room)))
    with contextlib.suppress(AssertionError):
        running.wait(60)
    filler.unlink()


def lose_the_checkpoints(running: Running, generator: random.Random, folder: Path) -> None:
    """The folder of checkpoints disappears under the run, perhaps during a save; a little later all is
    over."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    time.sleep(generator.uniform(0, 2))
    running.kill()


KINDS = {
    "kill": signals(signal.SIGKILL),
    "SIGUSR1": signals(signal.SIGUSR1),
    "SIGTERM": signals(signal.SIGTERM),
    "SIGINT": signals(signal.SIGINT, signal.SIGTERM),
    "stop for a while": stop_for_a_while,
    "damaged checkpoint": damage_the_newest,
    "full disk": full_disk,
    "lost checkpoints": lose_the_checkpoints,
}


@pytest.fixture
def disk(tmp_path):
    """A disk that can be filled."""
    with small_disk(tmp_path / "disk", "64m") as folder:
        yield folder


@pytest.mark.slow
def test_a_run_survives_everything(small_folder, tmp_path, disk):
    arguments = nano_arguments(small_folder, disk, *SETTINGS)
    finished = launch(nano_arguments(small_folder, tmp_path / "whole", *SETTINGS), RANKS, timeout=600)
    assert finished.returncode == 0, finished.output

    folder = disk / "nano"
    kinds = [list(KINDS)[index % len(KINDS)] for index in range(FAULTS)]
    survive(arguments, folder, STEPS, kinds, at_any_time)
    finished = launch(arguments, RANKS, timeout=600)
    assert finished.returncode == 0, finished.output
    assert curve(folder) == curve(tmp_path / "whole" / "nano")
    events = read_state(folder / f"checkpoints/step_{STEPS:06d}").record("growth")["events"]
    assert len({event["step"] for event in events}) >= 4
    assert {event["kind"] for event in events} == {"grow", "prune"}


def survive(
    arguments: Any, folder: Path, last: int, kinds: list[str], moment: Moment, **options: Any
) -> None:
    """Start the run again and again, with a fault of each of *kinds* at the *moment*, in a random order."""
    generator = random.Random(SEED)
    generator.shuffle(kinds)
    began = time.monotonic()
    for number, kind in enumerate(kinds):
        if last == SHORT:  # what the fault is to meet begins anew: the last steps with their save, compiling
            unfinished = folder.glob("checkpoints/.writing_*")
            for gone in (folder / LAST, folder.parent.parent / "compiled", *unfinished):
                shutil.rmtree(gone, ignore_errors=True)
        with start(arguments, RANKS, **options) as running:
            moment(running, generator, folder)
            KINDS[kind](running, generator, folder)
            finished = running.wait(300)
        newest = (folder / "latest").read_text().strip() if (folder / "latest").exists() else "none"
        codes = finished.returncodes
        print(
            f"[{time.monotonic() - began:5.0f} s] fault {number + 1:2}/{len(kinds)}: {kind}; exit codes "
            f"{codes}; {newest}"
        )
        assert any(codes) or f"step_{last:06d}" == newest, finished.output
        if kind == "SIGINT":
            assert set(codes) <= {0, 130}, codes
        if kind in ("SIGUSR1", "SIGTERM", "SIGINT", "full disk"):
            assert "Traceback" not in finished.output, finished.output


def at_any_time(running: Running, generator: random.Random, folder: Path) -> None:
    """Now and then before the first step, and in the middle of starting; mostly a few steps on."""
    if generator.random() < 0.2:
        time.sleep(generator.uniform(1, 8))
    else:
        wait_for_steps(running, generator.randint(1, 9))
        time.sleep(generator.uniform(0, 0.5))


def soon_after(reached: Callable[[Path], bool], most: float) -> Moment:
    """At most so many seconds after the run's folder shows something, or when the run has ended."""

    def moment(running: Running, generator: random.Random, folder: Path) -> None:
        deadline = time.monotonic() + 200
        while not reached(folder) and time.monotonic() < deadline:
            if any(process.poll() is not None for process in running.processes):
                return
            time.sleep(0.01)
        time.sleep(generator.uniform(0, most))

    return moment


EACH = int(os.environ.get("CHAOS_EACH", "1"))
SHORT = 16
KINDS_OF_MOMENTS = ["kill", "SIGTERM", "SIGINT", "SIGUSR1", "stop for a while", "full disk"]
EVALUATED = "--evaluation.every 1 --evaluation.tasks piqa --evaluation.limit 11 --evaluation.data_dir"
LAST = f"checkpoints/step_{SHORT:06d}"
# Evaluation takes longer than a step.
MOMENTS: dict[str, tuple[Moment, int, str]] = {
    "compile": (
        soon_after(lambda folder: any((folder.parent.parent / "compiled").rglob("*.cpp")), 5),
        EACH,
        "--compile true",
    ),
    "evaluation": (at_any_time, 2 * EACH, "--architecture.context_length 128 --micro_batch 1"),
    "closing": (soon_after(lambda folder: (folder / LAST).exists(), 0.5), 2 * EACH, ""),
    "slow store": (soon_after(lambda folder: any(folder.glob("*/.writing_*")), 2), EACH, ""),
}


# tests/scenarios/test_interruption.py stops a run while it compiles. Here only a longer series does.
CHOSEN = [name for name in MOMENTS if name != "compile" or EACH > 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_a_run_survives_faults_at_bad_moments(small_folder, tmp_path, disk, name):
    """CHAOS_EACH=5 makes 30 faults of the 5."""
    moment, faults, more = MOMENTS[name]
    settings = (
        f"--steps {SHORT} --checkpoint.every 2 --validation.every 5 --checkpoint.background true {more}"
    )
    if name == "evaluation":
        settings += f" {EVALUATED} {write_data_sets(tmp_path / 'sets')}"
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    whole = launch(
        nano_arguments(small_folder, tmp_path / "whole", settings), RANKS, timeout=400, env=environment
    )
    assert whole.returncode == 0, whole.output
    if name == "slow store":
        library = tmp_path / "slow_store.so"
        source = Path(__file__).parents[1] / "helpers" / "slow_store.c"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        environment |= {"LD_PRELOAD": str(library), "SLOW_FOLDER": str(disk), "SLOW_MILLISECONDS": "3"}
    arguments, folder = nano_arguments(small_folder, disk, settings), disk / "nano"
    kinds = [KINDS_OF_MOMENTS[(number + len(name)) % len(KINDS_OF_MOMENTS)] for number in range(faults)]
    survive(arguments, folder, SHORT, kinds, moment, env=environment)
    finished = launch(arguments, RANKS, timeout=400, env=environment)
    assert finished.returncode == 0, finished.output
    assert curve(folder) == curve(tmp_path / "whole" / "nano")


def wait_for_steps(running: Running, steps: int) -> None:
    """Wait until so many lines of steps were printed, or the run has ended."""
    deadline = time.monotonic() + 120
    while running.output(0).count("\nstep ") < steps and time.monotonic() < deadline:
        if any(process.poll() is not None for process in running.processes):
            return
        time.sleep(0.02)
