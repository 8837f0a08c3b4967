"""What the validation hook prints before the first step."""

from __future__ import annotations

from pretrain.validation.hook import ValidationHook
from tests.helpers.distributed import run_distributed
from tests.helpers.training import build, nano_run


def announced(run):
    opened = build(run)
    (hook,) = (hook for hook in opened.trainer.hooks if isinstance(hook, ValidationHook))
    return hook.announce(opened)


def test_fewer_windows_than_asked_for_are_reported(small_folder, small, tmp_path):
    windows = (small.validation.num_tokens - 1) // 64
    expected = f"note     validation on {windows:,} windows: the held-out text has no more"
    many = nano_run(small_folder, tmp_path, "--validation.sequences 9999")
    assert run_distributed(announced, 1, many, timeout=120)[0] == [
        f"{expected} (validation.sequences: 9,999)"
    ]
    exact = nano_run(small_folder, tmp_path, f"--validation.sequences {windows}")
    assert run_distributed(announced, 1, exact, timeout=120)[0] == []
    # Twice 6 windows are what was asked for, as near as whole windows come.
    halves = f"{small_folder}:1/2,{small_folder}:1/2"
    blend = nano_run(small_folder, tmp_path, f"--data {halves} --validation.sequences 13")
    assert run_distributed(announced, 1, blend, timeout=120)[0] == []
