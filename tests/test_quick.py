"""Which files ``make quick`` leaves out."""

import pytest

from tests.conftest import takes_time


@pytest.mark.parametrize(
    ("code", "left_out"),
    [
        ("# plots the launch of deepspeed\nTEXT = 'import subprocess'", False),
        ("def test_a(tmp_path):\n    'draws small_folder'", False),
        ("import subprocess", True),
        ("def test_a():\n    from matplotlib.figure import Figure", True),
        ("from torch import distributed", True),
        ("import torch.distributed as dist", True),
        ("import torch.nn", False),
        ("from tests.helpers import launch", True),
        ("from tests.helpers.distributed import run_distributed", True),
        ("import subprocesses", False),
        ("def test_a(small_folder): pass", True),
        ("pytestmark = pytest.mark.takes_time", True),
    ],
)
def test_files_are_chosen_by_what_they_use(code, left_out):
    assert takes_time(code) == left_out
