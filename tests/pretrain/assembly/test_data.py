"""What a run validates on: its own corpora's splits, or another corpus; and how often it reads what it trains
on."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from model.errors import UserError
from model.presets import preset
from pretrain import report
from pretrain.assembly.data import open_data
from pretrain.checkpoint.state import DataIdentity, TrainingState
from pretrain.config.run_config import RunConfig
from pretrain.config.sections import ValidationConfig
from pretrain.data.corpus import Corpus
from pretrain.data.indexed import IndexedTokens, IndexedWriter
from pretrain.data.tokenizer import load_tokenizer
from pretrain.engine.patches import prepare_deepspeed
from pretrain.prepare.assemble import Selection
from pretrain.prepare.make import make_corpus
from pretrain.prepare.sources.plain_files import PlainFiles, files_below
from pretrain.run.resume import check_resume
from pretrain.run.session import Session
from pretrain.runtime.world import start_world
from tests.helpers.distributed import run_distributed


@pytest.fixture(scope="module")
def other(small, tmp_path_factory):
    """A corpus of other text, with the tokenizer of the small one."""
    folder = tmp_path_factory.mktemp("other")
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"{number} bottles on shelf {number * 7}\n" * 9)
    source = PlainFiles("other", files_below(folder))
    return make_corpus(source, folder / ".out", small.tokenizer, Selection(0.5))


def config(data, validation=None) -> RunConfig:
    return RunConfig(data=str(data), validation=ValidationConfig(data=validation and str(validation)))


def test_another_corpus_is_validated_on(small_folder, other):
    plain = open_data(config(small_folder), print)
    data = open_data(config(small_folder, other), print)
    alone = open_data(config(other), print)
    np.testing.assert_array_equal(data.validation_windows(16, 5), alone.validation_windows(16, 5))
    assert data.validation_bytes(16, 5) == alone.validation_bytes(16, 5)
    assert len(data.validation_documents(16, 5)) == 5
    rows = [each.training_sequences(16, 0).batch(0, 9) for each in (data, plain)]
    np.testing.assert_array_equal(*rows)
    both = open_data(config(small_folder, f"{other}:0.5,{small_folder}:0.5"), print)
    assert both.validation_windows(16, 8).shape == (8, 17)


def test_it_is_part_of_the_datas_identity_only_where_it_is_given(small_folder, other):
    plain = open_data(config(small_folder), print).identity()
    assert plain.validation is None
    given = open_data(config(small_folder, other), print).identity()
    assert given == dataclasses.replace(plain, validation=[(Corpus.open(other).meta.content_hash, "1")])


def test_a_pair_has_no_split_and_is_validated_on_whole(small, small_folder, tmp_path):
    with IndexedWriter(tmp_path / "pair", small.training.dtype) as writer:
        for number in range(20):
            writer.add_document(small.training.document(number)[:30])
    data = open_data(config(small_folder, tmp_path / "pair"), print)
    whole = IndexedTokens(tmp_path / "pair")
    rows = data.validation_windows(16, 10**6)
    assert len(rows) == (whole.num_tokens - 1) // 16
    np.testing.assert_array_equal(rows[0], whole.read(0, 17))


def test_another_tokenizer_is_refused(small_folder, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("a b c d e f g\n" * 200)
    (tmp_path / "b.txt").write_text("h i j k\n" * 200)
    folder = make_corpus(PlainFiles("text", files_below(tmp_path)), tmp_path / "out", 266)
    with pytest.raises(UserError, match=r"^validation\.data: tokenizer: .*out' was made with"):
        open_data(config(small_folder, folder), print)
    with pytest.raises(UserError, match=r"^validation\.data: .*missing' is not a folder"):
        open_data(config(small_folder, tmp_path / "missing"), print)
    assert load_tokenizer(folder / "tokenizer").vocab_size == 266


def test_other_validation_texts_are_another_run(tmp_path):
    run, model = RunConfig(runs_dir=str(tmp_path)), preset("prism-tiny")
    changed = dataclasses.replace(run, validation=ValidationConfig(every=7, data="x"))

    def state(asked, validation):
        data = DataIdentity("t", [("c", "1")], validation)
        return TrainingState(model=model.to_json(), run=asked.to_dict(), data=data)

    saved, given, other = state(run, None), state(changed, [("v", "1")]), state(changed, [("w", "1")])
    assert not any("changed" in line for line in check_resume(saved, saved, run, model))
    assert any("validation.data changed" in line for line in check_resume(saved, given, changed, model))
    with pytest.raises(UserError, match=r"validation: .*'v'.* != .*'w'"):
        check_resume(given, other, changed, model)


def test_a_run_says_how_often_it_reads_its_corpora(small_folder, other):
    sequences = open_data(config(f"{small_folder}:0.75,{other}:0.25"), print).training_sequences(16, 0)
    windows = sequences.windows
    batch = SimpleNamespace(sequences=4 * windows[1])
    state = SimpleNamespace(step=2, sequences=8 * windows[1])
    session = SimpleNamespace(sequences=sequences, run=RunConfig(steps=10), batch=batch, state=state)
    few, many = report._epochs(session, verbose=True)
    assert report._epochs(session, verbose=False) == [many]
    assert few == f"small is read {30 * windows[1] / windows[0]:.3g} times in 10 steps"
    assert many == ".out is read 10 times in 10 steps; beyond one, the same text is trained on again"
    read = np.bincount([sequences.locate(number)[0] for number in range(40 * windows[1])]) / windows
    assert sequences.epochs(40 * windows[1]) == pytest.approx(read, abs=1e-3)


def opened_by_ranks(run, folders):
    """Open *run* in a folder of each rank's own: what it identifies and reads."""
    prepare_deepspeed()
    world = start_world(1, False)
    with contextlib.chdir(folders[world.rank]), pytest.MonkeyPatch.context() as patch:
        data = open_data(run, print, world)
        patch.setattr(IndexedTokens, "read", IndexedTokens.read if world.is_main else None)
        model: Any = SimpleNamespace(context_length=16)
        given: dict[str, Any] = dict.fromkeys(("decisions", "sequences", "rates", "state"))
        session = Session(run=run, model_config=model, data=data, world=world, **given)
        rows, label_bytes = session.validation_windows(5), session.validation_bytes(5)
        documents = session.validation_documents(5)
    sequence = data.training_sequences(16, 0).sequence(3)
    return data.identity(), rows.tolist(), label_bytes, len(documents), sequence.tolist()


