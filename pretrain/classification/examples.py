"""Labelled corpora: every document is an example of a class. Cuts and pads them into sequences for a
classifier.

A labelled corpus is a corpus folder (see pretrain/classification/corpus.py). Besides, meta.json names the
classes, and ``training_labels.npy`` and ``validation_labels.npy`` hold the class of each document, int32
[documents].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from model.errors import UserError
from model.loss import IGNORED_LABEL
from pretrain.classification.corpus import labels_file
from pretrain.data.corpus import Corpus
from pretrain.data.indexed import IndexedTokens
from pretrain.data.meta import PREPARE_AGAIN
from pretrain.data.sequences import epoch_order
from pretrain.run.data import RunData
from pretrain.utils.files import open_regular


@dataclass(frozen=True)
class Examples:
    """The examples of one split of a labelled corpus."""

    stream: IndexedTokens
    """A document an example; each ends with the end-of-document token."""
    labels: np.ndarray
    """Class of each document, int32 [documents]."""
    end_of_document: int

    @classmethod
    def open(cls, corpus: Corpus, split: str) -> Examples:
        """The *split*, training or validation, of *corpus*.

        Raises:
            UserError: the corpus has no labels, or others than its documents need.
        """
        classes = read_classes(corpus)
        path = labels_file(corpus.folder, split)
        stream: IndexedTokens = getattr(corpus, split)
        try:
            if path.name not in (corpus.meta.files or {}):
                raise ValueError("its hash is not known")
            with open_regular(path) as file:
                labels = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError, MemoryError):
            raise UserError(f"data: {str(path)!r} is missing or damaged; {PREPARE_AGAIN}") from None
        if labels.shape != (stream.num_documents,) or not ((labels >= 0) & (labels < len(classes))).all():
            raise UserError(
                f"data: {str(path)!r} does not hold one of {len(classes)} classes for each of "
                f"{stream.num_documents:,} documents; {PREPARE_AGAIN}"
            )
        return cls(stream, labels, corpus.tokenizer.end_of_document)

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, numbers: Sequence[int] | np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of these examples for Transformer.forward, int64 [n, length] each.

        A longer example is cut, and still ends with the end-of-document token; a shorter one is padded with
        it. The label stands at the position of the first one, and IGNORED_LABEL everywhere else. Attention is
        causal, so padding changes nothing.
        """
        inputs = np.full((len(numbers), length), self.end_of_document, np.int64)
        labels = np.full((len(numbers), length), IGNORED_LABEL, np.int64)
        for row, number in enumerate(numbers):
            tokens = self.stream.document(int(number))[:-1][: length - 1]
            inputs[row, : tokens.size] = tokens
            labels[row, tokens.size] = self.labels[number]
        return inputs, labels


def read_classes(corpus: Corpus) -> list[str]:
    """The names of the corpus's classes. UserError if it has no labels."""
    classes = corpus.meta.classes
    if classes is None or len(classes) < 2:
        raise UserError(
            f"data: {str(corpus.folder)!r} has no labels; valid: one written by head-schedules prepare "
            "labelled, or --task language"
        )
    return classes


class LabelledSequences:
    """The endless stream of training examples of a run, reshuffled each epoch.

    As for TrainingSequences, the order depends only on the seed and the sequence number.

    Raises UserError for more than one corpus, and for one without labels.
    """

    def __init__(
        self, corpora_and_weights: Iterable[tuple[Corpus, Fraction]], context_length: int, seed: int
    ) -> None:
        pairs = list(corpora_and_weights)
        if len(pairs) != 1:
            raise UserError(
                f"data: a blend of {len(pairs)} corpora cannot be classified; give one labelled corpus"
            )
        self.corpora = [corpus for corpus, _ in pairs]
        self.context_length, self.seed = context_length, seed
        self.examples = Examples.open(self.corpora[0], "training")

    def epochs(self, sequences: int) -> list[float]:
        """How often the first *sequences* sequences read the training split."""
        return [sequences / len(self.examples)]

    def inputs_and_labels(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Sequences ``first … first + count - 1`` as Examples.rows gives them."""
        size = len(self.examples)
        numbers = []
        for number in range(first, first + count):
            epoch, position = divmod(number, size)
            numbers.append(epoch_order(size, self.seed, 0, epoch)(position))
        return self.examples.rows(numbers, self.context_length)

    def describe(self) -> str:
        """A one-line summary: name, classes, examples, and how many are longer than the context."""
        corpus, stream = self.corpora[0], self.examples.stream
        longer = int(
            (np.diff(stream.ends_of(0, stream.num_documents), prepend=0) > self.context_length).sum()
        )
        cut = f", {longer:,} of them cut to {self.context_length} tokens" if longer else ""
        return (
            f"{corpus.name}: {len(read_classes(corpus))} classes, {len(self.examples):,} training examples, "
            f"{stream.num_tokens:,} tokens{cut}"
        )


def held_out_examples(corpus: Corpus, context_length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """*count* examples of the validation split, evenly spaced, or all if there are fewer: see
    Examples.rows."""
    examples = Examples.open(corpus, "validation")
    chosen = min(count, len(examples))
    return examples.rows([number * len(examples) // chosen for number in range(chosen)], context_length)


@dataclass(frozen=True)
class LabelledData(RunData):
    """A labelled corpus: its documents are examples of classes."""

    is_text = False

    def model_fields(self) -> dict[str, Any]:
        """The vocabulary, and the number of classes. UserError if the corpus has no labels."""
        return super().model_fields() | {"classes": len(read_classes(self.corpora[0][0]))}

    def training_sequences(self, context_length: int, seed: int) -> Any:
        """The run's endless stream of examples."""
        return LabelledSequences(self.corpora, context_length, seed)
