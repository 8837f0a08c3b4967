"""Measures checkpoints of finished or stopped runs on one machine, whatever number of ranks wrote them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.errors import UserError, quote
from pretrain.checkpoint.finder import checkpoint_steps
from pretrain.checkpoint.sharded_files import UnshardedCheckpoint
from pretrain.config.run_config import split_run_name
from pretrain.data.corpus import Corpus
from pretrain.data.sequences import parse_blend
from pretrain.diagnostics.forward import ForwardProbe, lower_layers
from pretrain.diagnostics.weights import (
    Update,
    displacement,
    displacement_row,
    initial_weights,
    kept_path,
    projections,
    read_kept,
    update_norm,
    update_row,
)
from pretrain.metrics.file import read_metrics
from pretrain.optim.muon import is_muon
from pretrain.run.data import RunData
from pretrain.run.saved import SavedRun
from pretrain.runtime.world import single_world
from pretrain.utils.format import print_lines
from pretrain.utils.parsing import parse_fraction

MICRO_BATCH = 4
"""Windows that are read at a time."""


@dataclass(frozen=True)
class RunMeasures:
    """The values measured of one run."""

    name: str
    group: str
    """The name without its seed: runs of one group are repetitions."""
    seed: str
    rows: list[dict[str, Any]]
    """In order of step: the rows of its metrics.jsonl, merged with the values of the checkpoints measured
    now."""
    last: dict[str, Any]
    """The values of the last checkpoint that was measured."""
    num_layers: int


def measure_run(
    folder: Path, data: str | None = None, sequences: int = 32, steps: str = "last"
) -> RunMeasures:
    """Measure checkpoints of a run on held-out windows, and print a line for each.

    Args:
        folder: the run's folder.
        data: corpora as in a run's ``data``; None is the run's own.
        sequences: windows that are read.
        steps: which checkpoints: "last", "all", or their steps, such as "100,200".

    Raises:
        UserError: no run, no such checkpoint, no data, another tokenizer.
    """
    name = Path(os.path.realpath(folder)).name  # of ".", and of what a link names
    measured: dict[int, dict[str, Any]] = {}
    replaced: set[str] = set()
    windows: np.ndarray | None = None
    features: dict[int, Tensor] = {}
    for asked in _parse_steps(folder, steps):
        source = SavedRun.open(folder, asked)
        if windows is None:
            windows = _windows(source, data, sequences)
        forward, others, features = _measure(source, windows, features)
        step = source.state.step
        last = measured[step] = {"step": step, "tokens": source.state.tokens, **forward, **others}
        # A curve is of one text, and a drift between checkpoints as far apart.
        replaced |= {key for key in forward if data is not None or "feature_drift" in key}
        print_lines(f"{name}: step {step:,} measured on {len(windows)} windows")
    rows: dict[int, dict[str, Any]] = {}
    for row in read_metrics(folder):
        rows[row["step"]] = {key: value for key, value in row.items() if key not in replaced}
    for step, found in measured.items():
        rows.setdefault(step, {}).update(found)
    in_order = [rows[step] for step in sorted(rows)]
    return RunMeasures(name, *split_run_name(name), in_order, last, source.model.num_layers)


def _parse_steps(folder: Path, steps: str) -> Sequence[int | None]:
    if steps == "last":
        return [None]
    if steps == "all":
        return checkpoint_steps(folder) or [None]
    try:
        return sorted({int(step) for step in steps.split(",")})
    except ValueError:
        raise UserError(f"steps: {steps!r} is not valid; give last, all, or steps such as 100,200") from None


def open_own_data(source: SavedRun) -> RunData:
    """The corpora that the run was trained on, as far as they are on this machine, with their shares.

    Raises:
        UserError: none of them is, or the checkpoint gives a share that is not a number above zero.
    """
    shares = source.state.data.data or []
    weights = {content: parse_fraction(share) or Fraction(0) for content, share in shares}
    if any(weight <= 0 for weight in weights.values()):
        raise UserError(
            f"checkpoint: state.json has the shares {quote(shares)} of data; give numbers above zero"
        )
    corpora = [(corpus, weights[corpus.meta.content_hash]) for corpus in source.corpora()]
    if not corpora:
        raise UserError(
            f"data: no corpus that {str(source.run_folder)!r} was trained on is on this machine "
            f"({source.state.run.get('data', 'builtin')}, unchanged); put it where the run read it"
        )
    return RunData(corpora)


def _windows(source: SavedRun, data: str | None, sequences: int) -> np.ndarray:
    given = data and [(Corpus.open(folder, source.tokenizer), weight) for folder, weight in parse_blend(data)]
    held_out = RunData(given) if given else open_own_data(source)
    return held_out.validation_windows(source.model.context_length, sequences)


def _measure(
    source: SavedRun, windows: np.ndarray, before: dict[int, Tensor]
) -> tuple[dict[str, Any], dict[str, Any], dict[int, Tensor]]:
    """The values of one checkpoint that the windows decide, the others, and its features for the drift to the
    next."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = source.load_model().to(device)
    probe = ForwardProbe(source.model, windows, MICRO_BATCH, single_world(device))
    result = probe.run(network, lower_layers(source.model.num_layers))
    del network
    row: dict[str, Any] = {}
    checkpoint, state = source.checkpoint, source.state
    names = projections(source.model)
    references = {"initial": None, "release": _release_weights(source, names)}
    if state.from_seed and state.run:
        dtype = torch.bfloat16 if state.world and state.world.dtype == "bf16" else torch.float32
        references["initial"] = initial_weights(source.model, checkpoint.specs, state.run["seed"], dtype)
    for reference, weight in references.items():
        if weight is not None:
            moved = {name: displacement(checkpoint.parameter(name), weight(name)) for name in names}
            row |= displacement_row(moved, reference)
    row |= update_row(list(checkpoint.groups), _updates(checkpoint))
    checkpoint.release()
    return result.row(before), row, result.features


def _release_weights(source: SavedRun, names: list[str]) -> Callable[[str], Tensor] | None:
    """W_Q and W_K at the release, if that is no later than the checkpoint."""
    files = (source.run_folder / "release").glob("step_*.safetensors")
    steps = [int(path.stem[5:]) for path in files if path.stem[5:].isdecimal()]
    past_steps = [step for step in steps if step <= source.state.step]
    if not past_steps:
        return None
    return read_kept(kept_path(source.run_folder, max(past_steps)), source.checkpoint.specs, names)


def _updates(checkpoint: UnshardedCheckpoint) -> Iterator[Update]:
    """What the last update did to each parameter. Left out are those without an update, and those of Muon,
    whose updates do not follow from the momentum alone."""
    for name, group in checkpoint.groups.items():
        if is_muon(group.settings):
            continue
        for parameter in group.parameters:
            state = checkpoint.optimizer_state(parameter)
            if state["step"]:
                moved = update_norm(state["exp_avg"], state["exp_avg_sq"], state["step"], group.settings)
                weight = checkpoint.parameter(parameter)
                yield Update(name, moved, weight, weight.numel())
