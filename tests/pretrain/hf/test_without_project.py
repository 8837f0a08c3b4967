"""An exported folder in an environment that has torch and transformers, and nothing of this project."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import venv
from pathlib import Path

import pytest
import torch

from pretrain import convert
from pretrain.data.tokenizer import load_tokenizer
from tests.helpers.networks import network, relative
from tests.pretrain.hf import outside_project
from tests.pretrain.hf.test_lm_head import described, imported

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of a new environment that has the packages of this one: a path file adds their folders, and
    the hooks of editable installs in them are not read."""
    root = tmp_path_factory.mktemp("outside")
    venv.create(root / "env", symlinks=True)
    found = [importlib.util.find_spec(name) for name in ("torch", "transformers", "peft")]
    folders = dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in found if spec is not None)
    target = next((root / "env").glob("lib/python*/site-packages"))
    (target / "packages.pth").write_text("\n".join(folders) + "\n")
    return root / "env/bin/python"


def run(python, home, *arguments):
    """The report of outside_project in a separate process, offline, with an empty cache."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    variables = kept | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [str(python), "-I", outside_project.__file__, *map(str, arguments)]
    done = subprocess.run(command, cwd=home, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def chain(python, tmp_path_factory):
    """The folder of a model in muP with capped logits, what the programs report, and their files."""
    root = tmp_path_factory.mktemp("chain")
    folder, out = root / "hf", root / "out"
    assert convert.main([str(imported(root, "both", False)), "--out", str(folder)]) == 0
    out.mkdir()
    report = run(python, out, "first", folder, out)
    (root / "later").mkdir()
    return folder, report | run(python, root / "later", "again", out), out


def test_loaded_padded_saved_and_loaded_again(chain):
    folder, report, out = chain
    assert report["class"] == "transformers_modules.HeadScheduleForCausalLM"
    ours, tokenizer = network(described("both", False, vocab_size=300)), load_tokenizer(folder)
    for prompt, logits in zip(outside_project.PROMPTS, torch.load(out / "alone.pt"), strict=True):
        with torch.no_grad():
            assert relative(logits, ours(torch.tensor([tokenizer.encode(prompt)]))[0]) <= 1e-5
    assert report["padding"] > 20 and report["padded"] <= 1e-5 and report["texts"]
    assert report["reloaded"] == 0
    assert (out / "saved/modeling_head_schedule.py").is_file(), "the code comes with the weights"


def test_lora_is_merged(chain):
    pytest.importorskip("peft")
    assert chain[1]["changed"] > 1e-2 and chain[1]["merged"] <= 1e-5
