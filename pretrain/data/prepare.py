"""Text source + tokenizer -> a corpus folder, written once and atomically.

    OUT/training.bin .idx, validation.bin .idx   Megatron format; every document ends with its token
    OUT/tokenizer/                               what load_tokenizer reads
    OUT/meta.json                                what is in the folder and what it was made from

The same source and settings give byte-identical folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.data.corpus import BuiltinCorpus, Document, Split, TextSource
from pretrain.data.indexed import IndexedWriter, token_dtype
from pretrain.data.tokenizer import SENTENCEPIECE_OPTIONS, SentencePieceTokenizer, Tokenizer, tokenizer_hash

FORMAT_VERSION = 1
META_FILE = "meta.json"
SPLITS = ("training", "validation")
VALIDATION_FRACTION = 0.05
# The tokenizer learns from at most this much of the training split (a sample by document hash): the trainer
# holds its text in memory, and its pieces hardly change beyond.
TOKENIZER_SAMPLE_BYTES = 200_000_000
MIN_VOCABULARY = 260  # 256 bytes, two special tokens and some text
_BATCH_CHARACTERS = 1 << 20  # text tokenized at a time: bounds memory, large enough for all threads
_REPORT_SECONDS = 1.0


@dataclass(frozen=True)
class Progress:
    """One report of a preparation; ``str()`` gives a line for people."""

    stage: str
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    total_bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        if not self.total_bytes:
            return self.stage
        rate = self.bytes / 1e6 / max(self.seconds, 1e-9)
        return (
            f"{self.stage}: {self.documents:,} documents, {self.bytes / 1e6:.1f} of "
            f"{self.total_bytes / 1e6:.1f} MB, {self.tokens:,} tokens, {rate:.1f} MB/s"
        )


ProgressCallback = Callable[[Progress], None]


def prepare(
    source: TextSource,
    out: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    train_tokenizer: int | None = None,
    validation_fraction: float = VALIDATION_FRACTION,
    progress: ProgressCallback | None = None,
) -> Path:
    """Write the corpus folder *out* from *source*, and return it.

    Give either a *tokenizer*, or in *train_tokenizer* the vocabulary size of a SentencePiece model that is
    trained on the training split. A folder that already holds this very corpus is left alone; any other
    content of *out* is refused. Several processes may call this at once: one works, the others wait. Raises
    UserError for bad input.
    """
    if (tokenizer is None) == (train_tokenizer is None):
        raise UserError("tokenizer: give either a tokenizer or a vocabulary size to train, and not both")
    if train_tokenizer is not None and not MIN_VOCABULARY <= train_tokenizer <= 1_000_000:
        raise UserError(
            f"train_tokenizer: {train_tokenizer} is out of range; valid: {MIN_VOCABULARY} to 1000000"
        )
    report = progress or (lambda _: None)
    out = Path(out)
    request = {
        "format_version": FORMAT_VERSION,
        "source": source.fingerprint(),
        "tokenizer": tokenizer_hash(tokenizer) if tokenizer else _training_request(train_tokenizer),
        "validation_fraction": validation_fraction,
    }
    if _already_there(out, request):
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with _only_process(out, report):
        if _already_there(out, request):
            return out
        # One name per machine: whatever lies there was left by a process that died, since we hold the lock.
        partial = out.parent / f".{out.name}.partial-{socket.gethostname()}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            _write(source, partial, tokenizer, train_tokenizer, request, report)
            _publish(partial, out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return out


def prepare_builtin(
    data_root: str | os.PathLike[str] = "data",
    vocab_size: int = 4096,
    progress: ProgressCallback | None = None,
) -> Path:
    """The built-in corpus, prepared once per content and settings: ``DATA_ROOT/builtin-HASH``.

    HASH covers the texts, the tokenizer's settings, the split and the format, so another Python version gets
    another folder. When the folder is there this takes the time of hashing 12 MB.
    """
    source = BuiltinCorpus()
    settings = (
        f"{FORMAT_VERSION} {source.fingerprint()} {_training_request(vocab_size)} {VALIDATION_FRACTION}"
    )
    folder = Path(data_root) / f"builtin-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
    if (folder / META_FILE).is_file():  # written before the folder got its name
        return folder
    return prepare(source, folder, train_tokenizer=vocab_size, progress=progress)


def _training_request(vocab_size: int | None) -> str:
    options = json.dumps(SENTENCEPIECE_OPTIONS, sort_keys=True)
    return f"train {vocab_size} {hashlib.sha256(options.encode()).hexdigest()[:16]} {TOKENIZER_SAMPLE_BYTES}"


def _already_there(out: Path, request: dict[str, Any]) -> bool:
    """True if *out* holds the corpus asked for, False if it is free; UserError if it holds something else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        present = dict(json.loads((out / META_FILE).read_text("utf-8"))["request"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"out: {str(out)!r} exists and is no corpus; valid: a new folder") from None
    if present == request:
        return True
    differing = ", ".join(key for key in request if present.get(key) != request[key])
    raise UserError(
        f"out: {str(out)!r} holds another corpus (differs in {differing}); remove it or choose a new folder"
    )


@contextlib.contextmanager
def _only_process(out: Path, report: ProgressCallback) -> Iterator[None]:
    """Hold the lock of *out*. The kernel frees it when its holder ends in any way, so nothing stale can
    block."""
    with (out.parent / f".{out.name}.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(Progress(f"waiting for another process that prepares {out}"))
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: renaming is still atomic, at worst the work is done twice
        yield


def _write(
    source: TextSource,
    folder: Path,
    tokenizer: Tokenizer | None,
    train_tokenizer: int | None,
    request: dict[str, Any],
    report: ProgressCallback,
) -> None:
    """Everything that *prepare* puts into the folder."""
    report(Progress(f"reading {source.name}"))
    sizes: Counter[str] = Counter()

    def digests() -> Iterator[bytes]:
        for document in source.documents():
            sizes["bytes"] += len(document.text.encode())
            yield document.digest()

    split = Split.choose(digests(), validation_fraction := request["validation_fraction"])
    total_bytes = sizes["bytes"]
    if tokenizer is None:
        assert train_tokenizer is not None
        report(Progress(f"training a tokenizer of {train_tokenizer:,} entries on {total_bytes / 1e6:.1f} MB"))
        texts = _tokenizer_sample(source, split, total_bytes)
        tokenizer = SentencePieceTokenizer.train(texts, train_tokenizer)
    tokenizer.save(folder / "tokenizer")
    counts, content_hash = _tokenize(source, folder, tokenizer, split, total_bytes, report)
    dtype = token_dtype(tokenizer.vocab_size)
    meta = {
        "format_version": FORMAT_VERSION,
        "source": source.describe(),
        "content_hash": content_hash,
        "tokenizer": {
            "name": tokenizer.name,
            "hash": tokenizer_hash(tokenizer),
            "vocab_size": tokenizer.vocab_size,
            "end_of_document": tokenizer.end_of_document,
        },
        "dtype": dtype.name,
        "split": {"by": "hash of the document's text", "validation_fraction": validation_fraction},
        "skipped": dict(sorted(source.skipped.items())),
        **counts,
        "request": request,
    }
    (folder / META_FILE).write_text(json.dumps(meta, indent=2) + "\n", "utf-8")


def _tokenizer_sample(source: TextSource, split: Split, total_bytes: int) -> Iterator[str]:
    """Training documents, thinned out by their hash to about TOKENIZER_SAMPLE_BYTES."""
    limit = int(min(1.0, TOKENIZER_SAMPLE_BYTES / max(total_bytes, 1)) * 2**64)
    for document in source.documents():
        digest = document.digest()
        # Bytes 8-16: those before decide the split.
        if not split.is_validation(digest) and int.from_bytes(digest[8:16], "big") < limit:
            yield document.text


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _tokenize(
    source: TextSource,
    folder: Path,
    tokenizer: Tokenizer,
    split: Split,
    total_bytes: int,
    report: ProgressCallback,
) -> tuple[dict[str, dict[str, int]], str]:
    """Write both splits; return their counts, and a hash over all documents' digests in order."""
    dtype = token_dtype(tokenizer.vocab_size)
    content = hashlib.sha256()
    sizes: Counter[str] = Counter()
    documents = 0
    started = reported = time.monotonic()
    with (
        IndexedWriter(folder / SPLITS[0], dtype) as training,
        IndexedWriter(folder / SPLITS[1], dtype) as validation,
    ):
        writers = {"training": training, "validation": validation}
        for batch in _batches(source.documents()):
            encoded = tokenizer.encode_batch([document.text for document in batch])
            for document, ids in zip(batch, encoded, strict=True):
                digest = document.digest()
                content.update(digest)
                name = "validation" if split.is_validation(digest) else "training"
                writers[name].add_document([*ids, tokenizer.end_of_document])
                sizes[name] += len(document.text.encode())
            documents += len(batch)
            now = time.monotonic()
            last = sizes.total() >= total_bytes
            if last or now - reported >= _REPORT_SECONDS:
                reported = now
                tokens = training.num_tokens + validation.num_tokens
                report(Progress("tokenizing", documents, tokens, sizes.total(), total_bytes, now - started))
    counts = {
        name: {"documents": writer.num_documents, "bytes": sizes[name], "tokens": writer.num_tokens}
        for name, writer in writers.items()
    }
    return counts, content.hexdigest()


def _publish(partial: Path, out: Path) -> None:
    """Sync *partial* to disk and give it its name: after a crash the folder is there whole, or not at all."""
    for folder, _, names in os.walk(partial):
        for path in [Path(folder, name) for name in names] + [Path(folder)]:
            _sync(path)
    try:
        partial.rename(out)
    except OSError:
        # Without locks another machine may have finished first; its folder has the same content.
        if not (out / META_FILE).is_file():
            raise
        shutil.rmtree(partial)
    _sync(out.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
