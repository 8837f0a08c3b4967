"""Gives every command bad input of every kind, and says what became of it.

    python -m tests.bad_inputs --count 2000 --seed 1 [--only main] [--verbose]

A case is refused (one line, exit code 2), accepted (exit code 0) or failed: a traceback, more lines, another
exit code, or no end within HANG_SECONDS. The exit code is 1 if one failed, or was accepted for no known
reason. Heavy libraries are imported once; each case runs in a fork. Training stops where it would begin.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import os
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.bad_inputs.cases import Case, chosen
from tests.bad_inputs.reasons import reason
from tests.bad_inputs.spoil import copy_world, spoil

ROOT = Path(__file__).resolve().parents[2]
VALID = Path(__file__).with_name("valid")
"""A recipe, a study and a task that are valid."""
HANG_SECONDS = 20.0
MOST_BYTES = 6 << 30
HEAVY = """
datasets matplotlib.pyplot transformers transformers.models.llama.modeling_llama wandb
pretrain.classification.corpus pretrain.diagnostics.figures pretrain.diagnostics.measure
pretrain.engine.ds_config pretrain.engine.patches pretrain.evaluation.language_model
pretrain.evaluation.scores pretrain.growth.report.contents pretrain.hf.export_folder
pretrain.hf.import_folder pretrain.hf.open_model pretrain.plots.learning_rates pretrain.plan.report
pretrain.assembly.open_run pretrain.plots.command pretrain.prepare.command pretrain.presets pretrain.report
pretrain.study.power pretrain.study.report.page pretrain.trainer
"""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "COLUMNS": "200"}


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    case: Case
    code: int | None
    """None: it did not end."""
    errors: str
    """What it wrote on standard error."""

    @property
    def state(self) -> str:
        """refused, accepted or failed."""
        lines = [line for line in self.errors.splitlines() if line.strip()]
        if self.code == 2 and len(lines) == 1 and lines[0].startswith("error: "):
            return "refused"
        return "accepted" if self.code == 0 and "Traceback" not in self.errors else "failed"

    def __str__(self) -> str:
        lines = [line for line in self.errors.splitlines() if line.strip()]
        ended = "no end" if self.code is None else f"exit code {self.code}, {len(lines)} lines"
        said = lines[-1][:160] if lines else ""
        return f"{self.state} {' / '.join(self.case.key)} {self.case.value!r:.70}: {ended}: {said}"


def heavy_imports() -> None:
    """What the commands import, so that forks need not."""
    from pretrain.engine.deepspeed_logging import quiet_libraries

    quiet_libraries()
    for name in HEAVY.split():
        importlib.import_module(name)
    from pretrain.evaluation import scores

    manager = scores.TaskManager()
    scores.task_manager = lambda tasks, include_path=None: manager  # type: ignore[assignment]


def in_fork(command: Callable[[], Any], folder: Path, log: Path, environment: dict[str, str]) -> int:
    """Start *command* in a fork of this process; returns its process id."""
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        for number, name in ((0, os.devnull), (1, log.with_suffix(".out")), (2, log)):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o644), number)
        os.environ.update(ONE_THREAD)
        os.environ.update(environment)
        os.chdir(folder)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        code = command() or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with mock.patch.object(os, "register_at_fork"):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        os._exit(code)


def command_of(case_module: str, arguments: Sequence[str], train: bool = False) -> Callable[[], Any]:
    """What runs a command in a fork."""

    def script() -> None:
        sys.argv = [case_module, *arguments]
        begin = mock.patch("pretrain.report.describe_opening", side_effect=SystemExit(0))
        with mock.patch.object(sys, "path", [*sys.path]), begin if not train else mock.MagicMock():
            runpy.run_path(str(ROOT / case_module), run_name="__main__")

    def module() -> Any:
        return importlib.import_module(case_module).main(list(arguments))

    return script if case_module.endswith(".py") else module


def wait(processes: dict[int, float]) -> tuple[int, int | None]:
    """The first of some processes that has ended, or was ended at its time; with its exit code."""
    while True:
        for process, until in processes.items():
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended or time.monotonic() > until:
                if not ended:
                    os.killpg(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                return process, os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.005)


MADE_BY = (
    "pretrain.prepare.command --out data/mine --text text --train_tokenizer 400 --processes 1",
    "pretrain/main.py --config recipe.yaml --ds_config ds.json --data data/mine --name one",
    "pretrain.convert runs/one --out hf/one",
    "pretrain.study.command task study.yaml 0 --out runs/done",
    "pretrain.study.command task study.yaml 1 --out runs/done",
    "pretrain/main.py --config runs/done/configs/a-s1.yaml --ds_config ds.json",
    "pretrain/main.py --config runs/done/configs/b-s1.yaml --ds_config ds.json",
)


def make_world(world: Path) -> None:
    """Everything that the commands read, made by the commands themselves."""
    import json

    from model.presets import preset
    from tests.helpers.items import write_data_sets
    from tests.helpers.small_corpus import small_paths

    shutil.copytree(VALID, world)
    (world / "text").mkdir()
    for number, path in enumerate(small_paths()[:12]):
        shutil.copy(path, world / "text" / f"{'abcdefghijkl'[number]}.txt")
    shutil.copy(ROOT / "ds_configs" / "zero1.json", world / "ds.json")
    (world / "model.json").write_text(json.dumps(preset("prism-nano").to_json()))
    rows = [{"text": f"text {number} of some", "label": str(number % 2)} for number in range(60)]
    for name in ("rows.jsonl", "labels.jsonl"):
        (world / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_data_sets(world / "sets")
    for line in MADE_BY:
        module, *arguments = line.split()
        log = world.with_suffix(".log")
        process = in_fork(command_of(module, arguments, train=True), world, log, {})
        if wait({process: time.monotonic() + 120})[1] != 0:
            raise SystemExit(f"the world cannot be made: {line}\n{log.read_text()}")


def run_cases(
    cases: Sequence[Case], folder: Path, world: Path | None = None, at_once: int = 2
) -> list[Outcome]:
    """Run the cases below *folder*, some at a time; *world* is made first if it is not there."""
    world = world or folder / "world"
    if not world.exists():
        make_world(world)
    outcomes, running = [], dict[int, tuple[Case, Path, float]]()
    waiting = list(enumerate(cases))
    while waiting or running:
        while waiting and len(running) < at_once:
            number, case = waiting.pop(0)
            place = folder / f"case{number}"
            copy_world(world, place)
            if case.file:
                spoil(place, case)
                os.chdir(ROOT)
            command = command_of(case.command.module, case.arguments)
            process = in_fork(command, place, folder / f"case{number}.log", case.environment)
            running[process] = case, place, time.monotonic() + HANG_SECONDS
        process, code = wait({process: until for process, (*_, until) in running.items()})
        case, place, _ = running.pop(process)
        log = place.with_suffix(".log")
        outcomes.append(Outcome(case, code, log.read_text(errors="replace") if log.exists() else ""))
        if outcomes[-1].state == "failed":
            print(outcomes[-1], flush=True)
        shutil.rmtree(place, ignore_errors=True)
    return outcomes


def summary(outcomes: Sequence[Outcome], verbose: bool = False) -> tuple[list[str], int]:
    """Lines for the terminal, and how many failed or were accepted for no known reason."""
    counts = collections.Counter((outcome.case.kind, outcome.state) for outcome in outcomes)
    states = ("refused", "accepted", "failed")
    lines = [f"{'kind':16}" + "".join(f"{state:>10}" for state in states)]
    for kind in sorted({kind for kind, _ in counts}):
        lines.append(f"{kind:16}" + "".join(f"{counts[kind, state]:>10}" for state in states))
    total = collections.Counter(outcome.state for outcome in outcomes)
    lines.append(f"{'all':16}" + "".join(f"{total[state]:>10}" for state in states))
    accepted: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.state == "accepted":
            accepted.setdefault(reason(outcome.case), []).append(" / ".join(outcome.case.key))
    unknown = accepted.pop("", [])
    lines += [f"accepted {len(keys):4}: {why}" for why, keys in sorted(accepted.items())]
    lines += [f"         {key}" for keys in accepted.values() for key in sorted(set(keys))] if verbose else []
    lines += [f"accepted for no known reason: {key}" for key in unknown]
    return lines, total["failed"] + len(unknown)


def main() -> int:
    """Run as many cases as asked for; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="part of COMMAND FIELD KIND, such as 'generate --top_p'")
    parser.add_argument("--world", type=Path, help="where to keep the valid files for another time")
    parser.add_argument("--verbose", action="store_true", help="list what was accepted")
    options = parser.parse_args()
    began = time.monotonic()
    os.environ.update(ONE_THREAD)
    heavy_imports()
    from pretrain.config.sources import FLAG_NAMES

    cases = chosen(FLAG_NAMES, options.count, options.seed, options.only)
    with tempfile.TemporaryDirectory(prefix="bad_inputs_") as folder:
        lines, bad = summary(run_cases(cases, Path(folder), options.world), options.verbose)
    print("\n".join(lines))
    print(f"{len(cases)} cases in {time.monotonic() - began:.0f} s, seed {options.seed}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
