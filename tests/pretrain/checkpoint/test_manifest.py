"""A checkpoint's files are those it was written with."""

import json
import shutil

import pytest

from pretrain.checkpoint.manifest import verify
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
    damage(checkpoint / "deepspeed/mp_rank_00_model_states.pt", how)
    assert said in verify(checkpoint)
    shares = [verify(checkpoint, part, 3) for part in range(3)]
    assert shares.count(None) == 2  # every file is read by one of the ranks


def test_a_damaged_manifest_is_said(finished, tmp_path):
    checkpoint = tmp_path / "step_000012"
    shutil.copytree(finished.folder / "checkpoints" / "step_000012", checkpoint)
    (checkpoint / "manifest.json").write_text("{")
    assert verify(checkpoint) == "manifest.json cannot be read (JSONDecodeError)"
    (checkpoint / "manifest.json").write_text('{"format": 0}')
    assert verify(checkpoint).startswith("its format is 0, this version reads ")
