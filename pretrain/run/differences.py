"""Whether figures of several runs compare: what differs between the runs beside what is compared, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from model.errors import UserError
from pretrain.checkpoint.finder import checkpoint_path, checkpoint_steps
from pretrain.checkpoint.state import TrainingState, read_state
from pretrain.data.blend import parse_blend
from pretrain.data.same_tokenizer import tokenizer_difference
from pretrain.data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class RunDifferences:
    """What differs between runs whose figures stand side by side."""

    lines: list[str]
    """What a reader must know, a line each; empty when nothing differs but what is compared."""
    tokenizers: bool
    """Whether the tokenizers differ: losses in nats per token do not compare then, bits per byte do."""
    data: bool
    """Whether the runs were trained on different data, so that their held-out texts differ, too."""


@dataclass(frozen=True)
class _Known:
    name: str
    folder: Path
    state: TrainingState | None
    step: int | None


def run_differences(folders: Sequence[Path], steps: Sequence[int] | None = None) -> RunDifferences:
    """Compare data, tokenizer, validation windows, document mask and step of runs, by their newest checkpoints.

    Models, seeds and rates are what runs are compared for; they are not mentioned.

    Args:
        steps: that the figures are of, one for each run; not compared when not given.
    """
    if len(folders) < 2:
        return RunDifferences([], False, False)
    unique = len({folder.name for folder in folders}) == len(folders)
    runs = [
        _Known(folder.name if unique else str(folder), folder, _state(folder), steps[at] if steps else None)
        for at, folder in enumerate(folders)
    ]
    known = [run for run in runs if run.state is not None]
    tokenizers, data = _tokenizers(known), _spread("data", known, _data)
    lines = [
        *tokenizers,
        *data,
        *_spread("validation windows", known, _windows),
        *_spread("document masks", known, _mask),
        *_spread("steps", runs, lambda run: None if run.step is None else f"{run.step:,}"),
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


def _spread(what: str, runs: Sequence[_Known], value: Callable[[_Known], str | None]) -> list[str]:
    """A line that says which runs have which value, if there are several; runs without one are left out."""
    having: dict[str, list[str]] = {}
    for run in runs:
        found = value(run)
        if found is not None:
            having.setdefault(found, []).append(run.name)
    if len(having) < 2:
        return []
    return [
        f"{what} differ: " + "; ".join(f"{found} ({', '.join(names)})" for found, names in having.items())
    ]


def _tokenizers(runs: Sequence[_Known]) -> list[str]:
    """A line for every run whose tokenizer is another than that of the first."""
    lines = []
    for run in runs[1:]:
        hashes = [(each.state.data if each.state else {}).get("tokenizer") for each in (runs[0], run)]
        if None in hashes or hashes[0] == hashes[1]:
            continue
        try:
            one, other = (load_tokenizer(_newest(each.folder) / "tokenizer") for each in (runs[0], run))
            difference = tokenizer_difference(one, other)
        except UserError as error:
            difference = str(error)
        if difference:
            lines.append(
                f"tokenizers differ: {run.name} from {runs[0].name} ({difference}); losses in nats per token do not "
                "compare, bits per byte do"
            )
    return lines


def _newest(folder: Path) -> Path:
    return checkpoint_path(folder, checkpoint_steps(folder)[-1])


def _data(run: _Known) -> str | None:
    return _corpora(run, run.state.run.get("data"), "data") if run.state else None


def _windows(run: _Known) -> str | None:
    if run.state is None or not run.state.run:
        return None
    settings = run.state.run.get("validation", {})
    own = settings.get("data") is not None
    corpora = _corpora(
        run, settings["data"] if own else run.state.run.get("data"), "validation" if own else "data"
    )
    if corpora is None:
        return None
    return f"{settings.get('sequences')} of {run.state.model.get('context_length')} tokens of {corpora}"


def _corpora(run: _Known, spec: str | None, key: str) -> str | None:
    """Names of corpora with their shares, and the beginning of what identifies their contents."""
    contents = run.state.data.get(key) if run.state else None
    if not contents or spec is None:
        return None  # an imported model does not know its data
    names = ["builtin"] if spec == "builtin" else [Path(folder).name for folder, _ in parse_blend(spec)]
    shares = [f" x {share}" if len(contents) > 1 else "" for _, share in contents]
    return ", ".join(
        f"{name}{share} {content[:8]}"
        for name, share, (content, _) in zip(names, shares, contents, strict=False)
    )


def _mask(run: _Known) -> str | None:
    if run.state is None or not run.state.run:
        return None
    return "kept apart" if run.state.run.get("document_mask") else "in one another's sight"
