"""Reads what a study's runs have left in their folders: state, metrics, and whose they are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from model.config import ModelConfig
from model.errors import UserError, quote
from pretrain.config.sources import load_run_config
from pretrain.metrics.file import read_metrics
from pretrain.study.planned import STUDY_FILE, PlannedRun, Study
from pretrain.study.planning import diff_fields, read_study
from pretrain.utils.files import read_regular

if TYPE_CHECKING:
    from pretrain.checkpoint.state import TrainingState, WorldRecord

TASKS_FILE = "tasks.txt"
"""Names of runs, a line each; that of task n of a SLURM array is in line n, counted from 0."""
LOGS = "logs"
CONFIGS = "configs"
State = Literal["missing", "unfinished", "failed", "finished"]


@dataclass(frozen=True)
class RunResult:
    """One run of a study, as far as it is."""

    planned: PlannedRun
    state: State
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of its metrics.jsonl, in order of step."""
    saved: TrainingState | None = None
    """Of its newest checkpoint."""
    failure: str = ""
    """A one-line message about what ended its last attempt; empty if nothing did."""

    @property
    def step(self) -> int:
        """The step of the newest row; 0 without one."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @cached_property
    def model_config(self) -> ModelConfig | None:
        """The newest checkpoint's model, with growth the heads that it has now; None without a checkpoint."""
        where = f"study: {self.planned.name}: model of step {self.step:,}"
        return ModelConfig.from_json(self.saved.model, where) if self.saved else None

    @property
    def world(self) -> WorldRecord | None:
        """What wrote the newest checkpoint."""
        return self.saved.world if self.saved else None

    def result(self, measure: str, last: int = 1) -> float | None:
        """Mean of the *last* values of a metric; None unless the run is finished and has so many."""
        values = [row[measure] for row in self.rows if measure in row]
        return fmean(values[-last:]) if self.state == "finished" and len(values) >= last else None

    @property
    def described(self) -> str:
        """Its name and how far it is."""
        where = f"at step {self.step:,} of {self.planned.run.steps:,}"
        return f"{self.planned.name}: {self.state} {where}" + (f" ({self.failure})" if self.failure else "")


def load_study(folder: Path, check_runs: bool = True, settings: Mapping[str, Any] | None = None) -> Study:
    """The study whose runs are in *folder*; see read_study for the options.

    Raises:
        UserError: the folder has no study.yaml, or one that is not valid.
    """
    path = folder / STUDY_FILE
    if not path.is_file():
        raise UserError(
            f"study: {quote(str(folder))} has no {STUDY_FILE}; give the folder of a study, such as runs/NAME "
            "(head-schedules study run makes it)"
        )
    real = Path(os.path.realpath(folder))
    name = f"{real.parent.name}-{real.name}" if (real.parent / STUDY_FILE).is_file() else real.name
    return read_study(path, folder, name, source=str(folder), settings=settings, check_runs=check_runs)


def load_results(study: Study) -> list[RunResult]:
    """Every run of the study in its order, those of an archive as it has them; "missing" are those that have
    not begun.

    Raises:
        UserError: a run was made with other settings than the study file has now.
    """
    from pretrain.checkpoint.finder import checkpoint_path, checkpoint_steps
    from pretrain.checkpoint.state import read_state

    if study.recorded is not None:
        return list(study.recorded)
    check_settings(study)
    results = []
    for planned in study.runs:
        state, rows = run_state(study, planned)
        steps = checkpoint_steps(planned.folder)
        saved = read_state(checkpoint_path(planned.folder, steps[-1])) if steps else None
        results.append(RunResult(planned, state, rows, saved, failure(planned)))
    return results


def run_state(study: Study, planned: PlannedRun) -> tuple[State, list[dict[str, Any]]]:
    """How far a run is, and the rows of its metrics. Needs no torch.

    A run is finished when its last checkpoint is there and what is compared was measured at its last step.
    Whether it was made with the study's settings is not looked at (see check_settings).

    Raises:
        UserError: as read_metrics.
    """
    if not planned.folder.is_dir():
        return ("failed" if failure(planned) else "missing"), []
    rows = read_metrics(planned.folder)
    newest, steps = _text(planned.folder / "latest", 1000), planned.run.steps
    measured = any(row["step"] == steps and study.file.measure in row for row in rows[-1:])
    if measured and newest == f"step_{steps:06d}":
        return "finished", rows
    return ("failed" if failure(planned) else "unfinished"), rows


def list_unfinished(study: Study) -> list[PlannedRun]:
    """The runs that are not finished, in the study's order."""
    return [run for run in study.runs if run_state(study, run)[0] != "finished"]


def task_names(study: Study) -> list[str]:
    """The run of each task number: those in its folder's TASKS_FILE, then the study's others in its order.

    Numbers stay when variants and seeds are added or taken out: a queued array trains what it was submitted
    for.
    """
    names = _text(study.folder / TASKS_FILE).split()
    known = set(names)
    return names + [planned.name for planned in study.runs if planned.name not in known]


def _text(path: Path, most_bytes: int = 1 << 26) -> str:
    """What a file holds, without spaces around it; empty if it cannot be read or is longer."""
    try:
        return read_regular(path, most_bytes).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def find_unnamed_runs(study: Study) -> list[str]:
    """Names of the runs in its folder of variants or seeds that were taken out of the study's file."""
    named = {planned.name for planned in study.runs}
    return sorted(
        path.parent.name for path in study.folder.glob("*/config.yaml") if path.parent.name not in named
    )


def describe_unnamed(names: Sequence[str]) -> str:
    """A sentence on runs of find_unnamed_runs, without its full stop; empty without such runs."""
    plural = "s" if len(names) != 1 else ""
    what = f"{len(names)} run{plural} that the study does not name: {shorten_names(names)}"
    return f"the folder also holds {what}" if names else ""


def shorten_names(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def failure(planned: PlannedRun) -> str:
    """A one-line message about what ended the run's last attempt; empty if nothing did."""
    return _text(failed_mark(planned))


def failed_mark(planned: PlannedRun) -> Path:
    """The file that says what ended the run's last attempt."""
    return planned.runs_dir / LOGS / f"{planned.name}.failed"


def check_settings(study: Study, runs: Sequence[PlannedRun] | None = None) -> None:
    """Reject a folder with runs that were made with other settings: their results are not this study's.

    Args:
        runs: those to look at; all of the study's by default.

    Raises:
        UserError: it names the first such run and its fields.
    """
    for planned in study.runs if runs is None else runs:
        path = planned.folder
        if not (path / "config.yaml").is_file():
            continue
        differing = diff_fields(planned.run, load_run_config(path / "config.yaml"))
        if differing:
            listed = ", ".join(
                f"{key} {made} (now {now})" for key, (now, made) in list(differing.items())[:4]
            )
            raise UserError(
                f"study: {path} was made with {listed}; give another --out, or move that folder "
                "elsewhere to run it again"
            )
