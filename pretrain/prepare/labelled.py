"""Makes a labelled corpus: ``python -m pretrain.prepare labelled``, a corpus folder whose documents have classes.

Besides what pretrain/prepare/pipeline.py writes there are training_labels.npy and validation_labels.npy, the class of
each document, and in meta.json the names of the classes. Examples are held in memory: a classification task has
thousands of them, and not billions of tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UserError, closest, shown
from pretrain.config.command_line import CommandParser
from pretrain.data.corpus import FORMAT_VERSION, META_FILE, labels_file
from pretrain.data.indexed import IndexedWriter, bin_path, idx_path, token_dtype
from pretrain.data.sources.files import BuiltinCorpus
from pretrain.data.sources.labelled import Example, builtin_examples, class_names, kind_of, read_examples
from pretrain.data.token_counts import write_counts
from pretrain.data.tokenizer import (
    END_OF_DOCUMENT,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_hash,
)
from pretrain.prepare.folder import already_there, only_process
from pretrain.prepare.output import SPLITS, Lengths
from pretrain.prepare.progress import Progress, ProgressCallback, ProgressPrinter, Reading
from pretrain.prepare.split import Split
from pretrain.prepare.train_tokenizer import MIN_VOCABULARY, training_request
from pretrain.utils.files import atomic_folder, file_entry

CHARACTERS = "characters"
"""As --tokenizer: one token for each character of the training examples."""
UNKNOWN = "<unk>"
VALIDATION_FRACTION = 0.1
VOCABULARY = 2048
_AT_ONCE = 1000  # examples tokenized at a time


@dataclass(frozen=True)
class Task:
    """The examples of a classification task."""

    training: Sequence[Example]
    validation: Sequence[Example]
    source: dict[str, Any]
    """Where they come from, as in meta.json: its ``name`` and more."""
    split: dict[str, Any]
    """How they were split, as in meta.json."""


def prepare_labelled(
    out: Path, task: Task, tokenizer: Tokenizer | int | None, report: ProgressCallback = lambda _: None
) -> Path:
    """Write the labelled corpus *out*, and return it. A folder that holds this very corpus is left alone.

    Args:
        tokenizer: an integer trains a SentencePiece model of so many entries on the training examples; None makes a
            token of each of their characters.

    Raises:
        UserError: *out* holds something else, one class only, a label that occurs in validation alone, no tokenizer of
            that size.
    """
    classes = class_names(task.training)
    splits = {"training": task.training, "validation": task.validation}
    known = {name: number for number, name in enumerate(classes)}
    for example in task.validation:
        if example.label not in known:
            raise UserError(
                f"labelled: the label {shown(example.label)} occurs in validation, and never in training; valid: "
                f"{', '.join(classes[:20])}{closest(example.label, classes)}"
            )
    digests = {name: _digest(examples) for name, examples in splits.items()}
    request = {
        "format_version": FORMAT_VERSION,
        "labelled": digests,
        "tokenizer": _tokenizer_request(tokenizer),
    }
    if already_there(out, request):
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with only_process(out, report):
        if already_there(out, request):
            return out
        made = _tokenizer(tokenizer, [example.text for example in task.training], report)
        with atomic_folder(out, replace=False) as partial:
            made.save(partial / "tokenizer")
            meta = {
                "format_version": FORMAT_VERSION,
                "source": task.source,
                "content_hash": hashlib.sha256(json.dumps([digests, classes]).encode()).hexdigest(),
                "classes": classes,
                "tokenizer": {
                    "name": made.name,
                    "hash": tokenizer_hash(made),
                    "vocab_size": made.vocab_size,
                    "end_of_document": made.end_of_document,
                },
                "dtype": token_dtype(made.vocab_size).name,
                "split": task.split,
                "skipped": {},
                **_write(partial, splits, known, made, report),
                "request": request,
            }
            (partial / META_FILE).write_text(json.dumps(meta, indent=2) + "\n", "utf-8")
    return out


def _digest(examples: Sequence[Example]) -> str:
    return hashlib.sha256(json.dumps(examples).encode()).hexdigest()


def _tokenizer_request(tokenizer: Tokenizer | int | None) -> str:
    if tokenizer is None:
        return CHARACTERS
    return training_request(tokenizer) if isinstance(tokenizer, int) else tokenizer_hash(tokenizer)


def _tokenizer(
    tokenizer: Tokenizer | int | None, texts: Sequence[str], report: ProgressCallback
) -> Tokenizer:
    if tokenizer is None:
        return character_tokenizer(texts)
    if isinstance(tokenizer, int):
        report(Progress(f"training a tokenizer of {tokenizer:,} entries on {len(texts):,} examples"))
        return SentencePieceTokenizer.train(texts, tokenizer)
    return tokenizer


def character_tokenizer(texts: Sequence[str]) -> HuggingFaceTokenizer:
    """A tokenizer of one token for each character that occurs in *texts*; any other character is unknown.

    Its tokens do not spell every text, so it goes with classifiers only.
    """
    import tokenizers

    characters = sorted(set().union(*texts))
    vocabulary = {name: number for number, name in enumerate([END_OF_DOCUMENT, UNKNOWN, *characters])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens([END_OF_DOCUMENT, UNKNOWN])
    return HuggingFaceTokenizer(backend, f"characters-{len(vocabulary)}", END_OF_DOCUMENT)


def _write(
    folder: Path,
    splits: dict[str, Sequence[Example]],
    known: dict[str, int],
    tokenizer: Tokenizer,
    report: ProgressCallback,
) -> dict[str, Any]:
    """Write tokens, labels and counts of both splits; returns their entries of meta.json."""
    dtype, lengths, entries = token_dtype(tokenizer.vocab_size), Lengths(), dict[str, Any]()
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    reading = Reading("tokenizing", report)
    written, size_read = 0, 0
    for name in SPLITS:
        examples, size = splits[name], 0
        with IndexedWriter(folder / name, dtype) as writer:
            for first in range(0, len(examples), _AT_ONCE):
                texts = [example.text for example in examples[first : first + _AT_ONCE]]
                for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                    ids.append(tokenizer.end_of_document)
                    writer.add_document(ids)
                    size += len(text.encode())
                    if name == "training":
                        counts += np.bincount(ids, minlength=counts.size)
                    lengths.add(np.array([len(ids)]))
                reading.add(written + first + len(texts), size_read + size)
        written, size_read = written + len(examples), size_read + size
        labels = np.array([known[example.label] for example in examples], np.int32)
        with labels_file(folder, name).open("wb") as stream:
            np.save(stream, labels, allow_pickle=False)
        entries[name] = {
            "documents": writer.num_documents,
            "bytes": size,
            "tokens": writer.num_tokens,
            "of_each_class": np.bincount(labels, minlength=len(known)).tolist(),
        }
    files = [write_counts(folder, counts)]
    for name in SPLITS:
        files += [bin_path(folder / name), idx_path(folder / name), labels_file(folder, name)]
    return {
        **entries,
        "document_lengths": lengths.summary(),
        "files": {path.name: file_entry(path) for path in files},
    }


def prepare_builtin_labelled(
    data_root: str | Path, vocabulary: int = VOCABULARY, report: ProgressCallback = lambda _: None
) -> Path:
    """The built-in classification task (see builtin_examples), made once: ``DATA_ROOT/packages-HASH``.

    Args:
        vocabulary: entries of its tokenizer, which is trained on its training examples.
    """
    settings = f"{FORMAT_VERSION} {BuiltinCorpus().fingerprint()} {training_request(vocabulary)}"
    folder = Path(data_root) / f"packages-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
    if (folder / META_FILE).is_file():  # written before the folder got its name
        return folder
    return prepare_labelled(folder, _builtin_task(), vocabulary, report)


def _builtin_task() -> Task:
    source = BuiltinCorpus()
    splits = builtin_examples(source)
    described = {"name": "packages of the standard library", "python": source.describe()["python"]}
    return Task(splits["training"], splits["validation"], described, {"by": "hash of the module's name"})


def build_parser() -> CommandParser:
    """Build the parser of the command line."""
    parser = CommandParser(
        prog="python -m pretrain.prepare labelled",
        description="Tokenize labelled examples into a corpus for --task classification.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--train", type=Path, metavar="FILE",
        help="examples: .tsv as GLUE has it, .jsonl, or .fasta with the label as the last word of each header",
    )  # fmt: skip
    add(
        "--builtin",
        action="store_true",
        help="instead: which package of Python's standard library a snippet is of",
    )
    add("--validation", type=Path, metavar="FILE", help="examples to validate on, such as GLUE's dev.tsv")
    add(
        "--validation_fraction", type=float, metavar="F",
        help=f"without --validation: the share that is held out, by hash of the text (default: {VALIDATION_FRACTION})",
    )  # fmt: skip
    add("--text_column", metavar="NAME", help="column of the text (default: sentence, text or sequence)")
    add("--label_column", metavar="NAME", help="column of the label (default: label)")
    add(
        "--tokenizer", metavar="NAME",
        help="characters, or a tokenizer's folder, SentencePiece .model file or hub name (default: characters for "
        "FASTA, else one is trained)",
    )  # fmt: skip
    add(
        "--train_tokenizer", type=int, metavar="N",
        help=f"train a SentencePiece tokenizer of N entries on the training examples (default: {VOCABULARY})",
    )  # fmt: skip
    add("--out", type=Path, metavar="FOLDER", help="folder to write, such as data/NAME")
    return parser


def run_labelled(argv: Sequence[str]) -> Path:
    """Prepare the labelled corpus of the command line, and return its folder.

    Raises:
        UserError: bad input.
    """
    options = build_parser().parse_args(argv)
    report = ProgressPrinter()
    if (options.train is None) != options.builtin:
        raise UserError("train: give either --train FILE, or --builtin for the task that needs none")
    if options.tokenizer is not None and options.train_tokenizer is not None:
        raise UserError("tokenizer: give either --tokenizer or --train_tokenizer, and not both")
    size = options.train_tokenizer if options.train_tokenizer is not None else VOCABULARY
    if not MIN_VOCABULARY <= size <= 1_000_000:
        raise UserError(f"train_tokenizer: {size} is out of range; valid: {MIN_VOCABULARY} to 1000000")
    if options.builtin:
        for name in ("validation", "validation_fraction", "text_column", "label_column"):
            if getattr(options, name) is not None:
                raise UserError(f"{name}: --{name} does not apply to --builtin")
    if options.out is None:
        raise UserError("out: missing; give the folder to write, such as --out data/NAME")
    task = _builtin_task() if options.builtin else _task_of_files(options)
    tokenizer: Tokenizer | int | None = size
    if options.tokenizer is not None:
        tokenizer = None if options.tokenizer == CHARACTERS else load_tokenizer(options.tokenizer)
    elif options.train_tokenizer is None and not options.builtin and kind_of(options.train) == "fasta":
        tokenizer = None
    return prepare_labelled(options.out, task, tokenizer, report)


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
    split = Split.choose(digests, fraction)
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example, digest in zip(examples, digests, strict=True):
        sides[split.is_validation(digest)].append(example)
    return sides
