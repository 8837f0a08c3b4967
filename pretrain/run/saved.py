"""Opens a trained run for reading: one checkpoint's weights, configuration, tokenizer and held-out tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from model.config import ModelConfig
from model.errors import UserError
from model.transformer import Transformer
from pretrain.checkpoint.finder import Hold, checkpoint_path, checkpoint_steps, newest_valid
from pretrain.checkpoint.manifest import verify
from pretrain.checkpoint.state import TrainingState
from pretrain.checkpoint.unsharded import UnshardedCheckpoint
from pretrain.data.blend import parse_blend
from pretrain.data.corpus import Corpus
from pretrain.data.same_tokenizer import tokenizer_difference
from pretrain.data.sequences import ValidationSequences
from pretrain.data.sources.files import BuiltinCorpus
from pretrain.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash
from pretrain.metrics.file import FILE_NAME, read_metrics

T = TypeVar("T")
ATTEMPTS = 10
"""Give up after this many checkpoints were pruned while they were read, by a run that is training."""


@dataclass(frozen=True)
class SavedRun:
    """One checkpoint of a run, opened for reading; no weights are in memory yet."""

    run_folder: Path
    checkpoint: UnshardedCheckpoint
    model: ModelConfig
    tokenizer: Tokenizer
    hold: Hold | None = None
    """While this object exists, a run that is training does not prune the checkpoint."""

    @property
    def state(self) -> TrainingState:
        """Everything but tensors."""
        return self.checkpoint.state

    @classmethod
    def open(
        cls, folder: str | Path, step: int | None = None, report: Callable[[str], None] = print
    ) -> SavedRun:
        """Open ``runs/NAME``: its newest valid checkpoint, or the one of *step*.

        Args:
            report: receives a line for each damaged checkpoint that is passed over.

        Raises:
            UserError: no run, no such step, a checkpoint with missing or damaged files, a tokenizer that is
                not the one the model was trained with.
        """
        return with_saved_run(folder, step, lambda run: run, report)

    @classmethod
    def at(cls, folder: Path, path: Path, hold: Hold | None = None) -> SavedRun:
        """The checkpoint at *path*, of the run in *folder*. Raises as ``open``."""
        checkpoint = UnshardedCheckpoint.open(path)
        model = ModelConfig.from_json(checkpoint.state.model)
        path = path / "tokenizer"
        if not path.is_dir():
            raise UserError(f"tokenizer: {path} is missing; copy it from another checkpoint of the run")
        refuse_links(path)
        tokenizer = load_tokenizer(path)
        expected = checkpoint.state.data.tokenizer
        if tokenizer.vocab_size != model.vocab_size or (expected and tokenizer_hash(tokenizer) != expected):
            raise UserError(
                f"tokenizer: {path} ({tokenizer.vocab_size:,} entries) is not the one that the run was "
                f"trained with ({model.vocab_size:,} entries, hash {str(expected)[:12]}); put that one there"
            )
        return cls(folder, checkpoint, model, tokenizer, hold)

    def refuse_classifier(self, what: str) -> None:
        """Raise UserError if the run trained a sequence classifier, which cannot be used as *what* says."""
        if self.model.classes is not None:
            raise UserError(
                f"run: {str(self.run_folder)!r} holds a classifier of {self.model.classes} classes, which "
                f"cannot be {what}; give a run of --task language"
            )

    def load_model(self) -> Transformer:
        """The trained network in fp32 on the CPU, in evaluation mode. Memory: one copy of the weights."""
        with torch.device("meta"):
            network = Transformer(self.model)
        for name in self.checkpoint.names():
            weight = self.checkpoint.parameter(name)
            network.load_state_dict({name: weight}, strict=False, assign=True)
            self.checkpoint.release()
        return network.eval().requires_grad_(False)

    def corpora(self) -> list[Corpus]:
        """The corpora that the run was trained on, as far as they are on this machine and unchanged.

        The same text with another tokenizer (the built-in corpus with another vocabulary) is not one of them.
        """
        content_hashes = {content for content, _ in self.state.data.data or []}
        run = self.state.run
        if run.get("data", "builtin") == "builtin":
            pattern = "packages-*" if self.model.classes else "builtin-*"
            folders = sorted(Path(run.get("data_root", "data")).glob(pattern))
        else:
            folders = [Path(folder) for folder, _ in parse_blend(run["data"])]
        corpora = []
        for folder in folders:
            try:
                corpus = Corpus.open(folder)
            except (UserError, OSError):
                continue
            same_content = corpus.meta.content_hash in content_hashes
            if same_content and tokenizer_difference(corpus.tokenizer, self.tokenizer) is None:
                corpora.append(corpus)
        return corpora

    def real_tokens(self, windows: int, length: int) -> tuple[np.ndarray, str]:
        """Token ids int64 [windows, length] of real text, and the text's description.

        Held-out windows of the run's own data where that is on this machine, else Python's standard library.
        """
        for corpus in self.corpora():
            held_out = ValidationSequences(corpus, length, windows)
            rows = held_out.batch(0, len(held_out))[:, :length]
            if len(rows) == windows:
                return rows, f"held-out text of {corpus.name}"
        ids: list[int] = []
        for document in BuiltinCorpus().documents():
            ids += [*self.tokenizer.encode(document.text), self.tokenizer.end_of_document]
            if len(ids) >= windows * length:
                break
        return np.array(ids[: windows * length], np.int64).reshape(
            windows, length
        ), "Python's standard library"

    def last_metrics(self) -> dict[str, Any]:
        """The newest value of each loss and zero-shot score at or before this step, from metrics.jsonl."""
        values: dict[str, Any] = {}
        losses = ("train_loss", "val_loss", "val_bpb", "val_accuracy")
        for row in read_metrics(self.run_folder) if (self.run_folder / FILE_NAME).is_file() else ():
            if row["step"] <= self.state.step:
                values |= {
                    name: value
                    for name, value in row.items()
                    if (name in losses or name.startswith("evaluation/")) and type(value) in (int, float)
                }
        return values


def with_saved_run(
    folder: str | Path,
    step: int | None,
    use: Callable[[SavedRun], T],
    report: Callable[[str], object] = print,
) -> T:
    """Open a run (see SavedRun.open) and pass it to *use*; again if its checkpoint is pruned meanwhile.

    A run that is training prunes checkpoints. One that is held stays, but not every file system has locks.

    Raises:
        UserError: as SavedRun.open, and what *use* raises while its checkpoint exists.
    """
    folder = Path(folder)
    reported: set[str] = set()

    def report_once(line: str) -> None:
        if line not in reported:
            reported.add(line)
            report(line)

    for _ in range(ATTEMPTS):
        path_and_hold = find_checkpoint(folder, step, report_once)
        if path_and_hold is None:
            continue
        try:
            return use(SavedRun.at(folder, *path_and_hold))
        except UserError:
            if path_and_hold[0].is_dir():
                raise
        report_once(f"checkpoint {path_and_hold[0].name} was pruned while it was read; taking the next one")
    raise UserError(
        f"checkpoint: {ATTEMPTS} of {str(folder)!r} were pruned while they were read; wait for the run's "
        "end, "
        "or let it keep more (--checkpoint.keep_last)"
    )


def refuse_links(folder: Path) -> None:
    """Refuse links out of the checkpoint: an untrusted run could copy this machine's files into an export.

    Raises:
        UserError: it names the link.
    """
    inside = folder.parent.resolve()
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise UserError(
                f"tokenizer: {path} is a symbolic link to a file outside the checkpoint; put the file itself "
                "there"
            )


def is_run(folder: str | Path) -> bool:
    """Whether *folder* looks like a run's folder (and not like an exported model)."""
    return (Path(folder) / "checkpoints").is_dir()