@pytest.mark.parametrize("kind", ["folder", "pair"])
def test_one_rank_reads_the_windows_for_all(small, small_folder, other, tmp_path, kind):
    path, tokenizer = small_folder, None
    if kind == "pair":
        path, tokenizer = tmp_path / "pair", str(small_folder / "tokenizer")
        with IndexedWriter(path, small.training.dtype) as writer:
            for number in range(small.training.num_documents):
                writer.add_document(small.training.document(number))
    run = dataclasses.replace(config(path, other), tokenizer=tokenizer)
    alone = open_data(run, print)
    rows, label_bytes = alone.validation_windows(16, 5), alone.validation_bytes(16, 5)
    sequence = alone.training_sequences(16, 0).sequence(3)
    expected = (alone.identity(), rows.tolist(), label_bytes, 5, sequence.tolist())
    assert run_distributed(opened_by_ranks, 2, run, [str(Path.cwd())] * 2) == [expected] * 2


def test_a_rank_with_files_of_its_own_checks_them(small_folder, other, tmp_path):
    """The same relative path leads to a copy on each node: sound, damaged, or another corpus."""
    nodes = [tmp_path / name for name in ("first", "sound", "damaged", "different")]
    for node in nodes:
        shutil.copytree(other if node.name == "different" else small_folder, node / "data")
    index = bytearray((tmp_path / "damaged" / "data" / "training.idx").read_bytes())
    index[34 + 4] ^= 1
    (tmp_path / "damaged" / "data" / "training.idx").write_bytes(index)
    run = config("data")
    sound = run_distributed(opened_by_ranks, 2, run, [str(nodes[0]), str(nodes[1])])
    assert sound[0] == sound[1]
    damaged = run_distributed(opened_alone, 2, run, [str(nodes[0]), str(nodes[2])])
    assert damaged[0] is None and "training.idx' is damaged" in damaged[1]
    different = run_distributed(opened_alone, 2, run, [str(nodes[0]), str(nodes[3])])
    assert different[0] is None
    assert different[1].startswith("data: 'data' holds another corpus here (content ")


def opened_alone(run: RunConfig, folders: list[str]) -> str | None:
    """The line with which a rank refuses its files, if it does. Nothing collective follows: one may have
    refused."""
    prepare_deepspeed()
    world = start_world(1, False)
    with contextlib.chdir(folders[world.rank]):
        try:
            open_data(run, print, world)
        except UserError as error:
            return str(error)
    return None
