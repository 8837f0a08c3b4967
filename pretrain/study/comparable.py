"""What differs between runs besides their settings: validation text, tokenizer, code, device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pretrain.study.results import RunResult, shorten_names
from pretrain.utils.format import describe_several

NOTED: dict[str, Callable[[RunResult], object]] = {
    "context length": lambda run: run.planned.run.build_model_config().context_length,
    "document mask": lambda run: run.planned.run.document_mask,
    "version of the code": lambda run: run.world and ", ".join(run.world.code),
    "kind of device": lambda run: run.world and run.world.device,
    "dtype": lambda run: run.world and run.world.dtype,
    "version of torch": lambda run: run.world and run.world.versions.get("torch"),
    "number of ranks": lambda run: run.world and run.world.ranks,
    # On GPUs the number of threads changes no result.
    "CPU threads": lambda run: run.world.threads if run.world and run.world.device == "cpu" else None,
}
"""Values that should be one."""


def notes_on(runs: Sequence[RunResult]) -> list[str]:
    """What a reader should know of the runs: sentences without their full stop."""
    notes = [
        f"the runs differ in {what}: {found}"
        for what, value in NOTED.items()
        if (found := list_values(runs, value))
    ]
    lost = [run.planned.name for run in runs if run.state == "finished" and not run.saved]
    if lost:
        notes.append(
            f"finished runs without a checkpoint ({shorten_names(lost)}): their text, tokenizer and code "
            "were not checked"
        )
    return notes


def list_values(runs: Sequence[RunResult], value: Callable[[RunResult], object]) -> str:
    """Values with names of runs; empty for one value. Runs without a checkpoint, or with None, count not."""
    return describe_several(((run.planned.name, value(run)) for run in runs if run.saved), shorten_names)


def tokenizer(run: RunResult) -> str | None:
    """The beginning of its hash."""
    return run.saved.data.tokenizer[:8] if run.saved else None


def parameters(run: RunResult) -> str | None:
    """Of its model; None where heads grow."""
    model = None if run.planned.grows else run.model_config
    return f"{model.num_parameters():,}" if model else None


def validation_text(run: RunResult) -> str:
    """The corpora whose held-out text a run was measured on (hash and weight), and how many windows."""
    corpora = (run.saved.data.validation or run.saved.data.data or []) if run.saved else []
    named = ", ".join(f"{content[:8]} x {weight}" for content, weight in corpora)
    return f"{run.planned.run.validation.sequences} windows of {named}"
