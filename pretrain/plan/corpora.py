"""What a plan takes from a run's corpora, where their folders are on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.data.corpus import Corpus, is_prefix
from pretrain.data.meta import CorpusMeta
from pretrain.data.same_tokenizer import tokenizer_difference
from pretrain.data.sequences import parse_blend
from pretrain.data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class PlannedCorpus:
    """A corpus of a run."""

    folder: str
    weight: float
    """Share of the run's sequences."""
    meta: CorpusMeta

    def passes(self, tokens: int) -> float:
        """How often a run of *tokens* tokens reads the training documents."""
        return tokens * self.weight / max(1, self.meta.training.tokens)


def find_corpora(run: RunConfig) -> list[PlannedCorpus] | None:
    """The corpora that ``data`` names; None for the built-in one, and if a folder does not exist here.

    Raises:
        UserError: damaged files, a pair without a tokenizer, or corpora of different tokenizers.
    """
    if run.data == "builtin":
        return None
    found: list[PlannedCorpus] = []
    sources: list[str | Path] = []
    for folder, weight in parse_blend(run.data):
        path = Path(folder)
        if is_prefix(path):
            source: str | Path = run.tokenizer or ""
            meta = Corpus.open(path, load_tokenizer(source) if run.tokenizer else None).meta
        elif path.is_dir():
            source, meta = path / "tokenizer", CorpusMeta.read(path)
        else:
            return None
        found.append(PlannedCorpus(folder, float(weight), meta))
        sources.append(source)
    for other, source in zip(found[1:], sources[1:], strict=True):
        if other.meta.tokenizer.hash != found[0].meta.tokenizer.hash and (
            difference := tokenizer_difference(load_tokenizer(sources[0]), load_tokenizer(source))
        ):
            raise UserError(
                f"data: {other.folder!r} has another tokenizer than {found[0].folder!r} ({difference}); "
                "valid: corpora prepared with one tokenizer"
            )
    return found


def model_fields(run: RunConfig, corpora: list[PlannedCorpus] | None) -> dict[str, Any]:
    """The fields of the model that the corpora determine, as far as they are known."""
    if run.init_from is not None:  # weights bring their vocabulary
        return {}
    if corpora is None:
        return {"vocab_size": run.vocab_size} if run.data == "builtin" else {}
    meta = corpora[0].meta
    classes = {"classes": len(meta.classes)} if run.task == "classification" and meta.classes else {}
    return {"vocab_size": meta.tokenizer.vocab_size, **classes}


def build_model(run: RunConfig) -> ModelConfig:
    """The model of a run, with what its corpora determine, as far as they are here.

    Raises:
        UserError: as find_corpora and RunConfig.build_model_config.
    """
    return run.build_model_config(**model_fields(run, find_corpora(run)))
