"""Reads what a study's runs have left in their folders: state, metrics, and whose they are."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from model.config import ModelConfig
from model.errors import UserError, quote
from pretrain.config.run_config import RunConfig
from pretrain.config.sources import diff_settings, load_run_config
from pretrain.metrics.file import read_metrics
from pretrain.runtime.exit import DIVERGED
from pretrain.study.planned import STUDY_FILE, PlannedRun, Study
from pretrain.study.planning import NOT_THE_RUN, read_study
from pretrain.utils.files import read_text_or_nothing
from pretrain.utils.format import count_of, shorten_names

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

    @cached_property
    def head_history(self) -> dict[int, tuple[int, ...]]:
        """The heads of every layer from a step on: at step 0, at each check of growth, and at the last row;
        empty without a checkpoint."""
        if (model := self.model_config) is None:
            return {}
        found = {
            0: self.planned.run.build_model_config().heads if self.planned.run.growth.active else model.heads
        }
        for row in self.rows:
            counts: list[Any] = [row.get(f"growth/heads/layer_{layer}") for layer in range(model.num_layers)]
            if all(isinstance(count, int) for count in counts):
                found[row["step"]] = tuple(counts)
        return dict(sorted(({self.step: model.heads} | found).items()))

    @cached_property
    def training_flops(self) -> float | None:
        """FLOPs of all training steps: FLOPs per token of the model of the time, times tokens; None if not
        known. Heads that grow count from the check at which metrics.jsonl shows them."""
        rows = [row for row in self.rows if "tokens" in row]
        if self.model_config is None or not rows:
            return None
        flops, seen, per_token = 0.0, 0, 0.0
        for step, tokens in ((0, 0), *((row["step"], row["tokens"]) for row in rows)):
            flops += per_token * (tokens - seen)
            seen = tokens
            if heads := self.head_history.get(step):
                per_token = float(self.model_config.replace(heads=heads).flops_per_token())
        return flops

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
        valid = "give the folder of a study, such as runs/NAME (head-schedules study run makes it)"
        raise UserError(f"study: {quote(str(folder))} has no {STUDY_FILE}; {valid}")
    real = Path(os.path.realpath(folder))
    pilots = (real.parent / STUDY_FILE).is_file()
    name = f"{real.parent.name}-{real.name}" if pilots else real.name
    return read_study(
        path, folder, name, source=str(folder), settings=settings, check_runs=check_runs, pilots=pilots
    )


def load_results(study: Study) -> list[RunResult]:
    """Every run of the study in its order; "missing" are those that have not begun.

    Raises:
        UserError: a run was made with other settings than the study file has now.
    """
    from pretrain.checkpoint.finder import checkpoint_path, checkpoint_steps
    from pretrain.checkpoint.state import read_state

    check_settings(study)
    results = []
    for planned in study.runs:
        if (kept := recorded_result(study, planned)) is not None:
            results.append(kept)
            continue
        state, rows = run_state(study, planned)
        steps = checkpoint_steps(planned.folder)
        saved = read_state(checkpoint_path(planned.folder, steps[-1])) if steps else None
        results.append(RunResult(planned, state, rows, saved, failure(study, planned)))
    return results


def recorded_result(study: Study, planned: PlannedRun) -> RunResult | None:
    """What the study's archive has of a run, if it is finished there or has no folder here; None without an
    archive."""
    if study.recorded is None:
        return None
    then, now = study.recorded.archive.tuned.get(planned.variant), study.tuned.get(planned.variant)
    if then and now and (then.field, then.value) != (now.field, now.value):
        return None  # it was made with the value that was chosen then
    found: RunResult | None = study.recorded.result(planned)
    return found if found and (found.state == "finished" or not planned.folder.is_dir()) else None


def run_state(study: Study, planned: PlannedRun) -> tuple[State, list[dict[str, Any]]]:
    """How far a run is, and the rows of its metrics. Needs no torch.

    A run is finished when its last checkpoint is there and what is compared was measured at its last step.
    Whether it was made with the study's settings is not looked at (see check_settings).

    Raises:
        UserError: as read_metrics.
    """
    if (kept := recorded_result(study, planned)) is not None:
        return kept.state, kept.rows
    if not planned.folder.is_dir():
        return ("failed" if failure(study, planned) else "missing"), []
    rows = read_metrics(planned.folder, of_few=False)  # pairs have scores of the same items
    newest, steps = read_text_or_nothing(planned.folder / "latest", 1000), planned.run.steps
    measured = any(row["step"] == steps and study.file.measure in row for row in rows[-1:])
    if measured and newest == f"step_{steps:06d}":
        return "finished", rows
    return ("failed" if failure(study, planned) else "unfinished"), rows


def list_unfinished(study: Study) -> list[PlannedRun]:
    """The runs to train, in the study's order: those that are not finished. A pilot that diverged would do so
    again, so its value is out."""
    left = (run for run in study.runs if run_state(study, run)[0] != "finished")
    diverged = re.compile(rf"\bexit (code|status) {DIVERGED}\b")
    return [run for run in left if not (study.pilots and diverged.search(failure(study, run)))]


def task_names(study: Study) -> list[str]:
    """The run of each task number: those in its folder's TASKS_FILE, then the study's others in its order.

    Numbers stay when variants and seeds are added or taken out: a queued array trains what it was submitted
    for.
    """
    names = read_text_or_nothing(study.folder / TASKS_FILE).split()
    known = set(names)
    return names + [planned.name for planned in study.runs if planned.name not in known]


def describe_unnamed(study: Study) -> str:
    """A sentence on the runs in its folder of variants or seeds that were taken out of the study's file,
    without its full stop; empty without such runs."""
    found = {path.parent.name for path in study.folder.glob("*/config.yaml")}
    names = sorted(found - {planned.name for planned in study.runs})
    what = f"{count_of(len(names), 'run')} that the study does not name: {shorten_names(names)}"
    return f"the folder also holds {what}" if names else ""


def failure(study: Study, planned: PlannedRun) -> str:
    """A one-line message about what ended the run's last attempt; empty if nothing did."""
    if (kept := recorded_result(study, planned)) is not None:
        return kept.failure
    return read_text_or_nothing(failed_mark(planned))


