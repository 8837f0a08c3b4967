"""What differs between runs besides their settings: validation text, tokenizer, code, device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pretrain.study.results import RunResult, some_names
from pretrain.utils.text import several


@dataclass(frozen=True)
class Differences:
    """What differs between runs; each text lists values with names of runs; empty for one value."""

    texts: str
    """The texts that they were validated on: runs of different ones are not compared."""
    tokenizers: str
    notes: list[str]
    """What a reader should know: sentences without their full stop."""

    def measure(self, asked: str) -> str:
        """What to compare: *asked*, or bits per byte for losses of several tokenizers."""
        return "val_bpb" if self.tokenizers and asked != "val_accuracy" else asked


NOTED: dict[str, Callable[[RunResult], object]] = {
    "the runs are validated on windows of several lengths": lambda run: (
        f"{run.planned.run.build_model_config().context_length:,} tokens"
    ),
    "the documents of a window are kept apart in some runs": lambda run: (
        "kept apart" if run.planned.run.document_mask else "not kept apart"
    ),
    "the runs are of several versions of the code": lambda run: run.world and ", ".join(run.world.code),
    "the runs are of several kinds of device": lambda run: run.world and run.world.device,
    "the runs are of several dtypes": lambda run: run.world and run.world.dtype,
    "the runs are of several versions of torch": lambda run: run.world and run.world.versions.get("torch"),
    "the runs had several numbers of ranks": lambda run: run.world and run.world.ranks,
    # On GPUs the number of threads changes no figure.
    "the runs had different CPU thread counts": lambda run: (
        run.world.threads if run.world and run.world.device == "cpu" else None
    ),
}
"""Sentences, and the values that should be one; runs with None, or without a checkpoint, are left out."""


def differences_between(runs: Sequence[RunResult]) -> Differences:
    """Compare what the newest checkpoints of *runs* say; runs without one are only counted."""
    tokenizers = _listed(runs, lambda run: run.saved and run.saved.data.tokenizer[:8])
    notes = [f"tokenizers differ, so bits per byte are compared: {tokenizers}"] * bool(tokenizers)
    notes += [f"{what}: {found}" for what, value in NOTED.items() if (found := _listed(runs, value))]
    lost = [run.planned.name for run in runs if run.state == "finished" and not run.saved]
    if lost:
        notes.append(
            f"no checkpoint of {len(lost)} finished run{'s' * (len(lost) != 1)} ({some_names(lost)}), so "
            "their text, tokenizer and code were not checked"
        )
    return Differences(_listed(runs, _validation_text), tokenizers, notes)


def _listed(runs: Sequence[RunResult], value: Callable[[RunResult], object]) -> str:
    return several(((run.planned.name, value(run)) for run in runs if run.saved), some_names)


def _validation_text(run: RunResult) -> str:
    """The corpora whose held-out text a run was measured on (hash and weight), and how many windows."""
    corpora = (run.saved.data.validation or run.saved.data.data or []) if run.saved else []
    listed = ", ".join(f"{content[:8]} x {weight}" for content, weight in corpora)
    return f"{run.planned.run.validation.sequences} windows of {listed}"
