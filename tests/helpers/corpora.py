"""What tests read of corpus folders."""

from __future__ import annotations

from pathlib import Path

from pretrain.data.corpus import Corpus


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below *folder*, by its path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def texts_of(corpus: Corpus, split: str) -> list[str]:
    """The decoded documents of a split, each of which ends with its token."""
    stream, end = getattr(corpus, split), corpus.tokenizer.end_of_document
    documents = [stream.document(index) for index in range(stream.num_documents)]
    assert all(document[-1] == end and (document == end).sum() == 1 for document in documents)
    return [corpus.tokenizer.decode(document) for document in documents]
