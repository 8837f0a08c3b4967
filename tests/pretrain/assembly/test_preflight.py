"""What is refused right after parsing: paths and batches, with the number of ranks that the launcher gave."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.assembly.preflight import check_start
from pretrain.config.run_config import RunConfig

BATCH = 8 * 256
RUN = RunConfig(architecture={"context_length": 256}, global_batch_tokens=BATCH)


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def ranks(count: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(count))
        monkeypatch.setenv("RANK", str(count - 1))

    return ranks


def refused(**changes) -> str:
    with pytest.raises(UserError) as caught:
        check_start(replace(RUN, **changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_that_is_not_there(tmp_path):
    (tmp_path / "fineweb").mkdir()
    line = refused(data=str(tmp_path / "finweb"))
    assert (
        line.startswith("data: ")
        and "is not a folder; valid: builtin" in line
        and "did you mean 'fineweb'?" in line
    )
    missing = f"'x/y' is not a folder in {Path.cwd()}; valid"
    assert missing in refused(data=f"{tmp_path / 'fineweb'}:0.5,x/y:0.5")
    check_start(replace(RUN, data=str(tmp_path / "fineweb")))
    (tmp_path / "my text.txt").write_text("text")
    command = f"head-schedules prepare --text '{tmp_path}/my text.txt' --format lines --out data/'my text'"
    assert command in refused(data=str(tmp_path / "my text.txt"))


def test_batches_that_cannot_be_shared(launched, tmp_path):
    data = str(tmp_path)
    check_start(replace(RUN, data=data, micro_batch=4))
    assert refused(data=data, global_batch_tokens=300).startswith(
        "global_batch_tokens: 300 is not a multiple"
    )
    assert refused(data=data, micro_batch=3).startswith("micro_batch: 3 does not divide the 8 sequences")
    launched(3)
    assert "8 sequences of 256 tokens cannot be shared evenly by 3" in refused(data=data)
    assert refused(data=data, tensor_parallel=2).startswith("tensor_parallel: 2 does not divide the 3 ranks")
    launched(4)
    check_start(replace(RUN, data=data, micro_batch=2))
    assert refused(data=data, micro_batch=4).startswith("micro_batch: 4 does not divide the 2 sequences")
    check_start(replace(RUN, data=data, micro_batch=4, tensor_parallel=2))


def test_a_root_that_cannot_be_written_holds_what_is_needed(tmp_path, monkeypatch):
    check_start(replace(RUN, data_root=str(tmp_path / "new" / "data")))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root
    assert "cannot be written" in refused(data_root=str(tmp_path))
    (tmp_path / "builtin-1").mkdir()
    (tmp_path / "builtin-1" / "meta.json").touch()
    check_start(replace(RUN, data_root=str(tmp_path)))  # nothing needs to be written
