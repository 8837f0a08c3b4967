"""Makes a labelled corpus, a corpus folder whose documents have classes.

Besides what pretrain/prepare/make.py writes there are training_labels.npy and validation_labels.npy, the
class of each document, and in meta.json the names of the classes. Examples are held in memory: a
classification task has thousands of them, and not billions of tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UserError, quote, suggest
from pretrain.classification.sources import Example, builtin_examples, class_names
from pretrain.data.indexed import IndexedWriter, token_dtype
from pretrain.data.meta import FORMAT_VERSION, META_FILE, CorpusMeta, FileEntry, TokenizerEntry
from pretrain.data.tokenizer import END_OF_DOCUMENT, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from pretrain.prepare.assemble import SPLITS, entries
from pretrain.prepare.long_texts import encode_documents
from pretrain.prepare.make import check_vocabulary, claim_corpus, new_folder, tokenizer_request
from pretrain.prepare.progress import Report, report_nothing
from pretrain.prepare.round_trip import check_round_trip
from pretrain.prepare.sources.plain_files import BuiltinCorpus
from pretrain.prepare.sources.text_source import Document
from pretrain.prepare.train_tokenizer import training_request
from pretrain.utils.files import file_entry

CHARACTERS = "characters"
"""As --tokenizer: one token for each character of the training examples."""
UNKNOWN = "<unk>"
VOCABULARY = 2048


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
    out: Path,
    task: Task,
    tokenizer: Tokenizer | int | None,
    report: Report = report_nothing,
    lossy_tokenizer: bool = False,
) -> Path:
    """Write the labelled corpus *out*, and return it. A folder that holds this very corpus is left alone.

    Args:
        tokenizer: an integer trains a SentencePiece model of so many entries on the training examples; None
            makes a token of each of their characters.
        lossy_tokenizer: whether a tokenizer that changes the text is taken.

    Raises:
        UserError: *out* holds something else, one class only, a label that occurs in validation alone, no
            tokenizer of that size.
    """
    if isinstance(tokenizer, int):
        check_vocabulary(tokenizer)
    classes = class_names(task.training)
    splits = {"training": task.training, "validation": task.validation}
    known = {name: number for number, name in enumerate(classes)}
    for example in task.validation:
        if example.label not in known:
            by_hash = "validation_fraction" in task.split
            rare = "; all examples of a rare one are held out: give --validation FILE, or another fraction"
            raise UserError(
                f"labelled: the label {quote(example.label)} occurs in validation, and never in training; "
                f"valid: {', '.join(classes[:20])}{suggest(example.label, classes)}{rare * by_hash}"
            )
    digests = {name: _digest(examples) for name, examples in splits.items()}
    request = {
        "format_version": FORMAT_VERSION,
        "labelled": digests,
        "tokenizer": CHARACTERS if tokenizer is None else tokenizer_request(tokenizer),
        **({"lossy_tokenizer": True} if lossy_tokenizer else {}),
    }
    if isinstance(tokenizer, Tokenizer) and not lossy_tokenizer:
        for name, examples in splits.items():
            named = (f"{name} example {number}" for number in itertools.count())
            texts = (example.text for example in examples)
            check_round_trip(tokenizer, map(Document, named, texts))
    with claim_corpus(out, request, report) as to_do:
        if not to_do:
            return out
        made = _tokenizer(tokenizer, [example.text for example in task.training], report)
        with new_folder(out) as folder:
            made.save(folder / "tokenizer")
            meta = CorpusMeta(
                source=task.source,
                content_hash=hashlib.sha256(json.dumps([digests, classes]).encode()).hexdigest(),
                classes=classes,
                tokenizer=TokenizerEntry.from_tokenizer(made),
                dtype=token_dtype(made.vocab_size).name,
                split=task.split,
                skipped={},
                request=request,
                **_write(folder, splits, known, made),
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
    folder: Path, splits: dict[str, Sequence[Example]], known: dict[str, int], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Write tokens and labels of both splits; returns their entries of CorpusMeta."""
    sizes, writers, labels = dict[str, int](), dict[str, IndexedWriter](), dict[str, np.ndarray]()
    for name in SPLITS:
        texts = [example.text for example in splits[name]]
        sizes[name] = sum(len(text.encode()) for text in texts)
        labels[name] = np.array([known[example.label] for example in splits[name]], np.int32)
        dtype = token_dtype(tokenizer.vocab_size)
        with IndexedWriter(folder / name, dtype) as writers[name]:
            for tokens, lengths in encode_documents(tokenizer, texts, dtype):
                writers[name].add_documents(tokens, np.array(lengths))
    written = entries(writers, sizes)
    for name in SPLITS:
        path = labels_file(folder, name)
        with path.open("wb") as stream:
            np.save(stream, labels[name], allow_pickle=False)
        of_each = np.bincount(labels[name], minlength=len(known)).tolist()
        written[name] = dataclasses.replace(written[name], of_each_class=of_each)
        written["files"][path.name] = FileEntry(**file_entry(path))
    return written


def prepare_builtin_labelled(
    data_root: str | Path, vocabulary: int = VOCABULARY, report: Report = report_nothing
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
