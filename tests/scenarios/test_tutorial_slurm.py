"""The tutorial on SLURM: its commands, one after the other, on a real SLURM of two nodes."""

import re

import pytest

from tests.helpers import slurm
from tests.helpers.launch import ROOT
from tests.helpers.tutorials import run_commands

WHY_NOT = slurm.unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_NOT is not None, reason=f"real SLURM: {WHY_NOT}")]
PAGE = ROOT / "docs/tutorial_slurm.md"
# What a reader waits for before the next command.
WAITS = {
    "--name long": "until grep -q '^step ' slurm-124m-3.log; do sleep 0.2; done",
    "scancel": "while squeue -h | grep -q .; do sleep 0.2; done",
}


def test_its_commands_do_what_it_says(cluster, tmp_path):
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert blocks.pop(0).startswith("make setup") and len(blocks) == 10
    for name in ("slurm", "pretrain", "model", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = ""
    for number, block in enumerate(blocks):
        # The page's runs would take minutes more.
        shorter = block.replace("--steps 60", "--steps 12").replace("--steps 300", "--steps 40")
        script += f"echo '==> {number}'\n{shorter}"
        script += "".join(f"{wait}\n" for text, wait in WAITS.items() if text in block)
    done = run_commands(script, tmp_path, {**cluster.environment, **slurm.ENVIRONMENT})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + cluster.logs()
    parts = dict(re.findall(r"==> (\d+)\n(.*?)(?=^==> |\Z)", done.stdout, re.DOTALL | re.MULTILINE))
    local, job, two, long, export = (parts[number] for number in "14589")
    results = [re.findall(r"^result .*", text, re.MULTILINE) for text in (local, job)]
    assert len(results[0]) == 1 and results[0] == results[1]
    assert "ranks    2, on" in two and "micro-batch 2 x accumulation 1 x data-parallel 2" in two
    assert re.search(r"requeued, to continue automatically\n(.*\n)*resume .*\n(.*\n)*finished 40 steps", long)
    assert "logits   max" in export and (tmp_path / "hf/long/model.safetensors").is_file()
