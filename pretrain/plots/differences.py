"""Describes differences between runs, such as other data, that make a comparison of their results unfair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from model.errors import UserError
from pretrain.checkpoint.finder import checkpoint_path, checkpoint_steps
from pretrain.checkpoint.state import TrainingState, read_state
from pretrain.data.same_tokenizer import tokenizer_difference
from pretrain.data.sequences import parse_blend
from pretrain.data.tokenizer import load_tokenizer
from pretrain.utils.format import describe_several, name_folders


@dataclass(frozen=True)
class RunDifferences:
    """Differences between runs whose results are shown together."""

    lines: list[str]
    """A line for each difference; empty when only what is compared differs."""
    tokenizers: bool
    """Whether the tokenizers differ: losses in nats per token are not comparable then, bits per byte are."""
    data: bool
    """Whether the runs were trained on different data, so that their held-out texts also differ."""


@dataclass(frozen=True)
class _ComparedRun:
    name: str
    folder: Path
    state: TrainingState | None
    step: int | None


def run_differences(folders: Sequence[Path], steps: Sequence[int] | None = None) -> RunDifferences:
    """Compare data, tokenizer, validation windows, document mask and step of runs, by their newest
    checkpoints.

    Models, seeds and rates are what runs are compared for, so they are not mentioned.

    Args:
        steps: the step of each run's results; None: steps are not compared.
    """
    if len(folders) < 2:
        return RunDifferences([], False, False)
    runs = [
        _ComparedRun(name, folder, _state(folder), steps[index] if steps else None)
        for index, (name, folder) in enumerate(zip(name_folders(folders), folders, strict=True))
    ]
    runs_with_state = [run for run in runs if run.state is not None]
    names: dict[str, str] = {}
    tokenizers = _tokenizers(runs_with_state)
    data = _describe_spread("data", runs_with_state, partial(_data, names))
    lines = [
        *tokenizers,
        *data,
        *_describe_spread("validation windows", runs_with_state, partial(_windows, names)),
        *_describe_spread("document masks", runs_with_state, _mask),
        *_describe_spread("steps", runs, lambda run: None if run.step is None else f"{run.step:,}"),
    ]
    unknown = [run.name for run in runs if run.state is None]
    if unknown:
        lines.append(f"no checkpoint says what {', '.join(unknown)} was trained on")
    return RunDifferences(lines, bool(tokenizers), bool(data))


def _state(folder: Path) -> TrainingState | None:
    steps = checkpoint_steps(folder)
    try:
        return read_state(checkpoint_path(folder, steps[-1])) if steps else None
    except UserError:
        return None


def _describe_spread(
    what: str, runs: Sequence[_ComparedRun], value: Callable[[_ComparedRun], str | None]
) -> list[str]:
    """A line that says which runs have which value, if there are several; runs without one are left out."""
    found = describe_several((run.name, value(run)) for run in runs)
    return [f"{what} differ: {found}"] if found else []


def _tokenizers(runs: Sequence[_ComparedRun]) -> list[str]:
    """A line for every run whose tokenizer is another than that of the first."""
    lines = []
    for run in runs[1:]:
        hashes = [each.state.data.tokenizer if each.state else "" for each in (runs[0], run)]
        if "" in hashes or hashes[0] == hashes[1]:
            continue
        try:
            one, other = (load_tokenizer(_find_newest(each.folder) / "tokenizer") for each in (runs[0], run))
            difference = tokenizer_difference(one, other)
        except UserError as error:
            difference = str(error)
        if difference:
            lines.append(
                f"tokenizers differ: {run.name} from {runs[0].name} ({difference}); losses in nats per "
                "token do not "
                "compare, bits per byte do"
            )
    return lines


def _find_newest(folder: Path) -> Path:
    return checkpoint_path(folder, checkpoint_steps(folder)[-1])


def _data(names: dict[str, str], run: _ComparedRun) -> str | None:
    return _corpora(names, run, run.state.run.get("data"), "data") if run.state else None


def _windows(names: dict[str, str], run: _ComparedRun) -> str | None:
    if run.state is None or not run.state.run:
        return None
    settings = run.state.run.get("validation", {})
    separate_data = settings.get("data") is not None
    corpora = _corpora(
        names,
        run,
        settings["data"] if separate_data else run.state.run.get("data"),
        "validation" if separate_data else "data",
    )
    if corpora is None:
        return None
    return f"{settings.get('sequences')} of {run.state.model.get('context_length')} tokens of {corpora}"


def _corpora(names: dict[str, str], run: _ComparedRun, spec: str | None, key: str) -> str | None:
    """Corpora with their shares, and the beginning of their content hashes.

    Args:
        names: by content, what it was called first: another folder may hold the same text. Added to.
    """
    contents = getattr(run.state.data, key) if run.state else None
    if not contents or spec is None:
        return None  # an imported model does not know its data
    given = ["builtin"] if spec == "builtin" else [Path(folder).name for folder, _ in parse_blend(spec)]
    shares = [f" x {share}" if len(contents) > 1 else "" for _, share in contents]
    return ", ".join(
        f"{names.setdefault(content, name)}{share} {content[:8]}"
        for name, share, (content, _) in zip(given, shares, contents, strict=False)
    )


def _mask(run: _ComparedRun) -> str | None:
    if run.state is None or not run.state.run:
        return None
    return "kept apart" if run.state.run.get("document_mask") else "in one another's sight"
