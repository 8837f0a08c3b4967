import math
from types import SimpleNamespace
from typing import Any

import pytest

from model.errors import UserError
from pretrain.checkpoint.state import TrainingState
from pretrain.run.saved import SavedRun, find_checkpoint, refuse_links


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
    for step in (2, 4):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000002" / "manifest.json").write_text('{"format": 1, "files": {}}')
    lines: list[str] = []
    assert find_checkpoint(tmp_path, None, lines.append).name == "step_000002"
    expected = "checkpoint step_000004 is damaged (manifest.json is missing); looking for an earlier one"
    assert lines == [expected]
    with pytest.raises(UserError, match=r"step_000004 of .* is damaged \(manifest\.json is missing\)"):
        find_checkpoint(tmp_path, 4, lines.append)
    with pytest.raises(UserError, match=r"no checkpoint of step 3 .*nearest: 2 \(there are 2, 4\)"):
        find_checkpoint(tmp_path, 3, lines.append)
    (tmp_path / "checkpoints" / "step_000002" / "manifest.json").unlink()
    with pytest.raises(UserError, match="every checkpoint of"):
        find_checkpoint(tmp_path, None, lines.append)
    assert len(lines) == 3


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
