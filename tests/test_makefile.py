"""Which devices ``make train`` takes."""

import os
import subprocess
import sys

import pytest

from tests.helpers.launch import ROOT

ACCELERATOR = """
class accelerator:
    device_count = staticmethod(lambda: {count})
    device_name = staticmethod(lambda: "{kind}")
get_accelerator = accelerator
"""


@pytest.mark.parametrize(
    ("kind", "count", "visible", "flags"),
    [
        ("cuda", 6, None, "--num_accelerators 4"),
        ("cuda", 3, None, "--num_accelerators 2"),
        ("cuda", 3, "5,6,7", "--include localhost:5,6"),
        ("cuda", 1, "3", "--include localhost:3"),
        ("cpu", 1, "2,3", "--num_accelerators 1"),
        ("cpu", 2, None, "--num_accelerators 2"),
    ],
)
def test_make_train_takes_the_visible_devices(tmp_path, kind, count, visible, flags):
    package = tmp_path / "deepspeed" / "accelerator"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(ACCELERATOR.format(count=count, kind=kind))
    text = (ROOT / "Makefile").read_text()
    program = text.split("define DEVICES\n")[1].split("endef")[0]
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"PYTHONPATH": str(tmp_path)} | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.stdout.strip() == flags, ran.stderr
