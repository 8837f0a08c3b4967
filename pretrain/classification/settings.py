"""The settings of sequence classification."""

from __future__ import annotations

from typing import Any, Literal

from model.config import ModelConfig
from model.declared import declared
from model.errors import UserError
from pretrain.config.section import Section


@declared()
class ClassificationSettings(Section):
    """What classification adds to RunConfig."""

    task: Literal["language", "classification"] = "language"
    """language: predict the next token. classification: predict the class of a whole sequence, at its end;
    data is then a labelled corpus (python -m pretrain.prepare labelled)."""

    @staticmethod
    def check(run: Any) -> None:
        """Refuse settings that a classifier has no use for."""
        if run.task == "language":
            return
        evaluation = getattr(run, "evaluation", None)
        for name, given, reason in (
            ("document_mask", run.document_mask, "every example is a sequence of its own"),
            ("sequence_parallel", run.sequence_parallel, "the head reads one position of each sequence"),
            ("evaluation.every", evaluation and evaluation.every, "its tasks need a language model"),
            ("validation.data", run.validation.data, "a labelled corpus has its own validation examples"),
            ("tokenizer", run.tokenizer, "a labelled corpus brings its own"),
        ):
            if given:
                raise UserError(
                    f"{name}: {given} does not go with --task classification: {reason}; leave it out"
                )

    @staticmethod
    def first_model(run: Any, model: ModelConfig) -> ModelConfig:
        """A classifier has as many classes as its data; until they are known, two."""
        return model.replace(classes=model.classes or 2) if run.task == "classification" else model
