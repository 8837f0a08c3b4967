"""A study's results in one small file to keep: its definition, its machine, and the losses of every run.

``head-schedules study record`` writes ``results/NAME.json``. Reports, notebooks, and the numbers and pictures
of the documentation take such a file in place of a study's folder. ``study run`` trains what it lacks, on any
machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from model.declared import declared, from_dict, to_dict
from model.errors import UserError, quote
from pretrain.checkpoint.state import DataIdentity, TrainingState, WorldRecord
from pretrain.metrics.file import NON_FINITE, encode
from pretrain.study.planned import PlannedRun, Study
from pretrain.study.planning import list_parts, parse_study
from pretrain.study.register import Registered, read_registered
from pretrain.study.results import RunResult, State, differing_settings, load_results
from pretrain.study.tuning import Tuned, read_tuned
from pretrain.utils.files import write_atomically
from pretrain.utils.format import shorten_names
from pretrain.utils.parsing import format_yaml, parse_yaml, read_json

METRICS = ("step", "tokens", "seconds", "val_loss", "val_bpb", "val_accuracy", "train_loss")
GROUPS = ("growth/heads/", "evaluation/")
"""Beginnings of further metrics that are kept."""


@declared()
class Origin:
    """What runs depend on besides their settings."""

    data: DataIdentity
    world: WorldRecord | None


@declared()
class RunRecord:
    """What is kept of a run."""

    state: State
    rows: dict[str, list[Any]]
    """Columns of the rows of metrics.jsonl that have a validation, scores or head counts, and of the last."""
    origin: int | None = None
    """Its place in the archive's origins; None without a checkpoint."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of the newest checkpoint's model that are not those of its settings."""
    failure: str = ""


@declared()
class Archive:
    """The file's content."""

    name: str
    study: dict[str, Any]
    """The study file, with what it extends."""
    machine: str
    """What the runs were trained on, in words; several are joined by semicolons."""
    origins: list[Origin]
    runs: dict[str, RunRecord]
    """By name: of the study, and of its pilots."""
    registered: Registered | None = None
    tuned: dict[str, Tuned] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorded:
    """An archive's results, for a study that was read from it."""

    archive: Archive
    where: str
    """Begins messages."""

    def result(self, planned: PlannedRun) -> RunResult | None:
        """What the archive has of a run of the study or of its pilots; None if that run is not in it."""
        if (record := self.archive.runs.get(planned.name)) is None:
            return None
        rows = [
            {
                key: NON_FINITE.get(value, value) if isinstance(value, str) else value
                for key, value in zip(record.rows, values, strict=True)
                if value is not None
            }
            for values in zip(*record.rows.values(), strict=True)
        ]
        saved = None
        if record.origin is not None:
            model = planned.run.build_model_config().to_json() | record.model
            origin = to_dict(self.archive.origins[record.origin])
            saved = from_dict(TrainingState, origin | {"model": model}, self.where)
        return RunResult(planned, record.state, rows, saved, record.failure)


