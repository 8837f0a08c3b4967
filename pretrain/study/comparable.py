"""Whether the figures of runs may be compared: one text, one tokenizer, and what else should be alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.errors import UserError
from pretrain.study.results import RunResult, some_names
from pretrain.study.study_file import Study


@dataclass(frozen=True)
class Comparability:
    """What stands in the way of comparing runs."""

    notes: list[str]
    bits_per_byte: bool
    """Whether only bits per byte compare, since tokenizers differ."""


def check_comparable(study: Study, results: Sequence[RunResult]) -> Comparability:
    """Check within each comparison that runs have one text and one tokenizer, and note what else differs.

    Raises:
        UserError: runs of one comparison were validated on different texts.
    """
    notes: list[str] = []
    bits_per_byte = False
    for comparison in study.comparisons:
        label = f"{comparison.name}: " if comparison.name else ""
        runs = [run for run in results if run.comparison == comparison.name]
        texts = different_texts(runs)
        if texts:
            raise UserError(
                f"study: {label}runs were validated on different texts: {texts}; give all the same data, or "
                "the same validation.data"
            )
        tokenizers = different_tokenizers(runs)
        if tokenizers:
            bits_per_byte = True
            notes.append(f"{label}tokenizers differ, so bits per byte are compared: {tokenizers}")
        notes += [f"{label}{note}" for note in differences_between(runs)]
    return Comparability(notes, bits_per_byte)


def different_texts(runs: Sequence[RunResult]) -> str:
    """The texts that runs were validated on, with some runs' names; empty for one, as far as it is known."""
    return _listed(_by(_known(runs), _validation_text))


def different_tokenizers(runs: Sequence[RunResult]) -> str:
    """The tokenizers of runs, with some of their names; empty if it is one, as far as that is known."""
    return _listed(_by(_known(runs), lambda run: str(run.data.get("tokenizer"))[:8]))


def differences_between(runs: Sequence[RunResult]) -> list[str]:
    """What a reader should know before comparing runs: sentences without their full stop."""
    begun, known = [run for run in runs if run.rows], _known(runs)
    on_cpus = [run for run in known if run.world.get("device") == "cpu"]  # on GPUs threads change no figure
    looked_at: tuple[tuple[str, list[RunResult], Callable[[RunResult], object]], ...] = (
        ("the runs are validated on windows of several lengths", begun, _window),
        ("the documents of a window are kept apart in some runs", begun, _mask),
        (
            "the runs are of several versions of the code",
            known,
            lambda run: ", ".join(run.world.get("code", [])),
        ),
        ("the runs are of several kinds of device", known, lambda run: run.world.get("device")),
        ("the runs are of several dtypes", known, lambda run: run.world.get("dtype")),
        (
            "the runs are of several versions of torch",
            known,
            lambda run: run.world.get("versions", {}).get("torch"),
        ),
        ("the runs had several numbers of ranks", known, lambda run: run.world.get("ranks")),
        ("the runs had different CPU thread counts", on_cpus, lambda run: run.world.get("threads")),
    )
    notes = [f"{what}: {found}" for what, among, value in looked_at if (found := _listed(_by(among, value)))]
    lost = [run.folder.name for run in runs if run.state == "finished" and not run.data]
    if lost:
        notes.append(
            f"no checkpoint of {len(lost)} finished run{'s' * (len(lost) != 1)} ({some_names(lost)}), so "
            "their text, tokenizer and code were not checked"
        )
    return notes


def _known(runs: Sequence[RunResult]) -> list[RunResult]:
    """The runs whose checkpoint says what they were trained on."""
    return [run for run in runs if run.data]


def _by(runs: Sequence[RunResult], value: Callable[[RunResult], object]) -> dict[str, list[str]]:
    """Names of the runs by a value of theirs."""
    found: dict[str, list[str]] = {}
    for run in runs:
        found.setdefault(str(value(run)), []).append(run.folder.name)
    return found


def _listed(found: dict[str, list[str]]) -> str:
    """The values with names of their runs; empty for one value."""
    each = [f"{key} ({some_names(names)})" for key, names in found.items()]
    return "; ".join(each) if len(each) > 1 else ""


def _validation_text(run: RunResult) -> str:
    """The corpora whose held-out text a run was measured on (hash and weight), and how many windows."""
    corpora = run.data.get("validation") or run.data["data"]
    listed = ", ".join(f"{content[:8]} x {weight}" for content, weight in corpora)
    return f"{run.planned.run.validation.sequences} windows of {listed}"


def _window(run: RunResult) -> str:
    return f"{run.planned.run.build_model_config().context_length:,} tokens"


def _mask(run: RunResult) -> str:
    return "kept apart" if run.planned.run.document_mask else "not kept apart"
