"""Turn text into a corpus folder: ``python -m pretrain.prepare``, and ``… inspect FOLDER``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from model.errors import UserError, closest
from pretrain.data.corpus import BuiltinCorpus, TextFiles, TextSource
from pretrain.data.prepare import VALIDATION_FRACTION, Progress, prepare, prepare_builtin
from pretrain.data.sequences import Corpus
from pretrain.data.tokenizer import load_tokenizer

DATASETS = ("builtin",)
DEFAULT_VOCABULARY = 4096
_SAMPLE_TOKENS = 100


class _Parser(argparse.ArgumentParser):
    """argparse that reports bad arguments as every other bad input."""

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("unrecognized arguments: "):
            given = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
            hint = closest(given, [option for action in self._actions for option in action.option_strings])
        raise UserError(message + hint)


def _prepare_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m pretrain.prepare",
        description="Tokenize text into a corpus folder that the trainer reads.",
        epilog="python -m pretrain.prepare inspect FOLDER shows what a corpus folder holds.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--text", nargs="+", metavar="PATH", help="files, folders or globs; a file is a document"
    )
    parser.add_argument("--dataset", metavar="NAME", help="builtin: the running Python's standard library")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="tokenizer folder, SentencePiece .model file, or hub name such as gpt2",
    )
    parser.add_argument(
        "--train_tokenizer", type=int, metavar="N",
        help=f"train a SentencePiece tokenizer of N entries (default: {DEFAULT_VOCABULARY})",
    )  # fmt: skip
    parser.add_argument(
        "--validation_fraction", type=float, default=VALIDATION_FRACTION, metavar="F",
        help="fraction of documents held out for validation, chosen by their hash (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FOLDER", help="corpus folder to write, such as data/NAME")
    return parser


def _source(arguments: argparse.Namespace) -> TextSource:
    if (arguments.text is None) == (arguments.dataset is None):
        raise UserError("source: give either --text PATH… or --dataset builtin")
    if arguments.text is not None:
        return TextFiles(arguments.text)
    if arguments.dataset not in DATASETS:
        raise UserError(
            f"dataset: {arguments.dataset!r} is unknown; valid: {', '.join(DATASETS)}, or --text PATH…"
            + closest(arguments.dataset, DATASETS)
        )
    return BuiltinCorpus()


def _print_progress(progress: Progress) -> None:
    print(progress, flush=True)


def run_prepare(argv: Sequence[str]) -> Path:
    """Prepare what the command line asks for and return the folder."""
    arguments = _prepare_parser().parse_args(argv)
    source = _source(arguments)
    if arguments.tokenizer is not None and arguments.train_tokenizer is not None:
        raise UserError("tokenizer: give either --tokenizer or --train_tokenizer, and not both")
    train = arguments.train_tokenizer if arguments.train_tokenizer is not None else DEFAULT_VOCABULARY
    if arguments.out is None:
        default = arguments.tokenizer is None and arguments.validation_fraction == VALIDATION_FRACTION
        if not (isinstance(source, BuiltinCorpus) and default):
            raise UserError("out: missing; give the folder to write, such as --out data/NAME")
        return prepare_builtin("data", train, _print_progress)
    return prepare(
        source,
        arguments.out,
        tokenizer=load_tokenizer(arguments.tokenizer) if arguments.tokenizer is not None else None,
        train_tokenizer=None if arguments.tokenizer is not None else train,
        validation_fraction=arguments.validation_fraction,
        progress=_print_progress,
    )


def summary(corpus: Corpus) -> str:
    """What a corpus holds, a line for each of source, tokenizer, splits and skipped documents."""
    meta = corpus.meta
    source = ", ".join(f"{key} {value}" for key, value in meta["source"].items())
    tokenizer = meta["tokenizer"]
    lines = [
        f"source      {source}; content {meta['content_hash'][:12]}",
        f"tokenizer   {tokenizer['name']}, {tokenizer['vocab_size']:,} entries; {tokenizer['hash'][:12]}",
    ]
    for name in ("training", "validation"):
        counts = meta[name]
        lines.append(
            f"{name:<12}{counts['documents']:,} documents, {counts['bytes']:,} bytes, "
            f"{counts['tokens']:,} tokens, {counts['bytes'] / counts['tokens']:.3f} bytes per token"
        )
    skipped = ", ".join(f"{count} {reason}" for reason, count in meta["skipped"].items())
    lines.append(f"skipped     {skipped or 'none'}")
    return "\n".join(lines)


def run_inspect(argv: Sequence[str]) -> None:
    """Print the summary of a corpus folder and the decoded start of a training document."""
    parser = _Parser(
        prog="python -m pretrain.prepare inspect", description="Show what a corpus folder holds."
    )
    parser.add_argument("folder", help="corpus folder")
    corpus = Corpus.open(parser.parse_args(argv).folder)
    print(summary(corpus))
    document = corpus.training.num_documents // 2
    tokens = corpus.training.document(document)[:_SAMPLE_TOKENS]
    print(f"sample      the first {tokens.size} tokens of training document {document}:")
    print(corpus.tokenizer.decode(tokens))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 2 after printing ``error: …`` for bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["inspect"]:
            run_inspect(arguments[1:])
        else:
            folder = run_prepare(arguments)
            print(summary(Corpus.open(folder)))
            print(f"ready       {folder}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
