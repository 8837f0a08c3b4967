"""``head-schedules prepare labelled``: makes a corpus of labelled examples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.declared import declared
from model.errors import UserError
from pretrain.classification.corpus import CHARACTERS, VOCABULARY, Task, prepare_labelled
from pretrain.classification.sources import Example, detect_kind, read_examples
from pretrain.config.options import parse_options
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.prepare.assemble import Selection
from pretrain.prepare.split import Split, digest_to_number
from pretrain.utils.files import output_folder
from pretrain.utils.format import print_lines

VALIDATION_FRACTION = 0.1


@declared()
class LabelledOptions:
    """The command line."""

    train: str
    """examples: .tsv as GLUE has it, .jsonl, or .fasta with the label as a header's last word"""
    out: str
    """folder to write, such as data/NAME"""
    validation: str | None = None
    """examples to validate on, such as GLUE's dev.tsv"""
    validation_fraction: float | None = None
    """without --validation: share held out, by hash of the text (default: 0.1)"""
    text_column: str | None = None
    """column of the text (default: sentence, text or sequence)"""
    label_column: str | None = None
    """column of the label (default: label)"""
    tokenizer: str | None = None
    """characters, or a tokenizer's folder, SentencePiece .model file or hub name (default: characters for
    FASTA, else one is trained)"""
    train_tokenizer: int | None = None
    """train a SentencePiece tokenizer with this many entries on the training examples (default: 2048)"""
    lossy_tokenizer: bool = False
    """accept a tokenizer whose decoded tokens differ from the text, such as one that lower-cases it"""


def run_labelled(argv: Sequence[str]) -> Path:
    """Prepare the labelled corpus of the command line, and return its folder.

    Raises:
        UserError: bad input.
    """
    options = parse_options(
        LabelledOptions,
        argv,
        "head-schedules prepare labelled",
        "Tokenize labelled examples into a corpus for --task classification.",
    )
    for one, other in (("tokenizer", "train_tokenizer"), ("validation", "validation_fraction")):
        if getattr(options, one) is not None and getattr(options, other) is not None:
            raise UserError(f"{one}: give either --{one} or --{other}, and not both")
    task = _task(options)
    size, name = options.train_tokenizer, options.tokenizer
    if name is None and size is None and detect_kind(Path(options.train)) == "fasta":
        name = CHARACTERS
    tokenizer: Tokenizer | int | None = VOCABULARY if size is None else size
    if name is not None:
        tokenizer = None if name == CHARACTERS else load_tokenizer(name)
    return prepare_labelled(output_folder(options.out), task, tokenizer, print_lines, options.lossy_tokenizer)


def _task(options: LabelledOptions) -> Task:
    columns = (options.text_column, options.label_column)
    training = read_examples(Path(options.train), *columns)
    source: dict[str, Any] = {"name": Path(options.train).name}
    if options.validation is not None:
        source["validation"] = {"name": Path(options.validation).name}
        validation = read_examples(Path(options.validation), *columns)
        return Task(training, validation, source, {"by": "a file of its own"})
    fraction = VALIDATION_FRACTION if options.validation_fraction is None else options.validation_fraction
    training, validation = _held_out(training, fraction)
    return Task(training, validation, source, {"by": "hash of the text", "validation_fraction": fraction})


def _held_out(examples: Sequence[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """Training and validation examples, split by the hash of the text: equal texts are on one side."""
    digests = [hashlib.sha256(example.text.encode()).digest() for example in examples]
    if len(set(digests)) < 2:
        raise UserError(
            "train: give at least two different texts, since one is held out for validation; with "
            "--validation FILE none is"
        )
    fraction = Selection(validation_fraction=fraction).validation_fraction
    split = Split.choose(map(digest_to_number, digests), fraction)
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example, digest in zip(examples, digests, strict=True):
        sides[split.is_validation(digest)].append(example)
    return sides
