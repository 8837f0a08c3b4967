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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not valid JSON"),
        (
            '{"format": 2, "files": {"a": {"bytes": 1, "xxh3_128": ""}}}',
            "format: 2 is not valid; give one of 1",
        ),
        ('{"format": 1, "files": {}}', "files: {} is not valid"),
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
