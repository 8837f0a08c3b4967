"""``python -m pretrain.growth report runs/NAME``: what every head is worth, and how a grown run's heads came
about."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from model.errors import UserError, run_command, shown
from model.heads import HeadSchedule
from model.presets import preset, preset_names
from pretrain.config.command_line import CommandParser as Parser
from pretrain.config.command_line import load_run_config
from pretrain.utils.files import write_atomically
from pretrain.utils.parsing import parse_fraction
from pretrain.utils.progress import ProgressLine

if TYPE_CHECKING:
    import numpy as np

    from model.config import ModelConfig
    from pretrain.config.run_config import RunConfig
    from pretrain.growth.record import GrowthState
    from pretrain.growth.report.law import Prediction
    from pretrain.growth.report.worth import HeadWorths
    from pretrain.run.saved import SavedRun


def build_parser() -> Parser:
    """Build the parser of the command line."""
    parser = Parser(
        prog="python -m pretrain.growth",
        description="Heads that grew, and what heads are worth.",
        allow_abbrev=False,
    )
    add, what = (
        parser.add_argument,
        "the worth of every head of a run, and predicted head counts of a grown one",
    )
    add("command", choices=["report"], metavar="report", help=what)
    add("run", type=Path, metavar="RUN", help="a run's folder, such as runs/NAME")
    add("--step", type=int, metavar="N", help="which checkpoint (default: the newest valid one)")
    add("--sequences", type=int, default=32, metavar="N", help="held-out windows (default: 32)")
    add("--out", type=Path, metavar="FOLDER", help="where to write (default: growth/ of the run)")
    return parser


def run_growth(arguments: Sequence[str]) -> None:
    """Measure the run of the command line, print the report and write it.

    Raises:
        UserError: bad input, a run that cannot be read, or no held-out text of it on this machine.
    """
    options = build_parser().parse_args(arguments)
    if options.sequences < 1:
        raise UserError(f"sequences: {options.sequences} is not valid; give a positive number")
    # Imported here: these load torch and DeepSpeed, and a mistyped flag should be answered at once.
    from pretrain.engine.quiet import quiet_libraries

    quiet_libraries()
    import torch

    from pretrain.growth.record import GrowthState
    from pretrain.growth.report.figures import draw_growth, draw_worths
    from pretrain.growth.report.law import predict
    from pretrain.growth.report.text import law_lines, schedule_lines, worth_lines
    from pretrain.growth.report.worth import measure_worths
    from pretrain.growth.settings import most_heads
    from pretrain.metrics.file import FILE_NAME, read_metrics
    from pretrain.run.saved import SavedRun

    source = SavedRun.open(options.run, options.step)
    model, step = source.model, source.state.step
    record = GrowthState.of(source.state)
    inputs, labels, starts, text = held_out(source, options.sequences)
    out = _folder(options)
    run = _settings(source)
    lines = [f"model     {options.run.name}, step {step:,}: {model.summary()}"]
    lines += schedule_lines(model.heads, other_schedules(model, run))
    print("\n".join(lines), flush=True)
    network = source.load_model().to("cuda" if torch.cuda.is_available() else "cpu")
    with ProgressLine("heads removed", "pass") as progress:
        worths = measure_worths(network, inputs, labels, starts, progress=progress)
    predictions = predict(record, model.heads) if record else []
    written = [draw_worths(worths, out / "worths.png")]
    if record:
        metrics = source.run_folder / FILE_NAME
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


def _settings(source: SavedRun) -> RunConfig | None:
    """The run's; None where they cannot be read here."""
    with suppress(UserError):
        return load_run_config(source.run_folder / "config.yaml")
    return None


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
    from pretrain.classification.examples import held_out_examples
    from pretrain.run.data import RunData

    shares = source.state.data.data or []
    weights = {content: parse_fraction(share) or Fraction(0) for content, share in shares}
    if not all(weight > 0 for weight in weights.values()):
        raise UserError(
            f"checkpoint: state.json has the shares {shown(shares)} of data; give numbers above zero"
        )
    corpora = source.corpora()
    if not corpora:
        raise UserError(
            f"data: no corpus that {str(source.run_folder)!r} was trained on is on this machine "
            f"({source.state.run.get('data', 'builtin')}, unchanged); put it where the run read it"
        )
    length = source.model.context_length
    if source.model.classes is not None:
        inputs, labels = held_out_examples(corpora[0], length, sequences)
        return inputs, labels, None, f"held-out examples of {corpora[0].name}"
    data = RunData([(corpus, weights[corpus.meta.content_hash]) for corpus in corpora])
    windows = data.validation_windows(length, sequences)
    mask = source.state.run.get("document_mask", False)
    starts = data.validation_documents(length, sequences) if mask else None
    names = ", ".join(corpus.name for corpus in corpora)
    missing = len(weights) - len({corpus.meta.content_hash for corpus in corpora})
    rest = f" ({missing} of the run's {len(weights)} corpora not on this machine)" if missing else ""
    return windows[:, :-1], windows[:, 1:], starts, f"held-out text of {names}{rest}"


def figures(
    source: SavedRun,
    worths: HeadWorths,
    record: GrowthState | None,
    predictions: Sequence[Prediction],
    text: str,
) -> dict[str, Any]:
    """The report as one JSON object; losses and worths in nats per token."""
    from pretrain.growth.report.text import direction

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


def _folder(options: argparse.Namespace) -> Path:
    """The folder to write, made before the work begins."""
    out: Path = options.out or options.run / "growth"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out: cannot write {str(out)!r} ({error.strerror}); give a folder") from None
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(run_growth, arguments)
