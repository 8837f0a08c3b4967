"""Reads labelled examples, pairs of text and label: TSV as GLUE has it, JSON Lines, FASTA, and
built-in ones."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from model.errors import UserError, escape_controls, quote, suggest
from pretrain.prepare.sources.plain_files import BuiltinCorpus
from pretrain.prepare.sources.streams import (
    COMPRESSED,
    DAMAGE,
    MAX_DOCUMENT_BYTES,
    check_text,
    make_limit_error,
    open_stream,
    parse_json,
    strip_compression,
)

TEXT_COLUMNS = ("sentence", "text", "sequence")
"""Where the text is looked for if no column is named: SST-2's name first."""
LABEL_COLUMN = "label"
ENDINGS = {
    **dict.fromkeys((".tsv", ".txt"), "tsv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".fasta", ".fa", ".fas", ".fna", ".faa"), "fasta"),
}
MOST_CLASSES = 1000
PACKAGES = 8
"""Classes of the built-in task: the packages with most text, of those with at least PACKAGE_FILES modules."""
PACKAGE_FILES = 10
SNIPPET_CHARACTERS = (100, 400)
"""A snippet ends with a line, and has this many characters."""
MOST_SNIPPETS = {"training": 600, "validation": 100}
"""Of a package: packages of unlike size have about as many."""
HELD_OUT_FILES = 0.2
_LONGEST_LINE = 6 * MAX_DOCUMENT_BYTES  # a character may be written as \uXXXX


Record = tuple[int, dict[Any, Any]]
"""The number of a line, and what it holds by column."""


class Example(NamedTuple):
    """One example of a classification task."""

    text: str
    label: str


def read_examples(
    path: Path, text_column: str | None = None, label_column: str | None = None
) -> list[Example]:
    """The examples of a file, in order. The suffix determines its format; ``.gz``, ``.bz2``, ``.xz`` and
    ``.zst`` are decompressed.

    A TSV file begins with the names of its columns, and quotes mean nothing in it. JSON Lines are objects.
    FASTA has the columns ``sequence`` and ``label``, the last word of a sequence's header, where spaces and
    ``|`` part words.

    Args:
        text_column: where the text is; by default the first of TEXT_COLUMNS that there is.
        label_column: where the label is; by default LABEL_COLUMN.

    Raises:
        UserError: no such file, another kind of file, no such column, a line that does not fit, no example.
    """
    read = {"tsv": _read_tsv, "jsonl": _read_json_lines, "fasta": _read_fasta}[detect_kind(path)]
    try:
        with open_stream(path) as raw:
            lines = _lines(path, io.TextIOWrapper(raw, "utf-8-sig", newline=None))
            records = read(path, lines)
            examples = list(_choose_columns(path, records, text_column, label_column or LABEL_COLUMN))
    except FileNotFoundError:
        raise UserError(f"labelled: {str(path)!r} does not exist; give a file of labelled examples") from None
    except UserError:
        raise
    except (*DAMAGE, csv.Error) as error:
        if limit := make_limit_error(path, error, "labelled"):
            raise limit from None
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"labelled: {str(path)!r} cannot be read ({reason})") from None
    if not examples:
        raise UserError(f"labelled: {str(path)!r} holds no example")
    return examples


