"""What the validation hook prints before the first step."""

from __future__ import annotations

from tests.helpers.distributed import run_distributed
from tests.helpers.training import build, nano_run


def announce(run):
    return build(run).announce("validation")


def test_a_note_names_fewer_windows_than_the_setting(small_folder, small, tmp_path):
    windows = (small.validation.num_tokens - 1) // 64
    expected = f"note     validation on {windows:,} windows: the held-out text has no more"
    many = nano_run(small_folder, tmp_path, "--validation.sequences 9999")
    assert run_distributed(announce, 1, many, timeout=120)[0] == [f"{expected} (validation.sequences: 9,999)"]
    exact = nano_run(small_folder, tmp_path, f"--validation.sequences {windows}")
    assert run_distributed(announce, 1, exact, timeout=120)[0] == []
    # An odd number is not shared equally: each corpus has 6 windows.
    halves = f"{small_folder}:1/2,{small_folder}:1/2"
    blend = nano_run(small_folder, tmp_path, f"--data {halves} --validation.sequences 13")
    assert run_distributed(announce, 1, blend, timeout=120)[0] == []
