"""``python -m pretrain.prepare labelled``: makes a corpus of labelled examples."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.classification.corpus import CHARACTERS, VOCABULARY, Task, builtin_task, prepare_labelled
from pretrain.classification.sources import Example, kind_of, read_examples
from pretrain.config.command_line import CommandParser
from pretrain.data.making.assemble import Selection
from pretrain.data.making.make import check_vocabulary
from pretrain.data.making.progress import say
from pretrain.data.making.split import Split, in_chunks
from pretrain.data.tokenizer import Tokenizer, load_tokenizer

VALIDATION_FRACTION = 0.1


FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
NAME: dict[str, Any] = {"metavar": "NAME"}
NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}
_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "train": (
        FILE,
        "examples: .tsv as GLUE has it, .jsonl, or .fasta with the label as a header's last word",
    ),
    "builtin": (
        {"action": "store_true"},
        "instead: of which package of Python's library a snippet is",
    ),
    "validation": (FILE, "examples to validate on, such as GLUE's dev.tsv"),
    "validation_fraction": (
        {"type": float, "metavar": "F"},
        f"without --validation: share held out, by hash of the text (default: {VALIDATION_FRACTION})",
    ),
    "text_column": (NAME, "column of the text (default: sentence, text or sequence)"),
    "label_column": (NAME, "column of the label (default: label)"),
    "tokenizer": (
        NAME,
        "characters, or a tokenizer's folder, SentencePiece .model file or hub name (default: characters for "
        "FASTA, else one is trained)",
    ),
    "train_tokenizer": (
        NUMBER,
        f"train a SentencePiece tokenizer of N entries on the training examples (default: {VOCABULARY})",
    ),
    "out": ({"type": Path, "metavar": "FOLDER"}, "folder to write, such as data/NAME"),
}


def add_options(parser: Any, options: dict[str, tuple[dict[str, Any], str]]) -> None:
    """Add options to a parser or a group of one: for each name, argparse's settings and the help."""
    for name, (settings, help) in options.items():
        parser.add_argument(f"--{name}", help=help, **settings)


def run_labelled(argv: Sequence[str]) -> Path:
    """Prepare the labelled corpus of the command line, and return its folder.

    Raises:
        UserError: bad input.
    """
    parser = CommandParser(
        prog="python -m pretrain.prepare labelled",
        description="Tokenize labelled examples into a corpus for --task classification.",
        allow_abbrev=False,
    )
    add_options(parser, _OPTIONS)
    options = parser.parse_args(argv)
    if (options.train is None) != options.builtin:
        raise UserError("train: give either --train FILE, or --builtin for the task that needs none")
    if options.tokenizer is not None and options.train_tokenizer is not None:
        raise UserError("tokenizer: give either --tokenizer or --train_tokenizer, and not both")
    size = options.train_tokenizer if options.train_tokenizer is not None else VOCABULARY
    check_vocabulary(size)
    if options.builtin:
        for name in ("validation", "validation_fraction", "text_column", "label_column"):
            if getattr(options, name) is not None:
                raise UserError(f"{name}: --{name} does not apply to --builtin")
    if options.out is None:
        raise UserError("out: missing; give the folder to write, such as --out data/NAME")
    task = builtin_task() if options.builtin else _task_of_files(options)
    tokenizer: Tokenizer | int | None = size
    if options.tokenizer is not None:
        tokenizer = None if options.tokenizer == CHARACTERS else load_tokenizer(options.tokenizer)
    elif options.train_tokenizer is None and not options.builtin and kind_of(options.train) == "fasta":
        tokenizer = None
    return prepare_labelled(options.out, task, tokenizer, say)


def _task_of_files(options: argparse.Namespace) -> Task:
    training = read_examples(options.train, options.text_column, options.label_column)
    source: dict[str, Any] = {"name": options.train.name}
    if options.validation is None:
        fraction = VALIDATION_FRACTION if options.validation_fraction is None else options.validation_fraction
        training, validation = _held_out(training, fraction)
        return Task(training, validation, source, {"by": "hash of the text", "validation_fraction": fraction})
    if options.validation_fraction is not None:
        raise UserError("validation: give either --validation or --validation_fraction, and not both")
    source["validation"] = {"name": options.validation.name}
    validation = read_examples(options.validation, options.text_column, options.label_column)
    return Task(training, validation, source, {"by": "a file of its own"})


def _held_out(examples: Sequence[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """Training and validation examples, split by the hash of the text: equal texts are on one side."""
    digests = [hashlib.sha256(example.text.encode()).digest() for example in examples]
    fraction = Selection(validation_fraction=fraction).validation_fraction
    split = Split.choose(in_chunks(digests), fraction)
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example, digest in zip(examples, digests, strict=True):
        sides[split.is_validation(digest)].append(example)
    return sides
