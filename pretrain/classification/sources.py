"""Reads labelled examples, pairs of text and label: TSV as GLUE has it, JSON Lines, FASTA, and
built-in ones."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from model.errors import UserError, closest, shown
from pretrain.data.sources.files import BuiltinCorpus
from pretrain.data.sources.reading import COMPRESSED, MAX_DOCUMENT_BYTES, check_text, open_stream

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


class Example(NamedTuple):
    """One example of a classification task."""

    text: str
    label: str


def read_examples(
    path: Path, text_column: str | None = None, label_column: str | None = None
) -> list[Example]:
    """The examples of a file, in order. Its ending says what it is; ``.gz`` and ``.zst`` are decompressed.

    A TSV file begins with the names of its columns, and quotes mean nothing in it. JSON Lines are objects. In
    FASTA the label is the last word of a sequence's header, where spaces and ``|`` part words.

    Args:
        text_column: where the text is; by default the first of TEXT_COLUMNS that there is.
        label_column: where the label is; by default LABEL_COLUMN. FASTA has no columns.

    Raises:
        UserError: no such file, another kind of file, no such column, a line that does not fit, no example.
    """
    kind = kind_of(path)
    if kind == "fasta" and (text_column or label_column):
        raise UserError(
            f"column: {str(path)!r} is FASTA, which has no columns; leave --text_column and --label_column "
            "out"
        )
    try:
        with open_stream(path) as raw:
            lines = io.TextIOWrapper(raw, "utf-8-sig", newline=None)
            if kind == "fasta":
                examples = list(_read_fasta(path, lines))
            else:
                records = _read_tsv(path, lines) if kind == "tsv" else _read_json_lines(path, lines)
                examples = list(_chosen(path, records, text_column, label_column or LABEL_COLUMN))
    except FileNotFoundError:
        raise UserError(f"labelled: {str(path)!r} does not exist; give a file of labelled examples") from None
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"labelled: {str(path)!r} cannot be read ({' '.join(str(error).split())[:120]})"
        ) from None
    if not examples:
        raise UserError(f"labelled: {str(path)!r} holds no example")
    return examples


def kind_of(path: Path) -> str:
    """tsv, jsonl or fasta, by the ending. UserError for any other."""
    name = path.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    kind = ENDINGS.get(Path(name).suffix)
    if kind is None:
        raise UserError(
            f"labelled: {str(path)!r} is of no known kind; valid endings: {', '.join(ENDINGS)}, with .gz or "
            ".zst too"
        )
    return kind


def _read_tsv(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    header = next(rows, [])
    for row in rows:
        if not row:
            continue
        if len(row) != len(header):
            raise UserError(
                f"labelled: line {rows.line_num} of {str(path)!r} has {len(row)} fields, and its first line "
                f"names {len(header)}; a tab parts fields, and the first line must name the columns"
            )
        yield rows.line_num, dict(zip(header, row, strict=True))


def _read_json_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise UserError(
                f"labelled: line {number} of {str(path)!r} is not a JSON object, such as "
                '{"text": …, "label": …}'
            )
        yield number, record


def _chosen(
    path: Path, records: Iterable[tuple[int, dict[str, Any]]], text_column: str | None, label_column: str
) -> Iterator[Example]:
    """The text and label of each record."""
    for number, record in records:
        text_name = text_column or next((name for name in TEXT_COLUMNS if name in record), TEXT_COLUMNS[0])
        for option, name in (("text_column", text_name), ("label_column", label_column)):
            if name not in record:
                raise UserError(
                    f"{option}: line {number} of {str(path)!r} has no {name!r}; valid: --{option} with one "
                    f"of {', '.join(map(str, record))}{closest(name, record)}"
                )
        text, label = record[text_name], record[label_column]
        if not isinstance(text, str) or check_text(text, MAX_DOCUMENT_BYTES)[0] is None:
            raise UserError(
                f"labelled: line {number} of {str(path)!r} has the text {shown(text)}; give text that is not "
                "empty"
            )
        if not isinstance(label, str | int) or not str(label).strip():
            raise UserError(
                f"labelled: line {number} of {str(path)!r} has the label {shown(label)}; give a word or an "
                "integer"
            )
        yield Example(text, str(label).strip())


def _read_fasta(path: Path, lines: Iterable[str]) -> Iterator[Example]:
    label, header, sequence = "", 0, list[str]()

    def finished() -> Example:
        if not sequence:
            raise UserError(f"labelled: the sequence at line {header} of {str(path)!r} is empty")
        return Example("".join(sequence).upper(), label)

    for number, line in enumerate(lines, start=1):
        line = line.strip()
        if line.startswith(">"):
            if header:
                yield finished()
            words = line[1:].replace("|", " ").split()
            if len(words) < 2:
                raise UserError(
                    f"labelled: line {number} of {str(path)!r} has no label; a header is >NAME LABEL or "
                    ">NAME|…|LABEL"
                )
            label, header, sequence = words[-1], number, []
        elif line and not header:
            raise UserError(f"labelled: {str(path)!r} does not begin with a FASTA header, >NAME LABEL")
        elif line:
            sequence.append(line)
    if header:
        yield finished()


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
    sizes = {
        name: sum(map(len, files.values())) for name, files in texts.items() if len(files) >= PACKAGE_FILES
    }
    packages = sorted(sorted(sizes, key=lambda name: (-sizes[name], name))[:PACKAGES])
    if len(packages) < 2:
        raise UserError(
            "data: the standard library has too few packages for the built-in task; give --data FOLDER"
        )
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
        raise UserError(
            f"labelled: the training examples have {len(labels):,} different labels; valid: 2 to "
            f"{MOST_CLASSES:,}"
        )
    try:
        return sorted(labels, key=int)
    except ValueError:
        return sorted(labels)
