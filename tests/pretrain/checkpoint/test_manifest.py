"""A checkpoint's files are those it was written with."""

import json
import os
import shutil
from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.checkpoint.finder import newest_valid, require_steps
from pretrain.checkpoint.manifest import verify, write_manifest
from pretrain.run.saved import find_checkpoint
from pretrain.utils.files import file_entry
from tests.helpers.damage import damage


def test_every_file_is_in_the_manifest(finished):
    checkpoint = finished.folder / "checkpoints" / "step_000012"
    files = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert set(json.loads((checkpoint / "manifest.json").read_text())["files"]) == files - {"manifest.json"}


@pytest.mark.parametrize(
    ("how", "said"),
    [("truncated", "bytes"), ("missing", "is missing"), ("flipped", "contents that were written")],
)
def test_damage_is_found_and_named(finished, tmp_path, how, said):
    checkpoint = tmp_path / "step_000012"
    shutil.copytree(finished.folder / "checkpoints" / "step_000012", checkpoint)
    assert verify(checkpoint) is None
    damage(checkpoint / "weights_and_optimizer/rank_00000.safetensors", how)
    assert said in verify(checkpoint)
    shares = [verify(checkpoint, part, 3) for part in range(3)]
    assert shares.count(None) == 2  # every file is read by one of the ranks


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not valid JSON"),
        (
            '{"format": 2, "files": {"a": {"bytes": 1, "xxh3_128": ""}}}',
            "format: 2 is not valid; give one of 1",
        ),
        ('{"format": 1, "files": {}}', "files: {} is not valid"),
        ('{"format": 1, "files": {"a": {"bytes": 1, "xxh3_128": ""}}}', "does not list state.json"),
        ("[" * 100_000, "nested too deeply"),
        ('{"format": 1, "files": {"a": {"bytes": -1, "xxh3_128": ""}}}', "-1 is not valid"),
        *(
            (json.dumps({"format": 1, "files": {name: {"bytes": 1, "xxh3_128": ""}}}), "inside the folder")
            for name in ("/etc/hostname", "../step_000001/state.json", "a/../../b", "", ".", "a\0b")
        ),
    ],
)
def test_a_damaged_manifest_is_said_and_leads_out_of_no_folder(tmp_path, content, said):
    (tmp_path / "manifest.json").write_text(content)
    problem = verify(tmp_path)
    assert problem is not None and said in problem and problem.isprintable()


KINDS = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors/x"])
def test_what_has_no_end_is_not_read(tmp_path, kind, name):
    """Neither by verify nor by what holds a checkpoint while it does."""
    folder = tmp_path / "checkpoints" / "step_000002"
    (folder / "tensors").mkdir(parents=True)
    for other in {"state.json", "tensors/x"}:
        (folder / other).write_text("{}")
    write_manifest(folder, {other: file_entry(folder / other) for other in ("state.json", "tensors/x")})
    assert verify(folder) is None
    (folder / name).unlink()
    KINDS[kind](folder / name)
    problem = verify(folder)
    assert problem is not None and Path(name).name in problem and problem.isprintable()
    with pytest.raises(UserError, match="holds none that is whole") as refusal:
        find_checkpoint(tmp_path, None, pytest.fail)
    assert problem in str(refusal.value)


def test_links_that_lead_to_themselves_are_one_line(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    checkpoints.symlink_to("checkpoints")
    with pytest.raises(UserError, match=r"^run: "):
        require_steps(tmp_path)
    checkpoints.unlink()
    checkpoints.mkdir()
    (checkpoints / "step_000002").symlink_to("step_000002")
    said = []
    assert require_steps(tmp_path) == [2]
    assert newest_valid(tmp_path, [2], passed_over=lambda folder, problem: said.append(problem)) is None
    assert len(said) == 1 and "Too many levels of symbolic links" in said[0]
