"""Opens a trained run for reading: one checkpoint's weights, configuration, tokenizer and held-out tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model.config import ModelConfig
from model.errors import MachineError, UserError
from model.heads import format_heads
from model.transformer import Transformer
from pretrain.checkpoint.finder import Hold, checkpoint_path, require_steps
from pretrain.checkpoint.manifest import verify
from pretrain.checkpoint.sharded_files import UnshardedCheckpoint
from pretrain.checkpoint.state import TrainingState
from pretrain.data.corpus import Corpus, is_prefix
from pretrain.data.same_tokenizer import tokenizer_difference
from pretrain.data.sequences import ValidationSequences, parse_blend
from pretrain.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash
from pretrain.metrics.file import read_metrics
from pretrain.prepare.sources.plain_files import BuiltinCorpus
from pretrain.utils.format import log_line


@dataclass(frozen=True)
class SavedRun:
    """One checkpoint of a run, opened for reading; no weights are in memory yet."""

    run_folder: Path
    checkpoint: UnshardedCheckpoint
    model: ModelConfig
    tokenizer: Tokenizer
    hold: Hold | None = None
    """While this object exists, a run that is training does not prune the checkpoint."""

    def __repr__(self) -> str:
        heads = format_heads(self.model.heads)
        return f"SavedRun {str(self.run_folder)!r}: step {self.state.step:,}, heads {heads}"

    @property
    def state(self) -> TrainingState:
        """Everything but tensors."""
        return self.checkpoint.state

    @classmethod
    def open(
        cls, folder: str | Path, step: int | None = None, report: Callable[[str], object] = print
    ) -> SavedRun:
        """Open ``runs/NAME``: its newest valid checkpoint, or the one of *step*.

        Args:
            report: receives a line for each damaged checkpoint that an older one replaces.

        Raises:
            UserError: no run, no such step, a checkpoint with missing or damaged files, a tokenizer that is
                not the one the model was trained with.
        """
        path, hold = find_checkpoint(Path(folder), step, report)
        path = path.absolute()  # it is read later, wherever the program is then
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
        return cls(Path(folder), checkpoint, model, tokenizer, hold)

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
            folders = sorted(Path(str(run.get("data_root", "data"))).glob(pattern))
        else:
            folders = [Path(folder) for folder, _ in parse_blend(run["data"])]
        corpora = []
        for folder in folders:
            try:
                corpus = Corpus.open(folder, self.tokenizer if is_prefix(folder) else None)
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
            if corpus.validation.num_tokens <= length:  # less than a window
                continue
            held_out = ValidationSequences(corpus, length, windows)
            rows = held_out.batch(0, len(held_out))[:, :length]
            if len(rows) == windows:
                return rows, f"held-out text of {corpus.name}"
        ids: list[int] = []
        for document in BuiltinCorpus().documents():
            ids += [*self.tokenizer.encode(document.text), self.tokenizer.end_of_document]
            if len(ids) >= windows * length:
                break
        rows = np.array(ids[: windows * length], np.int64).reshape(windows, length)
        return rows, "Python's standard library"

    def last_metrics(self) -> dict[str, Any]:
        """The newest value of each loss and zero-shot score at or before this step, from metrics.jsonl.

        Raises:
            UserError: as read_metrics.
        """
        values: dict[str, Any] = {}
        losses = ("train_loss", "val_loss", "val_bpb", "val_accuracy")
        for row in read_metrics(self.run_folder, of_few=False):
            if row["step"] <= self.state.step:
                values |= {
                    name: value
                    for name, value in row.items()
                    if name in losses or name.startswith("evaluation/")
                }
        return values


def refuse_links(folder: Path) -> None:
    """Reject links out of the checkpoint: an untrusted run could copy this machine's files into an export.

    Raises:
        UserError: it names the link.
    """
    inside = os.path.realpath(folder.parent)
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
            raise UserError(
                f"tokenizer: {path} is a symbolic link to a file outside the checkpoint; put the file itself "
                "there"
            )


def find_checkpoint(folder: Path, step: int | None, report: Callable[[str], object]) -> tuple[Path, Hold]:
    """The checkpoint of *step*, or the newest valid one, and a hold on it.

    Raises:
        UserError: there is no valid one.
        MachineError: one cannot be read now; it is not passed over.
    """
    notes: list[str] = []
    for existing_step in reversed(require_steps(folder, step)):
        path = checkpoint_path(folder, existing_step)
        hold = Hold(path)  # before it is verified, which takes a while
        try:
            problem = verify(path)
        except MachineError as error:
            if os.path.lexists(path):
                raise
            problem = str(error)
        if problem is None:
            if notes:
                report(log_line("note", f"{'; '.join(notes)}; using {path.name}"))
            return path, hold
        if not os.path.lexists(path):  # pruned meanwhile, by a run that is training: there is a newer one
            return find_checkpoint(folder, step, report)
        notes.append(f"checkpoint {path.name} is damaged ({problem})")
    raise UserError(
        f"checkpoint: {str(folder)!r} holds none that is whole ({'; '.join(notes)}); restore it or give "
        "another --step"
    )
