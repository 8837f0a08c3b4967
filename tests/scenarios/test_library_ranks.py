"""Several calls of train in the ranks of a launcher: each leaves them as they were, and the next can meet."""

import os
import subprocess

import pytest

from tests.helpers.launch import ROOT

PROGRAM = """
import sys
import torch._dynamo  # torch's optimizers import it, which changes filters of warnings
import torch.distributed as dist
import pretrain.assembly.open_run, pretrain.report, pretrain.trainer
from pretrain import recipe, train
from pretrain.utils.plotting import _figure_class
from tests.helpers.process_state import differences, process_state

data, runs = sys.argv[-2:]
settings = dict(
    model="prism-nano", data=data, runs_dir=runs, steps=2, global_batch_tokens=512, micro_batch=2,
    precision="fp32", checkpoint={"every": 2}, logging={"wandb": "disabled"}, validation={"every": 0},
)
_figure_class()
for name, degree in (("a", 1), ("b", 2), ("c", 1)):
    before = process_state()
    train(recipe("micro", name=name, tensor_parallel=degree, **settings), "zero1")
    changed = differences(before, process_state())
    # A store that was closed a moment ago still closes its pipe.
    assert not [line for line in changed if not line.startswith("files: new ['pipe:")], changed
dist.init_process_group("gloo")  # at the launcher's address, where train has met
train(recipe("micro", name="d", tensor_parallel=2, **settings), "zero1")
dist.barrier()
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun --nproc_per_node 2", "deepspeed --num_accelerators 2"])
def test_train_again_with_another_degree_and_within_a_group(small_folder, tmp_path, launcher):
    (program := tmp_path / "program.py").write_text(PROGRAM)
    command = [*launcher.split(), str(program), str(small_folder), str(tmp_path / "runs")]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout.count("done") >= 2, done.stderr[-3000:]
