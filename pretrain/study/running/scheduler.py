"""Runs what a study still lacks on this machine: several runs at a time, one after another failed or not."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from model.errors import UserError
from pretrain.config.sources import ROOT, find_ds_config
from pretrain.engine.batch import most_ranks
from pretrain.metrics.file import FILE_NAME, last_step
from pretrain.runtime.environment import SCHEDULER, is_group_running
from pretrain.runtime.hardware import SHARING
from pretrain.runtime.signals import STOPPED
from pretrain.study import results
from pretrain.study.planned import STUDY_FILE, PlannedRun, Study
from pretrain.study.register import register
from pretrain.study.tuning import write_tuned
from pretrain.utils.files import read_tail, write_atomically
from pretrain.utils.format import count_of, human_seconds, print_lines

POLL_SECONDS = 0.2
PROGRESS_SECONDS = 15.0
MOST_SHARING = 16
"""Runs at a time for each GPU, or core."""


@dataclass
class Slot:
    """A share of the machine, in which one run trains at a time."""

    index: int
    devices: list[str] = field(default_factory=list)
    """CUDA devices; empty on a machine without."""
    threads: int | None = None
    """CPU threads of each rank; None leaves it to the run."""
    sharing: int = 1
    """How many runs train at a time in the memory of its devices, or of the machine without them."""


@dataclass
class _Running:
    planned: PlannedRun
    slot: Slot
    process: subprocess.Popen[bytes]
    began_at: int
    """The step that it continued from."""


def slots(parallel: int, devices: Sequence[str], cores: int) -> list[Slot]:
    """Share a machine among *parallel* runs: its GPUs where it has any, else its cores.

    Several runs may share one of them, and each is told its share of the memory.

    Raises:
        UserError: more than MOST_SHARING runs for each GPU, or each core.
    """
    count, what = (len(devices), "GPU") if devices else (cores, "core")
    if parallel > MOST_SHARING * count:
        where = f"{count_of(count, what)}; give at most {MOST_SHARING * count}"
        raise UserError(f"parallel: {parallel} runs at a time on {where}")
    if not devices:
        threads = None if parallel == 1 else max(1, cores // parallel)
        return [Slot(index, threads=threads, sharing=parallel) for index in range(parallel)]
    each, sharing = max(1, count // parallel), -(-parallel // count)
    starts = [index * each % count for index in range(parallel)]
    return [Slot(index, list(devices[at : at + each]), None, sharing) for index, at in enumerate(starts)]


def run_command_line(
    study: Study, planned: PlannedRun, slot: Slot, begun: bool
) -> tuple[list[str], dict[str, str]]:
    """The command that trains a run, and the environment variables that it needs.

    It has as many ranks as its batch can be shared by, of the slot's devices at most.

    Args:
        begun: whether the run has a checkpoint; it keeps its number of threads then.
    """
    ranks = most_ranks(planned.run, len(slot.devices))
    config = study.folder / results.CONFIGS / f"{planned.name}.yaml"
    arguments = ["--ds_config", find_ds_config(study.file.ds_config), "--config", str(config)]
    if slot.threads and planned.run.threads is None and not begun:
        arguments += ["--threads", str(max(1, slot.threads // ranks))]
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(slot.devices[:ranks])} if slot.devices else {}
    if slot.sharing > 1:
        environment[SHARING] = str(slot.sharing)
    main = str(ROOT / "pretrain" / "main.py")
    if ranks == 1:
        return [sys.executable, main, *arguments], environment
    launcher = [str(Path(sys.executable).with_name("deepspeed"))]
    if not slot.devices:  # given a number, DeepSpeed would take the machine's first devices
        launcher += ["--num_accelerators", str(ranks)]
    return [*launcher, main, *arguments], environment


def check_runs(study: Study) -> None:
    """Reject a study with a run that could not begin, as far as that is known before its ranks are.

    Relative paths are looked for in the working directory.

    Raises:
        UserError: see read_ds_config, most_ranks, check_settings and check_start of
            pretrain/assembly/preflight.py, and open_data.
    """
    from pretrain.assembly.data import open_data
    from pretrain.assembly.preflight import check_settings, check_start
    from pretrain.engine.ds_config import check_against_run
    from pretrain.engine.ds_config_check import read_ds_config

    ds_config = read_ds_config(find_ds_config(study.file.ds_config))
    opened = set()
    for planned in study.runs[: len(study.variants)]:  # of the first seed
        most_ranks(planned.run, 1)
        # How it fits the ranks of its launch is checked there.
        run = dataclasses.replace(planned.run, tensor_parallel=1, context_parallel=1, micro_batch=None)
        check_against_run(ds_config, run)
        check_settings(run)
        check_start(run)
        data = run.data, run.tokenizer, run.validation.data, run.task
        if run.data != "builtin" and data not in opened:  # the built-in one is made by the first run
            open_data(run, print)
            opened.add(data)


def write_study(study: Study, runs: Sequence[PlannedRun] | None = None) -> None:
    """Write the study's file, the numbers of its runs (task_names), what it expects (register), its tuned
    values, and a recipe for each run, or for *runs*, into its folder.

    Writers of one study at a time write the same bytes.

    Raises:
        OSError: the folder cannot be written.
    """
    for name in (results.CONFIGS, results.LOGS):
        (study.folder / name).mkdir(parents=True, exist_ok=True)
    for planned in study.runs if runs is None else runs:
        # main.py takes it as --config from any working directory of the same data.
        recipe = dataclasses.replace(planned.run, runs_dir=os.path.realpath(study.folder)).to_yaml()
        write_atomically(study.folder / results.CONFIGS / f"{planned.name}.yaml", recipe)
    write_atomically(study.folder / results.TASKS_FILE, "\n".join(results.task_names(study)) + "\n")
    write_atomically(study.folder / STUDY_FILE, study.text)
    if study.tuned:  # by the recorded study that this one continues
        write_tuned(study.folder, study.tuned)
    register(study)


class Scheduler:
    """Trains the runs of a study that are not finished.

    Args:
        study: what to run; its files are in its folder (write_study).
        shares: how the machine is shared; as many runs train at a time.
        stream: where progress goes.
    """

    def __init__(self, study: Study, shares: Sequence[Slot], stream: TextIO | None = None) -> None:
        self.study = study
        self.stream = sys.stdout if stream is None else stream
        self.stopped: int | None = None
        self._free = list(shares)
        self._running: list[_Running] = []
        self._waiting = results.list_unfinished(study)
        self._failed: dict[str, str] = {}
        self._began = self._said = time.monotonic()
        self._before = self._flops()

    def run(self) -> dict[str, str]:
        """Train until nothing is left, or a signal asks to stop; then the runs save and can be continued.

        Returns:
            Names of the runs that have failed, and what ended them.
        """
        with self._signals():
            while self._running or (self._waiting and self.stopped is None):
                while self._free and self._waiting and self.stopped is None:
                    self._start(self._waiting.pop(0), self._free.pop(0))
                time.sleep(POLL_SECONDS)
                for running in [found for found in self._running if _has_ended(found)]:
                    self._end(running)
                if self._running and time.monotonic() - self._said > PROGRESS_SECONDS:
                    self._print_progress()
        return self._failed

    def _flops(self) -> float:
        """Of the steps that all runs have made; of those whose heads grow, the most that they may take."""
        return sum(each.flops * min(1.0, self._step(each) / each.run.steps) for each in self.study.runs)

    def _print_progress(self) -> None:
        self._said, done = time.monotonic(), self._flops()
        total, new = sum(each.flops for each in self.study.runs), done - self._before
        left = human_seconds((self._said - self._began) * (total - done) / new) if new else "unknown time"
        steps = (f"{each.planned.name} at step {self._step(each.planned):,}" for each in self._running)
        print_lines(f"progress {done / total:.1%}, {left} left; {', '.join(steps)}", file=self.stream)

    def _start(self, planned: PlannedRun, slot: Slot) -> None:
        begun, began_at = (planned.folder / "latest").is_file(), self._step(planned)
        command, environment = run_command_line(self.study, planned, slot, begun)
        results.failed_mark(planned).unlink(missing_ok=True)
        with (self.study.folder / results.LOGS / f"{planned.name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment, SCHEDULER: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches this process alone, which asks the runs to save.
                start_new_session=True,
            )
        self._running.append(_Running(planned, slot, process, began_at))
        if self.stopped is not None:  # the signal came while the process was started
            process.send_signal(signal.SIGTERM)

    def _end(self, ended: _Running) -> None:
        self._running.remove(ended)
        self._free.append(ended.slot)
        name, code = ended.planned.name, ended.process.returncode
        state, rows = results.run_state(self.study, ended.planned)
        if code == 0 and state == "finished":
            result = f"{self.study.file.measure} {rows[-1][self.study.file.measure]:.4f}"
            print_lines(f"finished {name}: {result}", file=self.stream)
            return
        if code == STOPPED:
            further = self._step(ended.planned) > ended.began_at
            if self.stopped is None and further:  # its own limit of minutes: it is resumed
                self._waiting.insert(0, ended.planned)
            if self.stopped is not None or further:
                return
        if self.stopped is not None and code < 0:
            return
        reason = f"exit code {code}: {self._last_error(name)}"
        if code == 0:
            reason = f"it ended at step {self._step(ended.planned):,} without {self.study.file.measure}"
        with suppress(OSError):
            write_atomically(results.failed_mark(ended.planned), reason + "\n")
        self._failed[name] = reason
        print_lines(f"failed   {name}: {reason}", file=self.stream)

    def _step(self, planned: PlannedRun) -> int:
        if (kept := results.recorded_result(self.study, planned)) is not None:
            return kept.step
        with suppress(UserError):
            return last_step(planned.folder / FILE_NAME)
        return 0

    def _last_error(self, name: str) -> str:
        """The line of a run's log that says most about its end."""
        tail = read_tail(self.study.folder / results.LOGS / f"{name}.log", 8192).decode(errors="replace")
        lines = [line.strip() for line in tail.splitlines()]
        errors = [line for line in lines if line.startswith("error:") or "Error" in line.split(" ")[0]]
        return (errors or [line for line in lines if line] or ["it printed nothing"])[-1][:300]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass a request to stop on to the runs; a second Ctrl-C ends them at once."""

        def stop(number: int, _: object) -> None:
            again = self.stopped is not None and number == signal.SIGINT
            self.stopped = self.stopped or number
            for running in self._running:
                with suppress(ProcessLookupError):
                    if again:
                        os.killpg(running.process.pid, signal.SIGKILL)
                    else:
                        running.process.send_signal(signal.SIGTERM)
            if not again:
                os.write(2, b"\nstopping: the runs save and end; the same command goes on\n")

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        before = {number: signal.signal(number, stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _has_ended(running: _Running) -> bool:
    """Whether the command and its ranks have ended: a launcher that is stopped leaves ranks that save."""
    return running.process.poll() is not None and not is_group_running(running.process.pid)
