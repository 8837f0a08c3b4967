"""Turns text into a corpus folder: ``python -m pretrain.prepare``, ``… labelled``, ``… merge``,
``… inspect``, ``… verify``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from model.errors import UserError, closest, run_command
from pretrain.config.command_line import CommandParser
from pretrain.data.corpus import Corpus
from pretrain.data.making.assemble import DEFAULT_SELECTION, VALIDATION_FRACTION, Selection
from pretrain.data.making.builtin import prepare_builtin
from pretrain.data.making.make import Preparation, merge, units_missing
from pretrain.data.making.progress import say
from pretrain.data.meta import CorpusMeta
from pretrain.data.sources.files import BuiltinCorpus
from pretrain.data.sources.reading import MAX_DOCUMENT_BYTES
from pretrain.data.sources.source import TextSource
from pretrain.data.tokenizer import load_tokenizer
from pretrain.prepare.labelled import NAME, NUMBER, add_options, run_labelled
from pretrain.prepare.sources.files import FORMATS, TextFiles
from pretrain.prepare.sources.hub import HubDataset
from pretrain.prepare.sources.with_validation import WithValidation
from pretrain.prepare.summary import LENGTHS_FILE, draw_lengths, sample, summary
from pretrain.prepare.verify import verify

DATASETS = ("builtin",)
DEFAULT_VOCABULARY = 4096
# A dataset on the hub is large: half a per cent of FineWeb's 10 billion tokens is more than validation needs.
HUB_VALIDATION_FRACTION = 0.005
_FOR_FILES = ("format", "skip_damaged", "validation_text")
_FOR_HUB = ("subset", "split", "revision", "data_files", "validation_split", "validation_data_files")
_VALIDATION_SOURCES = ("validation_text", "validation_split", "validation_data_files")


def _share(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    try:
        return int(number), int(count)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N, such as 0/16") from None


PATHS: dict[str, Any] = {"nargs": "+", "metavar": "PATH"}
_SOURCE_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "text": (PATHS, "files, folders or globs, .gz and .zst too"),
    "format": (
        {"choices": FORMATS},
        "of --text. auto: by the file's ending, JSON Lines (jsonl), a JSON array (json), csv, tsv, parquet, "
        "or text, a document a file; lines: text, a document a line (default: auto)",
    ),
    "dataset": (
        NAME,
        "builtin (the running Python's standard library), a dataset on the Hugging Face hub, a local folder "
        "that the datasets library reads, or json, parquet, … with --data_files",
    ),
    "subset": (NAME, "of the dataset, such as sample-10BT"),
    "split": (NAME, "of the dataset (default: train)"),
    "revision": (NAME, "branch, tag or commit of the dataset"),
    "data_files": (PATHS, "files or globs in place of the dataset's own"),
    "column": (NAME, "JSON field or column that holds the text (default: text)"),
    "skip_damaged": (
        {"action": "store_true", "default": None},
        "count truncated files of --text and take what can be read of them, instead of refusing them",
    ),
    "max_document_bytes": (
        {**NUMBER, "default": MAX_DOCUMENT_BYTES},
        "leave out longer documents (default: %(default)s)",
    ),
}
_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "tokenizer": (
        {"metavar": "FOLDER"},
        "tokenizer folder, SentencePiece .model file, or hub name such as gpt2",
    ),
    "train_tokenizer": (
        NUMBER,
        f"train a SentencePiece tokenizer of N entries (default: {DEFAULT_VOCABULARY})",
    ),
    "validation_fraction": (
        {"type": float, "metavar": "F"},
        "fraction of documents held out for validation, chosen by their hash (default: "
        f"{VALIDATION_FRACTION}; of datasets that come over the network {HUB_VALIDATION_FRACTION})",
    ),
    "validation_text": (PATHS, "with --text: validate on this text, and hold out nothing of --text"),
    "validation_split": (
        NAME,
        "with --dataset: validate on this split of it, such as validation, and hold out nothing of --split",
    ),
    "validation_data_files": (
        PATHS,
        "with --data_files: validate on these files, and hold out nothing of those",
    ),
    "validation_documents": (NUMBER, "hold out N documents instead, chosen likewise"),
    "drop_duplicates": ({"action": "store_true"}, "keep the first of documents with equal text only"),
    "max_tokens": (NUMBER, "stop before the document that would exceed N tokens in all"),
    "processes": (
        {**NUMBER, "default": len(os.sched_getaffinity(0))},
        "processes that tokenize; the output does not depend on it (default: the cores, here %(default)s)",
    ),
    "shard": (
        {"type": _share, "metavar": "I/N"},
        "do share I of N only (0 ≤ I < N); then: merge FOLDER",
    ),
    "merge": ({"action": "store_true"}, "with --shard: the share that finishes last merges them all"),
    "out": ({"metavar": "FOLDER"}, "corpus folder to write, such as data/NAME"),
}


def _prepare_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m pretrain.prepare",
        description="Tokenize text into a corpus folder that the trainer reads. Interrupted, the same "
        "command goes on.",
        epilog="python -m pretrain.prepare inspect FOLDER shows what a corpus holds, verify FOLDER checks "
        "every byte, merge FOLDER ends a preparation in shards, labelled makes a classification task.",
        allow_abbrev=False,
    )
    add_options(parser.add_argument_group("where the text comes from"), _SOURCE_OPTIONS)
    add_options(parser, _OPTIONS)
    return parser


def _source(options: argparse.Namespace) -> TextSource:
    if (options.text is None) == (options.dataset is None):
        raise UserError("source: give either --text PATH… or --dataset builtin (or another NAME)")
    column, limit = options.column or "text", options.max_document_bytes
    if options.text is not None:
        _refuse(options, _FOR_HUB, "goes with --dataset NAME, not with --text")

        def files(paths: Sequence[str]) -> TextFiles:
            return TextFiles(
                paths, "text", options.format or "auto", column, limit, bool(options.skip_damaged)
            )

        text = files(options.text)
        return WithValidation(text, files(options.validation_text)) if options.validation_text else text
    _refuse(options, _FOR_FILES, "goes with --text PATH…, not with --dataset")
    if options.dataset in DATASETS:
        _refuse(options, (*_FOR_HUB, "column"), "does not apply to --dataset builtin")
        return BuiltinCorpus()
    if "/" not in options.dataset and closest(options.dataset, DATASETS):
        raise UserError(
            f"dataset: {options.dataset!r} is unknown; valid: {', '.join(DATASETS)}, or --text PATH…"
            + closest(options.dataset, DATASETS)
        )

    def dataset(split: str, data_files: Sequence[str] | None) -> HubDataset:
        return HubDataset(options.dataset, options.subset, split, column, options.revision, data_files, limit)

    split, held_out = options.split or "train", options.validation_split
    source = dataset(split, options.data_files)
    if held_out is not None:
        if options.data_files:
            raise UserError(
                "validation_split: --data_files have no splits; valid: --validation_data_files PATH…, or the "
                "dataset's own files"
            )
        if held_out == split:
            raise UserError(f"validation_split: {split!r} is what is trained on; valid: another split")
        return WithValidation(source, dataset(held_out, None))
    if options.validation_data_files is not None:
        return WithValidation(source, dataset(split, options.validation_data_files))
    if options.validation_fraction is None and options.validation_documents is None:
        _report_unused_split(source)
    return source


def _report_unused_split(source: HubDataset) -> None:
    """Tell the user about an unused validation split of the dataset: it is not used unless asked for."""
    for name in [] if source.data_files else source.splits():
        if name.startswith(("valid", "dev", "test")) and name != source.split:
            print(
                f"validation  {source.name} has a split {name!r}, which is not used: a share of "
                f"{source.split!r} is held out; --validation_split {name} validates on it instead"
            )
            return


def _refuse(options: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise UserError(f"{name}: --{name} {reason}")


def _selection(options: argparse.Namespace, source: TextSource) -> Selection:
    fraction, documents = options.validation_fraction, options.validation_documents
    if fraction is not None and documents is not None:
        raise UserError(
            "validation: give either --validation_fraction or --validation_documents, and not both"
        )
    for name in _VALIDATION_SOURCES:
        if getattr(options, name) is not None and (fraction is not None or documents is not None):
            raise UserError(f"validation: give either --{name} or a share of the training text, and not both")
    if fraction is None:
        remote = isinstance(source, HubDataset) and not source.local
        fraction = HUB_VALIDATION_FRACTION if remote else VALIDATION_FRACTION
    return Selection(
        validation_fraction=fraction,
        validation_documents=documents,
        drop_duplicates=options.drop_duplicates,
        max_tokens=options.max_tokens,
    )


def run_prepare(argv: Sequence[str]) -> Path | None:
    """Prepare the corpus that the command line asks for and return its folder; None if it asks for a share
    only."""
    options = _prepare_parser().parse_args(argv)
    if options.tokenizer is not None and options.train_tokenizer is not None:
        raise UserError("tokenizer: give either --tokenizer or --train_tokenizer, and not both")
    source = _source(options)
    selection = _selection(options, source)
    size = DEFAULT_VOCABULARY if options.train_tokenizer is None else options.train_tokenizer
    if options.out is None:
        builtin = isinstance(source, BuiltinCorpus) and selection == DEFAULT_SELECTION
        if not builtin or options.tokenizer is not None or options.shard is not None:
            raise UserError("out: missing; give the folder to write, such as --out data/NAME")
        return prepare_builtin("data", size, say)
    tokenizer = size if options.tokenizer is None else load_tokenizer(options.tokenizer)
    place = Path(options.out)
    preparation = Preparation(source, place, tokenizer, selection, say, options.processes)
    if options.shard is None:
        if options.merge:
            raise UserError(
                "merge: --merge goes with --shard I/N; valid: --shard I/N --merge, or merge FOLDER"
            )
        return _drawn(preparation.make())
    units = preparation.make_share(*options.shard)
    if options.merge and units_missing(options.out) == 0:
        return _drawn(merge(options.out))
    number, count = options.shard
    print(
        f"shard       {number}/{count} is done ({units} units); after all: "
        f"python -m pretrain.prepare merge {options.out}"
    )
    return None


def _drawn(folder: Path) -> Path:
    """Draw how long the documents of *folder* are, if nobody has; returns the folder."""
    lengths = CorpusMeta.read(folder).document_lengths
    if lengths and not (folder / LENGTHS_FILE).is_file():
        draw_lengths(lengths, folder / LENGTHS_FILE)
    return folder


def _folder(prog: str, description: str, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of a command that takes a folder."""
    parser = CommandParser(
        prog=f"python -m pretrain.prepare {prog}", description=description, allow_abbrev=False
    )
    parser.add_argument("folder", help="corpus folder, or the prefix of a .bin/.idx pair")
    if prog != "merge":
        parser.add_argument(
            "--tokenizer", metavar="FOLDER", help="of a .bin/.idx pair, which does not say it"
        )
    return parser.parse_args(argv)


