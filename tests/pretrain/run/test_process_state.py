"""What a call of train finds, and what it leaves."""

import os
import sys
import tempfile

import pytest
import torch

from pretrain.engine.patches import preserve_libraries
from pretrain.run.process_state import preserve_environment, preserve_torch


@pytest.fixture
def own_settings():
    """Those of a caller that are not a new process's."""
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    yield
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


def read():
    return (
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )


def test_torch_computes_as_in_a_new_process(own_settings):
    before = read()
    with preserve_torch():
        assert read() == ("highest", torch.float32, False, before[3])
        torch.set_num_threads(before[3] + 1)
    assert read() == before


def test_temporary_files_stay_where_they_were(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with preserve_environment():
        os.environ["TMPDIR"] = tempfile.tempdir = "/elsewhere"
    assert tempfile.gettempdir() == str(tmp_path) and os.environ.get("TMPDIR") != "/elsewhere"


def test_communication_is_logged_by_the_session_that_asks_for_it():
    with preserve_libraries():
        sys.modules["deepspeed.comm.comm"].comms_logger.enabled = True
    assert not sys.modules["deepspeed.comm.comm"].comms_logger.enabled
    sys.modules["deepspeed.comm.comm"].comms_logger.enabled = True
    with preserve_libraries():
        assert not sys.modules["deepspeed.comm.comm"].comms_logger.enabled
    assert sys.modules["deepspeed.comm.comm"].comms_logger.enabled
    sys.modules["deepspeed.comm.comm"].comms_logger.enabled = False
