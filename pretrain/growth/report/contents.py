"""What a growth report holds: worths of heads on held-out text, schedules, predictions; printed, drawn and
written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic_core import to_json

from model.config import ModelConfig
from model.errors import UserError
from model.heads import HeadSchedule
from model.presets import preset, preset_names
from pretrain.classification.examples import held_out_examples
from pretrain.config.command_line import load_run_config
from pretrain.config.run_config import RunConfig
from pretrain.diagnostics.measure import own_data
from pretrain.growth.record import GrowthState
from pretrain.growth.report.figures import draw_growth, draw_worths
from pretrain.growth.report.law import Prediction, predict
from pretrain.growth.report.text import direction, law_lines, schedule_lines, worth_lines
from pretrain.growth.report.worth import HeadWorths, measure_worths
from pretrain.growth.settings import most_heads
from pretrain.metrics.file import FILE_NAME, read_metrics
from pretrain.run.saved import SavedRun
from pretrain.utils.files import write_atomically
from pretrain.utils.progress import ProgressLine


def write_report(folder: Path, step: int | None, sequences: int, out: Path) -> None:
    """Measure a run, print the report, and write it with its pictures to *out*.

    Args:
        folder: the run's.
        step: of the checkpoint; None is the newest valid one.
        sequences: held-out windows that are read.

    Raises:
        UserError: a run that cannot be read, no held-out text of it on this machine, or *out* cannot be
            written.
    """
    source = SavedRun.open(folder, step)
    model, step = source.model, source.state.step
    record = GrowthState.of(source.state)
    inputs, labels, starts, text = held_out(source, sequences)
    try:
        out.mkdir(parents=True, exist_ok=True)  # before the work begins
    except OSError as error:
        raise UserError(f"out: cannot write {str(out)!r} ({error.strerror}); give a folder") from None
    run = None
    with suppress(UserError):  # where its settings cannot be read here
        run = load_run_config(folder / "config.yaml")
    lines = [f"model     {folder.name}, step {step:,}: {model.summary()}"]
    lines += schedule_lines(model.heads, other_schedules(model, run))
    print("\n".join(lines), flush=True)
    network = source.load_model().to("cuda" if torch.cuda.is_available() else "cpu")
    with ProgressLine("heads removed", "pass") as progress:
        worths = measure_worths(network, inputs, labels, starts, progress=progress)
    predictions = predict(record, model.heads) if record else []
    written = [draw_worths(worths, out / "worths.png")]
    if record:
        metrics = folder / FILE_NAME
        rows = [row for row in read_metrics(metrics) if row["step"] <= step] if metrics.is_file() else []
        written.append(draw_growth(record, rows, model.heads, step, out / "growth.png"))
        stopped_by = (run.growth.criterion, most_heads(run)) if run and run.growth.active else ()
        print("\n".join(law_lines(predictions, *stopped_by)))
    print("\n".join(worth_lines(worths, text)))
    report = figures(source, worths, record, predictions, text)
    # Numbers that are not finite, which JSON does not know, become null.
    written.append(out / "report.json")
    write_atomically(written[-1], to_json(report, indent=1, inf_nan_mode="null").decode() + "\n")
    print("wrote " + ", ".join(map(str, written)))


def other_schedules(model: ModelConfig, run: RunConfig | None) -> dict[str, HeadSchedule]:
    """By name, schedules to see the model's beside: Prism's for its depth and width, and that of the run's
    settings."""
    found = {
        name: preset(name).heads
        for name in preset_names()
        if name.startswith("prism-")
        and (preset(name).num_layers, preset(name).d_model) == (model.num_layers, model.d_model)
    }
    if run:
        with suppress(UserError):  # a preset that is a file, and not there
            found.setdefault(run.model, run.fixed_model_config().heads)
    return {name: heads for name, heads in found.items() if heads != model.heads}


def held_out(source: SavedRun, sequences: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray] | None, str]:
    """Held-out windows (or examples) of the run's corpora, shared among them by weight as in its validation.

    Returns:
        Inputs and labels [n, T] each; where documents begin in each, if the model was trained with a document
        mask; the corpora's names.

    Raises:
        UserError: no corpus of the run is on this machine.
    """
    data, length = own_data(source), source.model.context_length
    names = ", ".join(corpus.name for corpus, _ in data.corpora)
    if source.model.classes is not None:
        inputs, labels = held_out_examples(data.corpora[0][0], length, sequences)
        return inputs, labels, None, f"held-out examples of {names}"
    windows = data.validation_windows(length, sequences)
    mask = source.state.run.get("document_mask", False)
    starts = data.validation_documents(length, sequences) if mask else None
    of_run = {content for content, _ in source.state.data.data or []}
    missing = len(of_run - {corpus.meta.content_hash for corpus, _ in data.corpora})
    rest = f" ({missing} of the run's {len(of_run)} corpora not on this machine)" if missing else ""
    return windows[:, :-1], windows[:, 1:], starts, f"held-out text of {names}{rest}"


def figures(
    source: SavedRun,
    worths: HeadWorths,
    record: GrowthState | None,
    predictions: Sequence[Prediction],
    text: str,
) -> dict[str, Any]:
    """The report as one JSON object; losses and worths in nats per token."""
    heads = source.model.heads
    return {
        "run": str(source.run_folder),
        "step": source.state.step,
        "tokens": source.state.tokens,
        "heads": heads,
        "kv_heads": source.model.kv_heads or heads,
        "mean_heads": sum(heads) / len(heads),
        "correlation_with_depth": direction(heads),
        "text": text,
        "windows": worths.windows,
        "loss": worths.loss,
        "worths": worths.worths,
        "standard_errors": worths.errors,
        "removal": worths.curve,
        "removable_share": worths.removable.share,
        "growth": record,
        "predictions": [asdict(found) | {"relative_error": found.relative_error} for found in predictions],
    }
