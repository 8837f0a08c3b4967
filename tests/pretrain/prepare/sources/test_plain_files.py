"""Which files of the built-in corpus and of plain text become documents."""

from __future__ import annotations

import gzip

import pyarrow
import pytest

from model.errors import UserError
from pretrain.prepare.sources import text_source as sources
from pretrain.prepare.sources.plain_files import BuiltinCorpus, PlainFiles, files_below
from pretrain.prepare.sources.text_source import Document


def write(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return PlainFiles("text", files_below(folder))


def test_builtin_corpus_is_the_library_without_tests_and_packages():
    source = BuiltinCorpus()
    names = [name for name, _ in source.files]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "email/message.py"} <= set(names)
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    assert not [name for name in names if left_out & set(name.split("/"))]
    assert not [name for name in names if name.startswith("_sysconfigdata")], "holds this machine's paths"
    assert 8e6 < sum(path.stat().st_size for _, path in source.files) < 20e6


def test_builtin_corpus_excludes_by_folder_name_at_any_depth(tmp_path):
    kept = {"a.py": b"a", "b/c.py": b"c", "latest.py": b"l"}
    tests = ["test/t.py", "b/tests/t.py", "idlelib/idle_test/t.py", "lib2to3/tests/data/x.py"]
    others = ["site-packages/s.py", "dist-packages/d.py", "__pycache__/p.py", "notes.txt"]
    of_this_machine = ["_sysconfigdata_x.py", "config-3/c.py"]
    write(tmp_path, kept | dict.fromkeys(tests + others + of_this_machine, b"x"))
    assert [document.path_or_id for document in BuiltinCorpus(tmp_path).documents()] == sorted(kept)


@pytest.mark.parametrize("name", ["python311.zip", "missing", "empty"])
def test_interpreter_without_a_library_folder_is_refused(tmp_path, name):
    (tmp_path / "python311.zip").write_bytes(b"PK")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"builtin corpus: .*--text PATH"):
        BuiltinCorpus(tmp_path / name)


def test_unusable_files_are_skipped_and_counted_on_every_pass(tmp_path):
    write(tmp_path, {"a.txt": b"text\r\n", "b.txt": b"", "c.txt": b" \n\t", "d.bin": b"a\0b"})
    write(tmp_path, {"e.txt": b"caf\xe9", "f.txt": "é".encode(), "g.txt.gz": gzip.compress(b"packed")})
    with pyarrow.CompressedOutputStream(str(tmp_path / "h.txt.zst"), "zstd") as stream:
        stream.write(b"packed too")
    source = write(
        tmp_path, {"i.gz": gzip.compress(b"text " * 1000)[:-20], "j.zst": b"no zstd", "k": b"x" * 51}
    )
    source = PlainFiles("text", [*source.files, ("gone", tmp_path / "gone")], max_document_bytes=50)
    for _ in range(2):
        texts = [document.text for document in source.documents()]
        assert texts == ["text\r\n", "é", "packed", "packed too"], "line ends are kept as they are"
        once = dict.fromkeys(("binary", "invalid_utf8", "too_long", "unreadable"), 1)
        assert source.skipped == {"empty": 2, "damaged": 2, **once}


def test_corpus_of_unusable_files_only_is_refused(tmp_path):
    source = write(tmp_path, {"a": b"", "b": b"\0"})
    with pytest.raises(UserError, match=r"no usable document in 'text' \(1 binary, 1 empty\)"):
        list(source.documents())


def test_fingerprint_follows_content_and_not_place(tmp_path, monkeypatch):
    first = write(tmp_path / "one", {"a": b"1", "b": b"2"}).fingerprint()
    assert write(tmp_path / "two", {"a": b"1", "b": b"2"}).fingerprint() == first
    assert write(tmp_path / "two", {"b": b"3"}).fingerprint() != first
    monkeypatch.setattr(sources, "_WHOLE", 10)
    monkeypatch.setattr(sources, "_END", 4)
    large = write(tmp_path / "three", {"a": b"head" + b"x" * 50 + b"tail"}).fingerprint()
    assert large != write(tmp_path / "three", {"a": b"head" + b"x" * 49 + b"tail"}).fingerprint()


def test_units_follow_size_alone_and_keys_follow_content(tmp_path):
    source = write(tmp_path, {f"{number:03}.txt": str(number).encode() * 1000 for number in range(100)})
    source.unit_bytes = 10_000
    units = source.units()  # 10 files of 1,000 bytes, then 18 × 5 of 2,000
    assert len(units) == 19 and [unit.key for unit in source.units()] == [unit.key for unit in units]
    read = [record for unit in units for record in source.read(unit)]
    assert read == list(source.documents()) and all(isinstance(record, Document) for record in read)
    (tmp_path / "050.txt").write_text("changed")
    changed = [old.key != new.key for old, new in zip(units, source.units(), strict=False)]
    assert changed[9], "the piece with the file"
    assert not any(changed[:9]), "the pieces before it"
