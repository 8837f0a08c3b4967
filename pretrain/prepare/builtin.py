"""The built-in corpus: found, or made."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pretrain.data.meta import FORMAT_VERSION, META_FILE
from pretrain.prepare.progress import Report, report_nothing
from pretrain.prepare.sources.plain_files import BuiltinCorpus
from pretrain.prepare.split import VALIDATION_FRACTION
from pretrain.prepare.train_tokenizer import training_request


def prepare_builtin(
    data_root: str | os.PathLike[str] = "data",
    vocab_size: int = 4096,
    report: Report = report_nothing,
) -> Path:
    """The built-in corpus, Python's standard library with a tokenizer trained on it, prepared once per
    content and settings: ``DATA_ROOT/builtin-HASH``.

    HASH covers the texts, the tokenizer's settings, the split and the format, so another Python version gets
    another folder. When the folder is there this takes the time of hashing 12 MB.
    """
    source = BuiltinCorpus()
    settings = f"{FORMAT_VERSION} {source.fingerprint()} {training_request(vocab_size)} {VALIDATION_FRACTION}"
    folder = Path(data_root) / f"builtin-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
    if (folder / META_FILE).is_file():  # written before the folder got its name
        return folder
    from pretrain.prepare.make import make_corpus

    return make_corpus(source, folder, vocab_size, report=report)