def detect_kind(path: Path) -> str:
    """tsv, jsonl or fasta, by the ending. UserError for any other."""
    kind = ENDINGS.get(Path(strip_compression(path.name)).suffix)
    if kind is None:
        endings = ", ".join(ENDINGS)
        raise UserError(
            f"labelled: {str(path)!r} is of no known kind; give {endings}, or one with "
            f"{', '.join(COMPRESSED)}"
        )
    return kind


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of a file, none of which may be longer than a document can be in JSON."""
    for number in itertools.count(1):
        line = file.readline(_LONGEST_LINE + 1)
        if len(line) > _LONGEST_LINE:
            raise UserError(
                f"labelled: line {number} of {str(path)!r} has more than {_LONGEST_LINE:,} characters; give "
                "one example a line"
            )
        if not line:
            return
        yield line


def _read_tsv(path: Path, lines: Iterator[str]) -> Iterator[Record]:
    csv.field_size_limit(_LONGEST_LINE)
    rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    names = rows.fieldnames or ()
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"labelled: {str(path)!r} has two columns {twice[0]!r}; give each its own name")
    for row in rows:
        if None in row or None in row.values():  # more fields than names, or fewer
            raise UserError(
                f"labelled: line {rows.line_num} of {str(path)!r} has not the {len(names)} "
                "fields that its first line names; a tab parts fields, and quotes are text; else write "
                "JSON Lines"
            )
        yield rows.line_num, row


def _read_json_lines(path: Path, lines: Iterator[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = None
        try:
            record = parse_json(line)
        except RecursionError:
            raise UserError(
                f"labelled: line {number} of {str(path)!r} is nested deeper than Python reads (at least "
                "roughly 900 levels); leave out the field that is"
            ) from None
        except ValueError:
            pass
        if not isinstance(record, dict):
            raise UserError(
                f"labelled: line {number} of {str(path)!r} is not a JSON object, such as "
                '{"text": …, "label": …}'
            )
        yield number, record


def _read_fasta(path: Path, lines: Iterator[str]) -> Iterator[Record]:
    before, *records = re.split(r"^[ \t]*>", "".join(lines), flags=re.MULTILINE)
    if before.strip():
        raise UserError(f"labelled: {str(path)!r} does not begin with a FASTA header, >NAME LABEL")
    number = 1 + before.count("\n")
    for record in records:
        header, *sequence = record.split("\n")
        _, *words = header.replace("|", " ").split() or [""]  # the name, and what follows
        text = "".join(line.strip() for line in sequence).upper()
        yield number, {TEXT_COLUMNS[-1]: text, LABEL_COLUMN: words[-1] if words else ""}
        number += len(sequence)


def _choose_columns(
    path: Path, records: Iterable[Record], text_column: str | None, label_column: str
) -> Iterator[Example]:
    """The text and label of each record."""
    for number, record in records:
        where = f"line {number} of {str(path)!r}"
        text_name = text_column or next((name for name in TEXT_COLUMNS if name in record), TEXT_COLUMNS[0])
        for option, name in (("text_column", text_name), ("label_column", label_column)):
            if name not in record:
                raise UserError(
                    f"{option}: {where} has no {name!r}; valid: --{option} with one of "
                    f"{', '.join(map(str, record))}{suggest(name, record)}"
                )
        text, label = record[text_name], record[label_column]
        problem = check_text(text, MAX_DOCUMENT_BYTES)[1]
        if not isinstance(text, str) or problem:
            raise UserError(
                f"labelled: {where} has the text {quote(text)} ({problem}); give text that is not empty, "
                f"without NUL, of at most {MAX_DOCUMENT_BYTES:,} bytes"
            )
        word = str(label).strip()
        if not (isinstance(label, str | int) and word and escape_controls(word) == word):
            raise UserError(f"labelled: {where} has the label {quote(label)}; give a word or an integer")
        yield Example(text, word)


def builtin_examples(source: BuiltinCorpus | None = None) -> dict[str, list[Example]]:
    """Snippets of the standard library and the package that each comes from, by split: a task that needs no
    download.

    The classes are the PACKAGES packages with most text. A file is in one split, so no snippet's neighbour is
    in the other. The choice depends on the texts alone.

    Raises:
        UserError: the standard library has too few packages.
    """
    texts: dict[str, dict[str, str]] = defaultdict(dict)
    for document in (source or BuiltinCorpus()).documents():
        package, slash, _ = document.path_or_id.partition("/")
        if slash:
            texts[package][document.path_or_id] = document.text
    large = {name: files for name, files in texts.items() if len(files) >= PACKAGE_FILES}
    sizes = {name: sum(map(len, files.values())) for name, files in large.items()}
    packages = sorted(sorted(sizes, key=lambda name: (-sizes[name], name))[:PACKAGES])
    if len(packages) < 2:
        raise UserError("data: the standard library has too few packages for the task; give --data FOLDER")
    splits: dict[str, list[Example]] = {name: [] for name in MOST_SNIPPETS}
    for package in packages:
        files = sorted(texts[package], key=lambda name: _digest(name))
        held_out = max(1, round(HELD_OUT_FILES * len(files)))
        for split, names in (("validation", files[:held_out]), ("training", files[held_out:])):
            snippets = {snippet for name in names for snippet in _snippets(texts[package][name])}
            chosen = sorted(snippets, key=_digest)[: MOST_SNIPPETS[split]]
            splits[split] += [Example(snippet, package) for snippet in chosen]
    return splits


def _snippets(text: str) -> Iterator[str]:
    """Neighbouring lines of *text*, as many as fit into a snippet."""
    least, most = SNIPPET_CHARACTERS
    lines: list[str] = []
    for line in itertools.chain(text.splitlines(keepends=True), [" " * most]):
        if sum(map(len, lines)) + len(line) > most:
            if least <= len(snippet := "".join(lines)) <= most and not snippet.isspace():
                yield snippet
            lines = []
        lines.append(line)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def class_names(examples: Sequence[Example]) -> list[str]:
    """The labels of *examples*, each once: integers by value, words by alphabet.

    Raises:
        UserError: fewer than two, or more than MOST_CLASSES.
    """
    labels = {example.label for example in examples}
    if not 2 <= len(labels) <= MOST_CLASSES:
        count = f"{len(labels):,} different labels"
        raise UserError(f"labelled: the training examples have {count}; give 2 to {MOST_CLASSES:,}")
    try:
        return sorted(labels, key=lambda label: (int(label), label))
    except ValueError:
        return sorted(labels)
