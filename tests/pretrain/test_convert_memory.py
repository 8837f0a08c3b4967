"""Converting holds about one copy of the weights."""

import json
import subprocess
import sys

import pytest
import torch

from model.config import ModelConfig, block
from pretrain.canonical import parameter_specs
from pretrain.canonical_folder import CanonicalParameter, write_canonical
from pretrain.checkpoint import TrainingState
from pretrain.data.tokenizer import tokenizer_hash

LIMIT = 1.3

# RssAnon: memory of this process's own. Files that are mapped while they are read belong to the system's cache.
MEASURE = """
import json, sys, threading, time

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

from pretrain.hf.quiet import quiet_libraries
quiet_libraries()
import torch
import transformers.models.llama.modeling_llama
import pretrain.hf.export_folder, pretrain.hf.modeling_head_schedule
from pretrain.hf.run_source import RunSource
from pretrain import convert
torch.set_num_threads(1)
before = peak = anonymous()
done = False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
assert convert.main([sys.argv[1], "--out", sys.argv[2], "--format", sys.argv[3]]) == 0
done = True
thread.join()
print(json.dumps({"before": before, "peak": peak}))
"""


def write_run(folder, small, model: ModelConfig) -> None:
    """A run with random weights that was never trained."""
    state = TrainingState(model=model.to_json(), data={"tokenizer": tokenizer_hash(small.tokenizer)})
    generator = torch.Generator().manual_seed(0)

    def parameters():
        for name, spec in parameter_specs(model).items():
            weight = torch.empty(spec.shape).normal_(0, 0.02, generator=generator)
            if spec.vocabulary:
                weight[model.vocab_size :] = 0
            yield CanonicalParameter(name, weight)

    (folder / "checkpoints").mkdir(parents=True)
    write_canonical(
        folder / "checkpoints" / "step_000000", state, [], parameters(), small.folder / "tokenizer"
    )


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["native", "llama"])
def test_peak_memory(chosen, small, tmp_path):
    """340 MB of weights: what is not weights (tokenizer, tokens, one tensor, logits) is some tens of MB."""
    heads = (4, 6, 8, 12) * 3 if chosen == "native" else (12,) * 12
    model = block("llama", vocab_size=600, context_length=256, d_model=768, ffn_width=2048, heads=heads)
    write_run(tmp_path / "run", small, model)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "run"), str(tmp_path / "hf"), chosen]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stderr
    measured = json.loads(finished.stdout.splitlines()[-1])
    weights = 4 * model.num_parameters()
    ratio = (measured["peak"] - measured["before"]) / weights
    print(f"{chosen}: peak {measured['peak'] / 1e6:,.0f} MB, {measured['before'] / 1e6:,.0f} MB before, "
          f"weights {weights / 1e6:,.0f} MB: {ratio:.2f}x")  # fmt: skip
    assert ratio <= LIMIT