def failed_mark(planned: PlannedRun) -> Path:
    """The file that says what ended the run's last attempt."""
    return planned.runs_dir / LOGS / f"{planned.name}.failed"


def differing_settings(run: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The settings of two runs that differ, by name, without those that no result depends on."""
    differing = diff_settings(run, other)
    return {
        key: values for key, values in differing.items() if NOT_THE_RUN.isdisjoint({key, key.split(".")[0]})
    }


def check_settings(study: Study, runs: Sequence[PlannedRun] | None = None) -> None:
    """Reject a folder with runs that were made with other settings: their results are not this study's.

    Args:
        runs: those to look at; all of the study's by default.

    Raises:
        UserError: it names the first such run and its fields.
    """
    for planned in study.runs if runs is None else runs:
        path = planned.folder / "config.yaml"
        if not path.is_file() or recorded_result(study, planned) is not None:
            continue
        differing = differing_settings(planned.run, load_run_config(path))
        if listed := [f"{key} {made} (now {now})" for key, (now, made) in differing.items()]:
            if planned.variant in study.untuned:  # it was, before tune or pilot_seeds changed
                valid = f"not tuned for the values that the file has now; {study.command('run')}"
                raise UserError(f"study: {planned.variant}: {valid}")
            valid = f"give the folder {study.folder} for those, or another out"
            if planned.variant in study.tuned and [*differing] == [study.tuned[planned.variant].field]:
                valid = "pilots have chosen again since: move away what was made before, or give another out"
            raise UserError(f"study: {planned.folder} was made with {', '.join(listed[:4])}; {valid}")
