import itertools
import json
import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from model.errors import UserError
from pretrain.checkpoint.finder import checkpoint_path
from pretrain.checkpoint.state import TrainingState
from pretrain.checkpoint.store import CheckpointStore, remove
from pretrain.config.sections import CheckpointConfig
from pretrain.run.saved import SavedRun, find_checkpoint, refuse_links
from pretrain.utils.files import file_entry
from tests.helpers.refusals import refused
from tests.helpers.training import alone


def test_last_metrics_are_the_newest_at_or_before_the_step(tmp_path):
    checkpoint: Any = SimpleNamespace(state=TrainingState(step=4))
    unused: Any = None
    run = SavedRun(tmp_path, checkpoint, unused, unused)
    assert run.last_metrics() == {}
    rows = [
        '{"step": 2, "train_loss": 3.0, "val_loss": 3.1, "evaluation/piqa/acc": 0.5, "grad_norm": 1}',
        '{"step": 4, "train_loss": "NaN"}',
        '{"step": 4, "val_bpb": 1.5}',
        '{"step": 6, "train_loss": 1.0}',
        '{"step": 6, "trai',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    found = run.last_metrics()
    assert math.isnan(found.pop("train_loss")), "a number, not a word: the model card formats it"
    assert found == {"val_loss": 3.1, "evaluation/piqa/acc": 0.5, "val_bpb": 1.5}


def test_damaged_checkpoints_are_named_and_passed_over_or_refused(tmp_path):
    checkpoint(tmp_path, 2)
    checkpoint_path(tmp_path, 4).mkdir()
    lines: list[str] = []
    assert find_checkpoint(tmp_path, None, lines.append)[0].name == "step_000002"
    assert lines == [
        "note     checkpoint step_000004 is damaged (manifest.json is missing); using step_000002"
    ]
    for step, words in ((4, "holds none that is whole"), (3, "no checkpoint of step 3")):
        with refused(words):
            find_checkpoint(tmp_path, step, lines.append)
    (tmp_path / "checkpoints" / "step_000002" / "manifest.json").unlink()
    with refused("holds none that is whole"):
        find_checkpoint(tmp_path, None, lines.append)
    assert len(lines) == 1, "an error line says it all"


def test_a_link_out_of_the_checkpoint_is_not_followed(tmp_path):
    """An untrusted run could pull a local file into an export."""
    secret, tokenizer = tmp_path / "secret", tmp_path / "step_000002" / "tokenizer"
    secret.write_text("private")
    tokenizer.mkdir(parents=True)
    (tokenizer / "a.json").write_text("{}")
    (tokenizer / "b.json").symlink_to("a.json")
    refuse_links(tokenizer)
    (tokenizer / "c.json").symlink_to(secret)
    with pytest.raises(UserError, match=r"c\.json is a symbolic link to a file outside"):
        refuse_links(tokenizer)
    linked = tmp_path / "step_000004"
    linked.mkdir()
    (linked / "tokenizer").symlink_to(tmp_path)
    with pytest.raises(UserError, match="tokenizer is a symbolic link"):
        refuse_links(linked / "tokenizer")


def checkpoint(run_folder: Path, step: int) -> Path:
    """A checkpoint of one file, as a run puts it in its place."""
    partial = run_folder / "checkpoints" / f".writing_step_{step:06d}"
    partial.mkdir(parents=True)
    (partial / "state.json").write_text("{}")
    files = {"state.json": file_entry(partial / "state.json")}
    (partial / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    return partial.rename(checkpoint_path(run_folder, step))


def test_a_run_that_prunes_is_read_without_a_failure(tmp_path):
    """What is chosen stays until it is read; what vanished before is followed by the next."""
    store = CheckpointStore(tmp_path, CheckpointConfig(keep_last=1), alone())
    checkpoint(tmp_path, 1)
    ended = threading.Event()

    def train() -> None:
        for step in itertools.count(2):
            checkpoint(tmp_path, step)
            store._prune(step)
            if ended.is_set():
                return

    def read() -> int:
        path, _hold = find_checkpoint(tmp_path, None, print)
        step = int(path.name.removeprefix("step_"))
        while store.steps()[-1] < step + 3:  # each of which prunes those before it
            time.sleep(0.001)
        assert (path / "manifest.json").is_file()
        return step

    training = threading.Thread(target=train)
    training.start()
    try:
        found = [read() for _ in range(20)]
    finally:
        ended.set()
        training.join()
    assert found == sorted(found) and found[-1] >= found[0] + 3 * 19
    store._prune(store.steps()[-1])
    assert len(store.steps()) == 1, "nobody reads any more"


def test_what_vanishes_while_it_is_verified_is_not_called_damaged(tmp_path, monkeypatch):
    checkpoint(tmp_path, 1)
    checkpoint(tmp_path, 2)
    lines: list[str] = []

    def pruned(folder: Path) -> str | None:
        if folder.name == "step_000002":
            remove(folder)
            return "manifest.json is missing"
        return None

    monkeypatch.setattr("pretrain.run.saved.verify", pruned)
    assert find_checkpoint(tmp_path, None, lines.append)[0].name == "step_000001" and lines == []