def _open(*command: Any) -> Corpus:
    options = _folder(*command)
    return Corpus.open(options.folder, load_tokenizer(options.tokenizer) if options.tokenizer else None)


def run_inspect(argv: Sequence[str]) -> None:
    """Print the summary of a corpus and the decoded start of a training document."""
    corpus = _open("inspect", "Show what a corpus holds.", argv)
    print(summary(corpus))
    print(sample(corpus))


def run_verify(argv: Sequence[str]) -> None:
    """Check every byte of a corpus, and print what was checked."""
    for line in verify(_open("verify", "Check hashes, bounds and document ends of a corpus.", argv)):
        print(line)


def run_merge(argv: Sequence[str]) -> Path:
    """Make a corpus folder from finished shards, and return it."""
    return _drawn(merge(_folder("merge", "Make the corpus of what --shard I/N has tokenized.", argv).folder))


COMMANDS: dict[str, Callable[[Sequence[str]], Path | None]] = {
    "inspect": run_inspect,
    "verify": run_verify,
    "merge": run_merge,
    "labelled": run_labelled,
}
"""Each returns the folder that it has made, or None."""


def _run(arguments: list[str]) -> None:
    try:
        command = COMMANDS.get(arguments[0]) if arguments else None
        folder = run_prepare(arguments) if command is None else command(arguments[1:])
        if folder is not None:
            print(summary(Corpus.open(folder)))
            if (folder / LENGTHS_FILE).is_file():
                print(f"histogram   {folder / LENGTHS_FILE}")
            print(f"ready       {folder}")
    except OSError as error:
        if error.errno is not None:
            raise
        # Libraries report damaged or remote files by an OSError without a number.
        raise UserError(str(error.strerror or error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(_run, arguments, "interrupted; the same command goes on where it stopped")