def find_checkpoint(
    folder: Path, step: int | None, report: Callable[[str], object]
) -> tuple[Path, Hold] | None:
    """The checkpoint of *step*, or the newest valid one, and a hold on it.

    None when one was pruned while it was verified: then there is a newer one.

    Raises:
        UserError: there is no valid one.
    """
    if not is_run(folder):
        what = "is not a run's folder (it has no checkpoints)" if folder.is_dir() else "does not exist"
        raise UserError(f"run: {str(folder)!r} {what}; give one such as runs/NAME")
    steps = checkpoint_steps(folder)
    if not steps:
        raise UserError(f"run: {str(folder)!r} has no checkpoint yet; train until the first one is written")
    if step is not None and step not in steps:
        nearest = min(steps, key=lambda existing_step: abs(existing_step - step))
        raise UserError(
            f"step: no checkpoint of step {step} in {str(folder)!r}; nearest: {nearest} (there are "
            f"{_listed(steps)})"
        )
    problems: list[str] = []
    pruned: list[Path] = []
    holds: list[Hold] = []

    def problem_of(path: Path) -> str | None:
        holds[:] = [Hold(path)]  # before it is verified, which takes a while
        return verify(path)

    def passed_over(path: Path, problem: str) -> None:
        if not path.is_dir():
            return pruned.append(path)
        problems.append(problem)
        if step is None:
            report(f"checkpoint {path.name} is damaged ({problem}); looking for an earlier one")

    newest = newest_valid(folder, steps if step is None else [step], problem_of, passed_over)
    if pruned:
        return None
    if newest is None:
        which = "every checkpoint" if step is None else checkpoint_path(folder, step).name
        raise UserError(
            f"checkpoint: {which} of {str(folder)!r} is damaged ({problems[-1]}); restore it or give "
            "another --step"
        )
    return newest, holds[0]


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps if len(steps) <= 6 else [*steps[:3], "…", *steps[-2:]]))
