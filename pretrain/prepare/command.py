"""Turn text into a corpus folder: ``python -m pretrain.prepare``, ``… labelled``, ``… merge``, ``… inspect``,
``… verify``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.errors import UserError, closest, run_command
from pretrain.config.command_line import CommandParser
from pretrain.data.corpus import Corpus
from pretrain.data.sources.files import BuiltinCorpus, TextFiles
from pretrain.data.sources.readers import FORMATS, MAX_DOCUMENT_BYTES
from pretrain.data.sources.source import TextSource
from pretrain.data.sources.with_validation import WithValidation
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.prepare.labelled import run_labelled
from pretrain.prepare.output import Selection
from pretrain.prepare.pipeline import (
    LENGTHS_FILE,
    VALIDATION_FRACTION,
    merge,
    prepare,
    prepare_builtin,
    prepare_share,
    units_missing,
)
from pretrain.prepare.progress import ProgressPrinter
from pretrain.prepare.verify import bytes_per_token, verify

if TYPE_CHECKING:
    from pretrain.data.sources.hub import HubDataset

DATASETS = ("builtin",)
DEFAULT_VOCABULARY = 4096
# A dataset on the hub is large: half a per cent of FineWeb's 10 billion tokens is more than validation needs.
HUB_VALIDATION_FRACTION = 0.005
_SAMPLE_TOKENS = 100
_FOR_FILES = ("format", "skip_damaged", "validation_text")
_FOR_HUB = ("subset", "split", "revision", "data_files", "validation_split", "validation_data_files")
_VALIDATION_SOURCES = ("validation_text", "validation_split", "validation_data_files")

_print_progress = ProgressPrinter()


def _prepare_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m pretrain.prepare",
        description="Tokenize text into a corpus folder that the trainer reads. Interrupted, the same command goes on.",
        epilog="python -m pretrain.prepare inspect FOLDER shows what a corpus holds, verify FOLDER checks every byte, "
        "merge FOLDER ends a preparation in shards, labelled makes a classification task.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    source_options = parser.add_argument_group("where the text comes from")
    source_options.add_argument(
        "--text", nargs="+", metavar="PATH", help="files, folders or globs, .gz and .zst too"
    )
    source_options.add_argument(
        "--format", choices=FORMATS, default=None,
        help="of --text. auto: by the file's ending, JSON Lines (jsonl), a JSON array (json), csv, tsv, parquet, or "
        "text, a document a file; lines: text, a document a line (default: auto)",
    )  # fmt: skip
    source_options.add_argument(
        "--dataset", metavar="NAME",
        help="builtin (the running Python's standard library), a dataset on the Hugging Face hub, a local folder that "
        "the datasets library reads, or json, parquet, … with --data_files",
    )  # fmt: skip
    source_options.add_argument("--subset", metavar="NAME", help="of the dataset, such as sample-10BT")
    source_options.add_argument("--split", metavar="NAME", help="of the dataset (default: train)")
    source_options.add_argument("--revision", metavar="NAME", help="branch, tag or commit of the dataset")
    source_options.add_argument(
        "--data_files", nargs="+", metavar="PATH", help="files or globs in place of the dataset's own"
    )
    source_options.add_argument(
        "--column", metavar="NAME", help="JSON field or column that holds the text (default: text)"
    )
    source_options.add_argument(
        "--skip_damaged", action="store_true", default=None,
        help="count truncated files of --text and take what can be read of them, instead of refusing them",
    )  # fmt: skip
    source_options.add_argument(
        "--max_document_bytes", type=int, default=MAX_DOCUMENT_BYTES, metavar="N",
        help="leave out longer documents (default: %(default)s)",
    )  # fmt: skip
    add(
        "--tokenizer",
        metavar="FOLDER",
        help="tokenizer folder, SentencePiece .model file, or hub name such as gpt2",
    )
    add(
        "--train_tokenizer", type=int, metavar="N",
        help=f"train a SentencePiece tokenizer of N entries (default: {DEFAULT_VOCABULARY})",
    )  # fmt: skip
    add(
        "--validation_fraction", type=float, metavar="F",
        help="fraction of documents held out for validation, chosen by their hash "
        f"(default: {VALIDATION_FRACTION}; of datasets that come over the network {HUB_VALIDATION_FRACTION})",
    )  # fmt: skip
    add(
        "--validation_text", nargs="+", metavar="PATH",
        help="with --text: validate on this text, and hold out nothing of --text",
    )  # fmt: skip
    add(
        "--validation_split", metavar="NAME",
        help="with --dataset: validate on this split of it, such as validation, and hold out nothing of --split",
    )  # fmt: skip
    add(
        "--validation_data_files", nargs="+", metavar="PATH",
        help="with --data_files: validate on these files, and hold out nothing of those",
    )  # fmt: skip
    add("--validation_documents", type=int, metavar="N", help="hold out N documents instead, chosen likewise")
    add("--drop_duplicates", action="store_true", help="keep the first of documents with equal text only")
    add(
        "--max_tokens",
        type=int,
        metavar="N",
        help="stop before the document that would exceed N tokens in all",
    )
    add(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
        help="processes that tokenize; the output does not depend on it (default: the cores, here %(default)s)",
    )  # fmt: skip
    add("--shard", type=_share, metavar="I/N", help="do share I of N only (0 ≤ I < N); then: merge FOLDER")
    add("--merge", action="store_true", help="with --shard: the share that finishes last merges them all")
    add("--out", metavar="FOLDER", help="corpus folder to write, such as data/NAME")
    return parser


def _share(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    try:
        return int(number), int(count)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N, such as 0/16") from None


def _source(arguments: argparse.Namespace) -> TextSource:
    if (arguments.text is None) == (arguments.dataset is None):
        raise UserError("source: give either --text PATH… or --dataset builtin (or another NAME)")
    if arguments.text is not None:
        _refuse(arguments, _FOR_HUB, "goes with --dataset NAME, not with --text")

        def files(paths: Sequence[str]) -> TextFiles:
            return TextFiles(
                paths,
                format=arguments.format or "auto",
                column=arguments.column or "text",
                max_document_bytes=arguments.max_document_bytes,
                skip_damaged=bool(arguments.skip_damaged),
            )

        text = files(arguments.text)
        return WithValidation(text, files(held_out)) if (held_out := arguments.validation_text) else text
    _refuse(arguments, _FOR_FILES, "goes with --text PATH…, not with --dataset")
    if arguments.dataset in DATASETS:
        _refuse(arguments, (*_FOR_HUB, "column"), "does not apply to --dataset builtin")
        return BuiltinCorpus()
    if "/" not in arguments.dataset and closest(arguments.dataset, DATASETS):
        raise UserError(
            f"dataset: {arguments.dataset!r} is unknown; valid: {', '.join(DATASETS)}, or --text PATH…"
            + closest(arguments.dataset, DATASETS)
        )
    from pretrain.data.sources.hub import HubDataset

    def dataset(split: str, data_files: Sequence[str] | None) -> HubDataset:
        return HubDataset(
            arguments.dataset,
            arguments.subset,
            split,
            arguments.column or "text",
            arguments.revision,
            data_files,
            arguments.max_document_bytes,
        )

    split = arguments.split or "train"
    source = dataset(split, arguments.data_files)
    if arguments.validation_split is not None:
        if arguments.data_files:
            raise UserError(
                "validation_split: --data_files have no splits; valid: --validation_data_files PATH…, or the "
                "dataset's own files"
            )
        if arguments.validation_split == split:
            raise UserError(f"validation_split: {split!r} is what is trained on; valid: another split")
        return WithValidation(source, dataset(arguments.validation_split, None))
    if arguments.validation_data_files is not None:
        return WithValidation(source, dataset(split, arguments.validation_data_files))
    if arguments.validation_fraction is None and arguments.validation_documents is None:
        _report_unused_split(source)
    return source


def _report_unused_split(source: HubDataset) -> None:
    """Tell the user about an unused validation split of the dataset: it is not used unless asked for."""
    if source.data_files:
        return
    unused = [
        name for name in source.splits() if name.startswith(("valid", "dev", "test")) and name != source.split
    ]
    if unused:
        print(
            f"validation  {source.name} has a split {unused[0]!r}, which is not used: a share of {source.split!r} is "
            f"held out; --validation_split {unused[0]} validates on it instead"
        )


def _refuse(arguments: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            raise UserError(f"{name}: --{name} {reason}")


def _selection(arguments: argparse.Namespace, source: TextSource) -> Selection:
    fraction, documents = arguments.validation_fraction, arguments.validation_documents
    if fraction is not None and documents is not None:
        raise UserError(
            "validation: give either --validation_fraction or --validation_documents, and not both"
        )
    for name in _VALIDATION_SOURCES:
        if getattr(arguments, name) is not None and (fraction is not None or documents is not None):
            raise UserError(f"validation: give either --{name} or a share of the training text, and not both")
    if fraction is None:
        local = isinstance(source, BuiltinCorpus | TextFiles | WithValidation) or getattr(
            source, "local", False
        )
        fraction = VALIDATION_FRACTION if local else HUB_VALIDATION_FRACTION
    return Selection(fraction, documents, arguments.drop_duplicates, arguments.max_tokens)


def run_prepare(argv: Sequence[str]) -> Path | None:
    """Prepare the corpus that the command line asks for and return its folder; None if it asks for a share only."""
    arguments = _prepare_parser().parse_args(argv)
    if arguments.tokenizer is not None and arguments.train_tokenizer is not None:
        raise UserError("tokenizer: give either --tokenizer or --train_tokenizer, and not both")
    source = _source(arguments)
    selection = _selection(arguments, source)
    train = arguments.train_tokenizer if arguments.train_tokenizer is not None else DEFAULT_VOCABULARY
    if arguments.out is None:
        default_settings = arguments.tokenizer is None and selection == Selection(VALIDATION_FRACTION)
        if not (isinstance(source, BuiltinCorpus) and default_settings and arguments.shard is None):
            raise UserError("out: missing; give the folder to write, such as --out data/NAME")
        return prepare_builtin("data", train, _print_progress)
    tokenizer: dict[str, Any] = {"train_tokenizer": train}
    if arguments.tokenizer is not None:
        tokenizer = {"tokenizer": load_tokenizer(arguments.tokenizer)}
    if arguments.merge and arguments.shard is None:
        raise UserError("merge: --merge goes with --shard I/N; valid: --shard I/N --merge, or merge FOLDER")
    if arguments.shard is not None:
        units = prepare_share(
            source, arguments.out, arguments.shard, selection,
            processes=arguments.processes, progress=_print_progress, **tokenizer,
        )  # fmt: skip
        number, count = arguments.shard
        if arguments.merge and units_missing(arguments.out) == 0:
            return merge(arguments.out, draw=True)
        print(f"shard       {number}/{count} is done ({units} units); after all: "
              f"python -m pretrain.prepare merge {arguments.out}")  # fmt: skip
        return None
    return prepare(
        source, arguments.out, processes=arguments.processes, draw=True, progress=_print_progress,
        **vars(selection), **tokenizer,
    )  # fmt: skip


def summary(corpus: Corpus) -> str:
    """Describe a corpus, a line for each of source, tokenizer, splits, lengths and skipped documents."""
    meta = corpus.meta
    source = _described(meta["source"])
    tokenizer = meta["tokenizer"]
    lines = [
        f"source      {source}; content {meta['content_hash'][:12]}",
        f"tokenizer   {tokenizer['name']}, {tokenizer['vocab_size']:,} entries; {tokenizer['hash'][:12]}",
    ]
    if "validation" in meta["source"]:
        lines.insert(1, f"held out    {_described(meta['source']['validation'])}")
    for name in ("training", "validation"):
        counts = meta[name]
        size, ratio = "", bytes_per_token(corpus, name)
        if "bytes" in counts:
            size = f"{counts['bytes']:,} bytes, "
        lines.append(
            f"{name:<12}{counts['documents']:,} documents, {size}{counts['tokens']:,} tokens, "
            f"{ratio:.3f} bytes per token"
        )
    if classes := meta.get("classes"):
        lines.append(
            f"classes     {len(classes)}: {', '.join(classes[:20])}{', …' if len(classes) > 20 else ''}"
        )
    if lengths := meta.get("document_lengths"):
        figures = ", ".join(
            f"{key} {lengths[key]:,}" for key in ("mean", "p10", "p50", "p90", "p99", "longest")
        )
        lines.append(f"lengths     {figures} tokens")
    skipped = ", ".join(f"{count} {reason}" for reason, count in meta["skipped"].items())
    lines.append(f"skipped     {skipped or 'none'}")
    return "\n".join(lines)


def _described(source: dict[str, Any]) -> str:
    """A source of ``meta.json`` in words."""
    fields = {key: value for key, value in source.items() if key != "validation"}
    return ", ".join(
        f"{key} {' '.join(value) if isinstance(value, list) else value}" for key, value in fields.items()
    )


def _open(prog: str, description: str, argv: Sequence[str]) -> Corpus:
    """Open the corpus that a command names, with --tokenizer for a bare pair."""
    parser = CommandParser(
        prog=f"python -m pretrain.prepare {prog}", description=description, allow_abbrev=False
    )
    parser.add_argument("folder", help="corpus folder, or the prefix of a .bin/.idx pair")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="of a .bin/.idx pair, which does not say it")
    arguments = parser.parse_args(argv)
    tokenizer: Tokenizer | None = (
        load_tokenizer(arguments.tokenizer) if arguments.tokenizer is not None else None
    )
    return Corpus.open(arguments.folder, tokenizer)


def run_inspect(argv: Sequence[str]) -> None:
    """Print the summary of a corpus and the decoded start of a training document."""
    corpus = _open("inspect", "Show what a corpus holds.", argv)
    print(summary(corpus))
    document = corpus.training.num_documents // 2
    tokens = corpus.training.document(document)[:_SAMPLE_TOKENS]
    print(f"sample      the first {tokens.size} tokens of training document {document}:")
    print(corpus.tokenizer.decode(tokens))


def run_verify(argv: Sequence[str]) -> None:
    """Check every byte of a corpus, and print what was checked."""
    for line in verify(_open("verify", "Check hashes, bounds and document ends of a corpus.", argv)):
        print(line)


def run_merge(argv: Sequence[str]) -> None:
    """Make a corpus folder from finished shards."""
    parser = CommandParser(
        prog="python -m pretrain.prepare merge",
        description="Make the corpus folder of what --shard I/N has tokenized.",
    )
    parser.add_argument("folder", help="the --out of the shards")
    _print_ready(merge(parser.parse_args(argv).folder, draw=True))


def _run_prepare(argv: Sequence[str]) -> None:
    folder = run_prepare(argv)
    if folder is not None:
        _print_ready(folder)


def _print_ready(folder: Path) -> None:
    print(summary(Corpus.open(folder)))
    if (folder / LENGTHS_FILE).is_file():
        print(f"histogram   {folder / LENGTHS_FILE}")
    print(f"ready       {folder}")


def _run_labelled(argv: Sequence[str]) -> None:
    _print_ready(run_labelled(argv))


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "inspect": run_inspect,
    "verify": run_verify,
    "merge": run_merge,
    "labelled": _run_labelled,
}


def _run(arguments: list[str]) -> None:
    try:
        if arguments and arguments[0] in COMMANDS:
            COMMANDS[arguments[0]](arguments[1:])
        else:
            _run_prepare(arguments)
    except OSError as error:
        if error.errno is not None:
            raise
        # Libraries report damaged or remote files by an OSError without a number.
        raise UserError(str(error.strerror or error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(_run, arguments, "interrupted; the same command goes on where it stopped")