def write_archive(study: Study, path: Path) -> None:
    """Write the results of a study's folder, and of the archive that it was read from.

    Raises:
        UserError: no run is finished, or the file has finished runs that would be lost.
        OSError: the file cannot be written.
    """
    everything = [run for part in reversed(list_parts(study)) for run in load_results(part)]
    results = [run for run in everything if run.state != "missing"]
    finished = {run.planned.name for run in results if run.state == "finished"}
    if not finished:
        raise UserError(f"study: no run of {study.folder} is finished; {study.command('run')}")
    tuned = tuple(f"{study.variants[name].folder}@" for name in study.tuned)
    pilots = [run.planned.name for run in everything[len(study.runs) :] if run.state == "missing"]
    if lost := [name for name in pilots if name.startswith(tuned)]:
        valid = "of a study that continues a recorded one, give the recorded file"
        raise UserError(
            f"study: {study.folder} lacks pilots by which it was tuned, {shorten_names(lost)}; {valid}"
        )
    # What the study does not name any more, such as pilots of a value that was taken out, stays.
    recorded = study.recorded.archive if study.recorded else None
    named = {run.planned.name for run in everything}
    unnamed = {name: run for name, run in recorded.runs.items() if name not in named} if recorded else {}
    if path.exists() and (lost := [name for name in _list_lost(path, results) if name not in unnamed]):
        valid = f"head-schedules study record {path} adds to it, --to another file keeps both"
        what = f"finished runs that would be lost, {shorten_names(lost)}"
        raise UserError(f"to: {quote(str(path))} has {what}; {valid}")
    machines = [name for name in recorded.machine.split("; ") if name] if recorded else []
    for run in results:
        hardware = run.world.hardware if run.world else ""
        if hardware and not any(hardware.startswith(name) for name in machines):
            machines.append(hardware)
    origins: list[Origin] = []
    runs = {}
    for run in results:
        last = [row for row in run.rows if study.file.measure in row][-study.file.last_validations :]
        record = RunRecord(run.state, dict(_columns(run.rows, last)), failure=run.failure)
        if run.saved:
            origin = Origin(run.saved.data, run.saved.world)
            if origin not in origins:
                origins.append(origin)
            planned = run.planned.run.build_model_config().to_json()
            model = {key: value for key, value in run.saved.model.items() if planned.get(key) != value}
            record = replace(record, origin=origins.index(origin), model=model)
        runs[run.planned.name] = record
    for name, record in unnamed.items():
        if recorded and record.origin is not None:
            origin = recorded.origins[record.origin]
            if origin not in origins:
                origins.append(origin)
            record = replace(record, origin=origins.index(origin))
        runs[name] = record
    file, registered = parse_yaml(study.text, "study"), read_registered(study)
    made = Archive(study.name, file, "; ".join(machines), origins, runs, registered, dict(study.tuned))
    plain = to_dict(made)
    lines = [f"{json.dumps(name)}: {json.dumps(run)}" for name, run in plain.pop("runs").items()]
    head = json.dumps(plain, indent=1, ensure_ascii=False).removesuffix("\n}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # A line for each run, so that a difference can be read.
    write_atomically(path, head + ',\n "runs": {\n  ' + ",\n  ".join(lines) + "\n }\n}\n")


def _list_lost(path: Path, results: Sequence[RunResult]) -> list[str]:
    """The finished runs of the archive *path* that are not among *results*, or there with other settings."""
    made = {run.planned.name: run.planned.run for run in results if run.state == "finished"}
    there = read_archive(path)
    planned = {each.name: each for part in list_parts(there) for each in part.runs}
    return [
        name
        for name, run in there.recorded.archive.runs.items()
        if run.state == "finished"
        and (name not in made or (name in planned and differing_settings(planned[name].run, made[name])))
    ]


def read_archive(path: Path, out: Path | None = None) -> Study:
    """The study of an archive, with its results. What it lacks and what is made of it is in *out*, by default
    ``runs/NAME``.

    Raises:
        UserError: the file is not an archive.
    """
    where = f"study: {path}"
    archive = from_dict(Archive, read_json(path, "study"), where)
    for name, run in archive.runs.items():
        lengths = {len(column) for column in run.rows.values()}
        if len(lengths) > 1 or (run.rows and "step" not in run.rows):
            raise UserError(f"{where}: runs.{name}.rows: give columns of one length, step among them")
        if run.origin is not None and not 0 <= run.origin < len(archive.origins):
            valid = f"give one of the {len(archive.origins)} origins, from 0"
            raise UserError(f"{where}: runs.{name}.origin: {run.origin} is not valid; {valid}")
    text, folder = format_yaml(archive.study), out or Path("runs") / archive.name

    def parse(tuned: Mapping[str, Tuned]) -> Study:
        return parse_study(text, archive.name, folder, where, source=str(path), tuned=tuned)

    # The record's choice is that of its runs. The folder's is for what the record has not tuned, or tuned
    # among other values than the study has now.
    local = read_tuned(folder)
    found = local | archive.tuned
    study = parse(found)
    if newer := {name: local[name] for name in study.untuned if name in local}:
        study = parse(found | newer)
    return replace(study, recorded=Recorded(archive, where))


def _columns(rows: list[dict[str, Any]], measured: list[dict[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """The columns of those of *rows* that are kept; among them the ones that a result was *measured* on."""
    kept = [
        row
        for row in rows
        if row is rows[-1] or row in measured or any(key.startswith(("val_", *GROUPS)) for key in row)
    ]
    for key in dict.fromkeys(key for row in kept for key in row):
        if key in METRICS or key.startswith(GROUPS):
            yield key, [encode(row.get(key)) for row in kept]
