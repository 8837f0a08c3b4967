"""Makes a labelled corpus, a corpus folder whose documents have classes.

Besides what pretrain/data/making/make.py writes there are training_labels.npy and validation_labels.npy, the
class of each document, and in meta.json the names of the classes. Examples are held in memory: a
classification task has thousands of them, and not billions of tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UserError, closest, shown
from pretrain.classification.sources import Example, builtin_examples, class_names
from pretrain.data.indexed import IndexedWriter, bin_path, idx_path, token_dtype
from pretrain.data.making.assemble import SPLITS, Lengths, file_entries
from pretrain.data.making.folder import new_folder, to_be_made
from pretrain.data.making.make import tokenizer_request
from pretrain.data.making.progress import Report, silent
from pretrain.data.making.train_tokenizer import training_request
from pretrain.data.meta import FORMAT_VERSION, META_FILE, CorpusMeta, SplitEntry, TokenizerEntry
from pretrain.data.sources.files import BuiltinCorpus
from pretrain.data.token_counts import write_counts
from pretrain.data.tokenizer import END_OF_DOCUMENT, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer

CHARACTERS = "characters"
"""As --tokenizer: one token for each character of the training examples."""
UNKNOWN = "<unk>"
VOCABULARY = 2048
_AT_ONCE = 1000  # examples tokenized at a time


def labels_file(folder: Path, split: str) -> Path:
    """The file of a labelled corpus with the classes of a split's documents."""
    return folder / f"{split}_labels.npy"


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
    out: Path, task: Task, tokenizer: Tokenizer | int | None, report: Report = silent
) -> Path:
    """Write the labelled corpus *out*, and return it. A folder that holds this very corpus is left alone.

    Args:
        tokenizer: an integer trains a SentencePiece model of so many entries on the training examples; None
            makes a token of each of their characters.

    Raises:
        UserError: *out* holds something else, one class only, a label that occurs in validation alone, no
            tokenizer of that size.
    """
    classes = class_names(task.training)
    splits = {"training": task.training, "validation": task.validation}
    known = {name: number for number, name in enumerate(classes)}
    for example in task.validation:
        if example.label not in known:
            raise UserError(
                f"labelled: the label {shown(example.label)} occurs in validation, and never in training; "
                f"valid: {', '.join(classes[:20])}{closest(example.label, classes)}"
            )
    digests = {name: _digest(examples) for name, examples in splits.items()}
    request = {
        "format_version": FORMAT_VERSION,
        "labelled": digests,
        "tokenizer": CHARACTERS if tokenizer is None else tokenizer_request(tokenizer),
    }
    with to_be_made(out, request, report) as to_do:
        if not to_do:
            return out
        made = _tokenizer(tokenizer, [example.text for example in task.training], report)
        with new_folder(out) as folder:
            made.save(folder / "tokenizer")
            meta = CorpusMeta(
                source=task.source,
                content_hash=hashlib.sha256(json.dumps([digests, classes]).encode()).hexdigest(),
                classes=classes,
                tokenizer=TokenizerEntry.of(made),
                dtype=token_dtype(made.vocab_size).name,
                split=task.split,
                skipped={},
                request=request,
                **_write(folder, splits, known, made, report),
            )
            meta.write(folder)
    return out


def _digest(examples: Sequence[Example]) -> str:
    return hashlib.sha256(json.dumps(examples).encode()).hexdigest()


def _tokenizer(tokenizer: Tokenizer | int | None, texts: Sequence[str], report: Report) -> Tokenizer:
    if tokenizer is None:
        return character_tokenizer(texts)
    if isinstance(tokenizer, int):
        report(f"training a tokenizer of {tokenizer:,} entries on {len(texts):,} examples")
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
    report: Report,
) -> dict[str, Any]:
    """Write tokens, labels and counts of both splits; returns their entries of CorpusMeta."""
    dtype, lengths, entries = token_dtype(tokenizer.vocab_size), Lengths(), dict[str, Any]()
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    report(f"tokenizing {sum(map(len, splits.values())):,} examples")
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
        labels = np.array([known[example.label] for example in examples], np.int32)
        with labels_file(folder, name).open("wb") as stream:
            np.save(stream, labels, allow_pickle=False)
        of_each = np.bincount(labels, minlength=len(known)).tolist()
        entries[name] = SplitEntry(writer.num_documents, size, writer.num_tokens, of_each)
    files = [write_counts(folder, counts)]
    for name in SPLITS:
        files += [bin_path(folder / name), idx_path(folder / name), labels_file(folder, name)]
    return {**entries, "document_lengths": lengths.summary(), "files": file_entries(files)}


def prepare_builtin_labelled(
    data_root: str | Path, vocabulary: int = VOCABULARY, report: Report = silent
) -> Path:
    """The built-in classification task (see builtin_examples), made once: ``DATA_ROOT/packages-HASH``.

    Args:
        vocabulary: entries of its tokenizer, which is trained on its training examples.
    """
    settings = f"{FORMAT_VERSION} {BuiltinCorpus().fingerprint()} {training_request(vocabulary)}"
    folder = Path(data_root) / f"packages-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
    if (folder / META_FILE).is_file():  # written before the folder got its name
        return folder
    return prepare_labelled(folder, builtin_task(), vocabulary, report)


def builtin_task() -> Task:
    source = BuiltinCorpus()
    splits = builtin_examples(source)
    described = {"name": "packages of the standard library", "python": source.describe()["python"]}
    return Task(splits["training"], splits["validation"], described, {"by": "hash of the module's name"})
