"""Which files become documents, in which order, and which of them are held out."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.data.sources.files import BuiltinCorpus, TextFiles
from pretrain.prepare.split import Split


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def test_builtin_corpus_is_the_library_without_tests_and_packages():
    source = BuiltinCorpus()
    names = [name for name, _ in source.files]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "email/message.py"} <= set(names)
    for name in names:
        assert not {"test", "tests", "idle_test", "site-packages", "dist-packages"} & set(name.split("/")), (
            name
        )
        assert not name.startswith("_sysconfigdata"), "holds this machine's paths"
    size = sum(path.stat().st_size for _, path in source.files)
    assert 8e6 < size < 20e6


def test_builtin_corpus_excludes_by_folder_name_at_any_depth(tmp_path):
    kept = {"a.py": b"a", "b/c.py": b"c", "latest.py": b"l"}
    tests = ["test/t.py", "b/tests/t.py", "idlelib/idle_test/t.py", "lib2to3/tests/data/x.py"]
    others = ["site-packages/s.py", "dist-packages/d.py", "__pycache__/p.py", "notes.txt"]
    of_this_machine = ["_sysconfigdata_x.py", "config-3/c.py"]
    left_out = dict.fromkeys(tests + others + of_this_machine, b"x")
    write(tmp_path, kept | left_out)
    assert [document.path_or_id for document in BuiltinCorpus(tmp_path).documents()] == sorted(kept)


@pytest.mark.parametrize("name", ["python311.zip", "missing", "empty"])
def test_interpreter_without_a_library_folder_is_refused(tmp_path, name):
    (tmp_path / "python311.zip").write_bytes(b"PK")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"builtin corpus: .*--text PATH"):
        BuiltinCorpus(tmp_path / name)


def test_unusable_files_are_skipped_and_counted_on_every_pass(tmp_path):
    write(tmp_path, {"a.txt": b"text\r\n", "b.txt": b"", "c.txt": b" \n\t"})
    write(tmp_path, {"d.bin": b"a\0b", "e.txt": b"caf\xe9", "f.txt": "é".encode()})
    source = TextFiles([tmp_path])
    for _ in range(2):
        texts = [document.text for document in source.documents()]
        assert texts == ["text\r\n", "é"], "line ends are kept as they are"
        assert source.skipped == {"empty": 2, "binary": 1, "invalid_utf8": 1}


def test_paths_may_be_files_folders_and_globs_and_count_once(tmp_path):
    write(
        tmp_path, {"a.txt": b"1", "sub/b.txt": b"2", "sub/c.md": b"3", ".hidden/d.txt": b"4", "sub/.e": b"5"}
    )

    def texts(*paths: object) -> list[str]:
        return [document.text for document in TextFiles([str(path) for path in paths]).documents()]

    assert texts(tmp_path) == ["1", "2", "3"]
    assert texts(tmp_path / "**" / "*.txt") == ["1", "2"]
    assert texts(tmp_path / "su*") == ["2", "3"]
    assert texts(tmp_path / "sub" / "c.md", tmp_path) == ["3", "1", "2"]


@pytest.mark.parametrize("path", ["missing", "*.nothing", "void"])
def test_paths_that_give_no_file_are_refused(tmp_path, path):
    (tmp_path / "void").mkdir()
    with pytest.raises(UserError, match="text: "):
        TextFiles([tmp_path / path])


def test_corpus_of_unusable_files_only_is_refused(tmp_path):
    write(tmp_path, {"a": b"", "b": b"\0"})
    with pytest.raises(UserError, match="no usable document in 2 files \\(1 binary, 1 empty\\)"):
        list(TextFiles([tmp_path]).documents())


def test_fingerprint_follows_content_and_not_place(tmp_path):
    for folder in ("one", "two"):
        write(tmp_path / folder, {"a": b"1", "b": b"2"})
    first = TextFiles([tmp_path / "one"]).fingerprint()
    assert TextFiles([tmp_path / "two"]).fingerprint() == first
    (tmp_path / "two" / "b").write_bytes(b"3")
    assert TextFiles([tmp_path / "two"]).fingerprint() != first


def digest_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


@given(st.integers(2, 40), st.floats(0.001, 0.999))
def test_neither_side_of_a_split_is_empty(count, fraction):
    digests = [digest_of(number) for number in range(count)]
    held_out = [Split.choose(digests, fraction).is_validation(digest) for digest in digests]
    assert 0 < sum(held_out) < count


def test_split_has_the_asked_fraction_and_is_stable_when_documents_are_added():
    digests = [digest_of(number) for number in range(10_000)]
    split = Split.choose(digests, 0.05)
    held_out = [split.is_validation(digest) for digest in digests]
    assert sum(held_out) == pytest.approx(500, abs=100)  # 4 standard deviations of 22
    fewer = Split.choose(digests[:5000], 0.05)
    assert [fewer.is_validation(digest) for digest in digests] == held_out


@pytest.mark.parametrize("count", [0, 1])
def test_one_document_cannot_be_split(count):
    with pytest.raises(UserError, match="at least two different documents"):
        Split.choose([digest_of(0)] * 2 * count, 0.5)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, float("nan")])
def test_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(UserError, match="validation_fraction: "):
        Split.choose([digest_of(0), digest_of(1)], fraction)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=60), st.integers(1, 20), st.integers(1, 9))
def test_a_number_of_documents_held_out_is_exact_and_of_the_smallest_hashes(numbers, documents, chunk):
    chunks = [np.array(numbers[start : start + chunk], np.uint64) for start in range(0, len(numbers), chunk)]
    different = sorted(set(numbers))
    if len(different) <= documents:
        with pytest.raises(UserError, match="different"):
            Split.choose_from(chunks, 0.5, documents)
        return
    split = Split.choose_from(chunks, 0.5, documents)
    held_out = {number for part in chunks for number in part[split.held_out(part)].tolist()}
    assert sorted(held_out) == different[:documents]
    assert all(split.is_validation(number.to_bytes(8, "big")) for number in held_out)
