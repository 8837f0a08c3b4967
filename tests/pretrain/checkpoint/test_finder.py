import itertools
import threading
from pathlib import Path

from pretrain.checkpoint.finder import checkpoint_path, checkpoint_steps, newest_valid


def run_with(folder: Path, *steps: int) -> Path:
    for step in steps:
        checkpoint_path(folder, step).mkdir(parents=True)
    return folder


def test_steps_are_those_of_finished_checkpoints_in_order_of_number(tmp_path):
    run_with(tmp_path, 900_000, 1_000_000, 5)
    others = ".writing_step_000007 .replaced_step_000005 step_000005.canonical step_x step_"
    for name in (*others.split(), f"step_{'9' * 200}"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "step_000009").write_text("no folder")
    assert checkpoint_steps(tmp_path) == [5, 900_000, 1_000_000]
    assert checkpoint_steps(tmp_path / "nowhere") == []
    assert checkpoint_path(tmp_path, 1_000_000).name == "step_1000000"


def test_a_listing_is_never_empty_while_a_run_replaces_its_only_checkpoint(tmp_path):
    """The new checkpoint is there before the old one goes; whoever lists must see one of them."""
    run_with(tmp_path, 1)
    ended = threading.Event()

    def train() -> None:
        for step in itertools.count(2):
            checkpoint_path(tmp_path, step).mkdir()
            checkpoint_path(tmp_path, step - 1).rmdir()
            if ended.is_set():
                return

    training = threading.Thread(target=train)
    training.start()
    try:
        assert all(checkpoint_steps(tmp_path) for _ in range(1000))
    finally:
        ended.set()
        training.join()


def test_the_newest_valid_one_is_found_and_newer_ones_are_named(tmp_path):
    run_with(tmp_path, 2, 4, 6)
    broken = {"step_000006": "is cut", "step_000004": None, "step_000002": None}
    looked: list[str] = []

    def problem_of(folder: Path) -> str | None:
        looked.append(folder.name)
        return broken[folder.name]

    notes: list[tuple[str, str]] = []
    found = newest_valid(
        tmp_path, [2, 4, 6], problem_of, lambda folder, why: notes.append((folder.name, why))
    )
    assert found == checkpoint_path(tmp_path, 4) and notes == [("step_000006", "is cut")]
    assert looked == ["step_000006", "step_000004"], "older ones are not read"
    assert newest_valid(tmp_path, [6], problem_of) is None
    assert newest_valid(tmp_path, []) is None
