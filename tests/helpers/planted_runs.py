"""Results of a study's runs without training: as objects, or planted in folders."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import yaml

from model.config import ModelConfig
from pretrain.checkpoint.finder import checkpoint_path
from pretrain.checkpoint.state import DataIdentity, TrainingState, WorldRecord
from pretrain.metrics.file import MetricsFile
from pretrain.study.planned import PlannedRun, Study
from pretrain.study.planning import parse_study
from pretrain.study.results import LOGS, RunResult, State

DATA = DataIdentity(tokenizer="0f0f0f0f0f0f", data=[("c0ffee00c0ffee00", "1")])
WORLD = WorldRecord(hardware="a CPU, 4 cores", code=["abc123abc123"], versions={"torch": "2.7.0"})


def planned_study(folder: Path, **values: Any) -> Study:
    """The study of a file with these keys, without those that are None, whose runs are in *folder*."""
    given = {key: value for key, value in values.items() if value is not None}
    return _parsed(yaml.safe_dump(given, sort_keys=False), folder)


@functools.cache  # to read the settings of every variant takes a while
def _parsed(text: str, folder: Path) -> Study:
    return parse_study(text, folder.name, folder)


def planted_rows(
    planned: PlannedRun, final: float, points: int = 8, **at_the_end: Any
) -> list[dict[str, Any]]:
    """Rows at *points* equal distances, of a validation loss that falls to *final* as a power of the tokens.

    Args:
        final: validation loss of the last row, in nats; three times as much as in bits per byte.
        at_the_end: more values of the last row.
    """
    run = planned.run
    rows = []
    for point in range(1, points + 1):
        step = run.steps * point // points
        loss = final + 0.8 * ((step / run.steps) ** -0.4 - 1)
        row = {
            "step": step,
            "tokens": step * run.global_batch_tokens,
            "train_loss": loss,
            "val_loss": loss,
            "val_bpb": loss / 3,
            "tokens_per_second": 9000.0 + 100 * point,
        }
        rows.append(row)
    rows[-1] |= at_the_end
    return rows


def result(
    planned: PlannedRun,
    rows: list[dict[str, Any]],
    *,
    model: ModelConfig | None = None,
    data: dict[str, Any] | None = None,
    world: dict[str, Any] | None = None,
    failure: str = "",
) -> RunResult:
    """What load_results reads of a run that is as far as its rows: finished, if the last is of its last step.

    Args:
        rows: none for a run that has not begun.
        model: of its checkpoint; by default the run's, with a vocabulary of 2,048.
        data: replaces fields of DATA.
        world: replaces fields of WORLD.
        failure: what ended its last attempt.
    """
    if not rows:
        return RunResult(planned, "missing")
    saved = TrainingState(
        step=rows[-1]["step"],
        tokens=rows[-1]["tokens"],
        run=planned.run.to_dict(),
        model=(model or planned.run.build_model_config(vocab_size=2048)).to_json(),
        data=dataclasses.replace(DATA, **(data or {})),
        world=dataclasses.replace(WORLD, **(world or {})),
    )
    unfinished: State = "failed" if failure else "unfinished"
    state = "finished" if rows[-1]["step"] == planned.run.steps else unfinished
    return RunResult(planned, state, rows, saved, failure)


def plant(found: RunResult) -> None:
    """Write what a run has left into its folder."""
    planned, path = found.planned, found.planned.run.folder
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(planned.run.to_yaml())
    file = MetricsFile(path / "metrics.jsonl")
    for row in found.rows:
        file.append(row["step"], {key: value for key, value in row.items() if key != "step"})
    file.close()
    if found.failure:
        (path.parent / LOGS).mkdir(exist_ok=True)
        (path.parent / LOGS / f"{planned.name}.failed").write_text(f"{found.failure}\n")
    if found.saved:
        checkpoint = checkpoint_path(path, found.step)
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(found.saved.to_json())
        (path / "latest").write_text(f"{checkpoint.name}\n")
