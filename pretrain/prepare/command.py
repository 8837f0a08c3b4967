"""``head-schedules prepare``: turns text into a corpus folder; ``… labelled``, ``… inspect``,
``… verify``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from model.declared import PositiveInt, declared
from model.errors import UserError
from pretrain.config.options import parse_options
from pretrain.data.corpus import Corpus
from pretrain.data.tokenizer import load_tokenizer
from pretrain.prepare.assemble import VALIDATION_FRACTION, Selection
from pretrain.prepare.inspection import sample, summary, verify
from pretrain.prepare.labelled import run_labelled
from pretrain.prepare.make import Preparation, check_tokenizer
from pretrain.prepare.sources.files import TextFiles
from pretrain.prepare.sources.hub import HubDataset
from pretrain.prepare.sources.pipes import pipes_as_files
from pretrain.prepare.sources.plain_files import BuiltinCorpus
from pretrain.prepare.sources.streams import MAX_DOCUMENT_BYTES
from pretrain.prepare.sources.text_source import TextSource
from pretrain.prepare.sources.with_validation import WithValidation
from pretrain.runtime.command import run_command
from pretrain.utils.env_check import check_variables
from pretrain.utils.files import output_folder, temporary_path
from pretrain.utils.format import print_lines

DEFAULT_VOCABULARY = 4096
# A dataset on the hub is large: half a per cent of FineWeb's 10 billion tokens is more than validation needs.
HUB_VALIDATION_FRACTION = 0.005
_OPTIONS_OF = {
    "text": ("format", "column", "skip_damaged", "validation_text"),
    "dataset": ("subset", "split", "revision", "column", "validation_split"),
    "dataset builtin": (),
}
"""Which options go with which source, of those that do not go with all."""


@declared()
class PrepareOptions:
    """The command line."""

    out: str
    """corpus folder to write, such as data/NAME"""
    text: tuple[str, ...] = ()
    """files, folders or globs, also .gz, .bz2, .xz and .zst"""
    format: Literal["auto", "text", "lines", "jsonl", "json", "csv", "tsv", "parquet"] | None = None
    """format of --text: text has a document per file, lines a document per line; jsonl (JSON Lines), json (a
    JSON array), csv, tsv (quotes are text) and parquet have one per record. auto goes by the file's suffix;
    csv reads a .tsv file with quotes that enclose (default: auto)"""
    dataset: str | None = None
    """builtin (the running Python's standard library), a dataset on the Hugging Face hub, or a local folder
    that the datasets library reads"""
    subset: str | None = None
    """subset of the dataset, such as sample-10BT"""
    split: str | None = None
    """split of the dataset (default: train)"""
    revision: str | None = None
    """branch, tag or commit of the dataset"""
    column: str | None = None
    """JSON field or column that holds the text; of several names, such as text,abstract, the first that a
    file (in JSON a record) has (default: text)"""
    skip_damaged: bool = False
    """with --text: of a truncated or damaged file take what can be read, and count it"""
    max_document_bytes: Annotated[int, Field(ge=1, lt=2**31)] = MAX_DOCUMENT_BYTES
    """leave out longer documents"""
    tokenizer: str | None = None
    """tokenizer folder, SentencePiece .model file, or hub name such as gpt2"""
    train_tokenizer: int | None = None
    """train a SentencePiece tokenizer with this many entries (default: 4096)"""
    lossy_tokenizer: bool = False
    """accept a tokenizer whose decoded tokens differ from the text, such as one that lower-cases it"""
    validation_fraction: float | None = None
    """fraction of documents held out for validation, chosen by their hash (default: 0.05; of datasets that
    come over the network 0.005)"""
    validation_text: tuple[str, ...] = ()
    """with --text: validate on this text, and hold out nothing of --text"""
    validation_split: str | None = None
    """with --dataset: validate on this split of it, such as validation, and hold out nothing of --split"""
    drop_duplicates: bool = False
    """keep the first of documents with equal text only"""
    max_tokens: int | None = None
    """stop before the document that would exceed this many tokens in all"""
    processes: PositiveInt | None = None
    """processes that tokenize (default: as many as cores); the output does not depend on it"""
    shard: Annotated[str, Field(pattern=r"^\d+/\d+$")] | None = None
    """do share I of N only, given as I/N (0 ≤ I < N); the share that is done last makes the folder"""


@declared()
class CorpusOptions:
    """The command line of a command that reads a corpus."""

    folder: str
    """corpus folder, or the prefix of a .bin/.idx pair"""
    tokenizer: str | None = None
    """tokenizer of a .bin/.idx pair, which does not name it"""


def _check_source(options: PrepareOptions) -> None:
    """Raise UserError for options that do not go together."""
    if bool(options.text) == (options.dataset is not None):
        raise UserError("source: give either --text PATH… or --dataset builtin (or another NAME)")
    kind = "text" if options.text else "dataset builtin" if options.dataset == "builtin" else "dataset"
    for name in {name for names in _OPTIONS_OF.values() for name in names} - {*_OPTIONS_OF[kind]}:
        if getattr(options, name):
            raise UserError(f"{name}: --{name} does not go with --{kind}; leave it out")
    if options.validation_fraction is not None and (options.validation_text or options.validation_split):
        raise UserError("validation_fraction: give it or a validation text, and not both")
    if options.validation_split == (split := options.split or "train"):
        raise UserError(f"validation_split: {split!r} is what is trained on; valid: another split")
    if options.tokenizer is not None and options.train_tokenizer is not None:
        raise UserError("tokenizer: give either --tokenizer or --train_tokenizer, and not both")


def _source(options: PrepareOptions, text: Sequence[str], validation_text: Sequence[str]) -> TextSource:
    """The source of the options, whose paths of text may have become others."""
    source = _one_source(options, text, options.split or "train")
    if validation_text or options.validation_split is not None:
        return WithValidation(source, _one_source(options, validation_text, options.validation_split or ""))
    return source


def _one_source(options: PrepareOptions, paths: Sequence[str], split: str) -> TextSource:
    column, limit = options.column or "text", options.max_document_bytes
    if options.dataset is None:
        return TextFiles(paths, "text", options.format or "auto", column, limit, options.skip_damaged)
    if options.dataset == "builtin":
        return BuiltinCorpus(max_document_bytes=limit)
    return HubDataset(options.dataset, options.subset, split, column, options.revision, limit)


def run_prepare(argv: Sequence[str]) -> Path | None:
    """Prepare the corpus that the command line asks for and return its folder; None if it asks for a share
    and others are missing."""
    options = parse_options(
        PrepareOptions,
        argv,
        "head-schedules prepare",
        "Tokenize text into a corpus folder that the trainer reads. After an interruption, run the same "
        "command again to resume.",
        epilog="head-schedules prepare inspect FOLDER shows what a corpus holds, verify FOLDER checks "
        "every byte, labelled makes a classification task.",
    )
    _check_source(options)
    fraction = options.validation_fraction
    selection = Selection(
        validation_fraction=VALIDATION_FRACTION if fraction is None else fraction,
        drop_duplicates=options.drop_duplicates,
        max_tokens=options.max_tokens,
    )
    size = DEFAULT_VOCABULARY if options.train_tokenizer is None else options.train_tokenizer
    tokenizer = size if options.tokenizer is None else load_tokenizer(options.tokenizer)
    check_tokenizer(tokenizer)
    out = output_folder(options.out)
    copies = temporary_path(out.parent / f"{out.name}.pipes")
    with pipes_as_files([*options.text, *options.validation_text], copies, print_lines) as paths:
        count = len(options.text)
        source = _source(options, paths[:count], paths[count:])
        if fraction is None and isinstance(source, HubDataset) and not source.local:
            selection = replace(selection, validation_fraction=HUB_VALIDATION_FRACTION)
        lossy = options.lossy_tokenizer
        processes = options.processes or len(os.sched_getaffinity(0))
        preparation = Preparation(
            source, out, tokenizer, selection, print_lines, processes, lossy_tokenizer=lossy
        )
        if options.shard is None:
            return preparation.make()
        number, count = map(int, options.shard.split("/"))
        folder = preparation.make_share(number, count)
    if folder is None:
        print_lines(f"shard       {options.shard} is done; the share that is done last makes {options.out}")
    return folder


def _open(name: str, description: str, argv: Sequence[str]) -> Corpus:
    options = parse_options(CorpusOptions, argv, f"head-schedules prepare {name}", description, ["folder"])
    return Corpus.open(options.folder, load_tokenizer(options.tokenizer) if options.tokenizer else None)


def run_inspect(argv: Sequence[str]) -> None:
    """Print the summary of a corpus and the decoded start of a training document."""
    corpus = _open("inspect", "Show what a corpus holds.", argv)
    print_lines(summary(corpus), sample(corpus))


def run_verify(argv: Sequence[str]) -> None:
    """Check every byte of a corpus, and print what was checked."""
    for line in verify(_open("verify", "Check the hashes and tokens of a corpus.", argv)):
        print(line)


SUBCOMMANDS: dict[str, Callable[[Sequence[str]], Path | None]] = {
    "inspect": run_inspect,
    "verify": run_verify,
    "labelled": run_labelled,
}
"""Each returns the folder that it has made, or None."""


def _run(arguments: list[str]) -> None:
    try:
        check_variables("start")
        command = SUBCOMMANDS.get(arguments[0]) if arguments else None
        folder = run_prepare(arguments) if command is None else command(arguments[1:])
        if folder is not None:
            print_lines(summary(Corpus.open(folder)))
            print_lines(f"ready       {folder}")
    except OSError as error:
        if error.errno is not None:
            raise
        # Libraries report damaged or remote files by an OSError without a number.
        raise UserError(str(error.strerror or error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(_run, arguments, "interrupted; run the same command again to resume")
