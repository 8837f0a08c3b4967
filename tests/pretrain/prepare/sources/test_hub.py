"""The path of hub datasets, exercised with local files through the ``datasets`` library."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from model.errors import UserError
from pretrain.data.corpus import Corpus
from pretrain.prepare.command import main
from pretrain.prepare.make import make_corpus
from pretrain.prepare.sources import hub
from pretrain.prepare.sources.hub import HubDataset
from pretrain.prepare.sources.text_source import Document
from tests.helpers.corpora import contents

DOCUMENTS = [f"document {number}\n" * (1 + number % 7) for number in range(200)]


@pytest.fixture(scope="module")
def parquet(tmp_path_factory) -> Path:
    """A dataset as the hub has them: a folder with data/train-*.parquet and data/test-*.parquet."""
    folder = tmp_path_factory.mktemp("dataset") / "data"
    folder.mkdir()
    for index in range(2):
        texts = [*DOCUMENTS[index * 100 : index * 100 + 100], "", None, "a\0b"]
        table = pyarrow.table({"text": texts, "id": range(len(texts))})
        pyarrow.parquet.write_table(table, folder / f"train-{index:05}-of-00002.parquet", row_group_size=20)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["test"], "id": [0]}), folder / "test-00000-of-00001.parquet"
    )
    return folder.parent


def texts(source: HubDataset) -> list[str]:
    return [document.text for document in source.documents()]


def test_documents_come_once_in_order_and_in_pieces(parquet):
    source = HubDataset(str(parquet))
    source.check()
    units = source.units()
    assert len(units) == 12, "a piece for each of 2 × 6 row groups"
    pieces = [[r.text for r in source.read(unit) if isinstance(r, Document)] for unit in units]
    assert all(pieces[:5]) and list(itertools.chain(*pieces)) == DOCUMENTS == texts(source)
    assert source.skipped == {"empty": 4, "binary": 2}
    assert texts(HubDataset(str(parquet), split="test")) == ["test"]


def test_more_row_groups_than_pieces(parquet, monkeypatch):
    """Pieces are then runs of neighbouring row groups: in order, each document once."""
    for most in (5, 11):
        monkeypatch.setattr(hub, "MOST_UNITS", most)
        hub._open_dataset.cache_clear()
        source = HubDataset(str(parquet))
        units = source.units()
        assert len(units) == most
        pieces = [[r.text for r in source.read(unit) if isinstance(r, Document)] for unit in units]
        assert list(itertools.chain(*pieces)) == DOCUMENTS and all(pieces[:4])
    hub._open_dataset.cache_clear()


def test_json_with_another_column(tmp_path):
    lines = "".join(json.dumps({"body": text}) + "\n" for text in DOCUMENTS)
    (tmp_path / "train.jsonl").write_text(lines)
    source = HubDataset(str(tmp_path), column="body")
    source.check()
    assert texts(source) == DOCUMENTS
    assert source.describe() == {"name": str(tmp_path), "split": "train", "column": "body"}


def test_fingerprint_follows_files_and_settings(parquet):
    prints = {
        HubDataset(str(parquet)).fingerprint(),
        HubDataset(str(parquet), split="test").fingerprint(),
        HubDataset(str(parquet), column="id").fingerprint(),
    }
    assert len(prints) == 3 and HubDataset(str(parquet)).fingerprint() in prints


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "body"}, r"column: .* has no column 'body'; valid: --column with one of text, id"),
        ({"column": "id"}, r"column: 'id' of .* holds .*int64.*, not text"),
        ({"split": "nope"}, r"dataset: .* cannot be opened \(.*nope"),
        (
            {"path": "NoSuch/dataset"},
            r"dataset: 'NoSuch/dataset' cannot be opened \(.*; valid: builtin, a dataset on",
        ),
        ({"path": "parquet"}, r"dataset: 'parquet' is a format of files; valid: --text"),
    ],
)
def test_bad_datasets_are_one_line(parquet, options, message, monkeypatch):
    # As offline: the library would wait for a network that is not there, several times and for longer and
    # longer.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=message) as refusal:
        HubDataset(**{"path": str(parquet), **options}).check()
    assert "\n" not in str(refusal.value)


def test_damage_is_one_line_that_names_the_piece(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": bad}\n')
    with pytest.raises(
        UserError, match=r"dataset: reading .* failed in piece 0 of 1 .*the same command continues"
    ):
        texts(HubDataset(str(tmp_path)))


def test_a_damaged_file_is_one_line_and_the_library_says_nothing(tmp_path, capfd):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no more")
    assert main(f"--dataset {tmp_path} --out {tmp_path / 'out'}".split()) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: dataset: ") and " cannot be opened (" in error and error.count("\n") == 1


def test_a_dataset_without_documents_is_refused(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["", " "]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"no usable document in .* \(2 empty\)"):
        texts(HubDataset(str(tmp_path)))


@pytest.mark.slow
def test_processes_give_back_what_they_share(parquet, small, small_folder, tmp_path):
    """The datasets library makes a semaphore in each; a process that is cut off leaves it, and
    Python warns. And they give the same corpus."""
    one = make_corpus(HubDataset(str(parquet)), tmp_path / "one", small.tokenizer)
    line = [sys.executable, "-m", "pretrain.prepare", "--dataset", parquet, "--processes", "2"]
    line += ["--tokenizer", small_folder / "tokenizer", "--out", tmp_path / "out"]
    root = Path(__file__).parents[4]
    ended = subprocess.run(line, capture_output=True, text=True, cwd=root, timeout=240)
    assert ended.returncode == 0 and "ready" in ended.stdout
    assert ended.stderr == ""
    assert contents(tmp_path / "out") == contents(one)
    meta = Corpus.open(one).meta
    assert meta.source["name"] == str(parquet) and meta.skipped == {"binary": 2, "empty": 4}
