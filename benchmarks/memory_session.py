"""One rank of a short training session that measures its own memory; started by benchmarks/memory.py.

Reads a JSON object from its argument and prints one. The values are growth over what the process had before
the model was built (interpreter, libraries and process group), in bytes:

- ``peak``: of resident memory, as the kernel counts it (VmHWM); on CUDA ``torch.cuda.max_memory_allocated``;
- ``allocated``: the most that torch's allocator had handed out at once, touched or not. On CUDA the same
number.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from benchmarks.helpers import command_line_of, process_memory  # noqa: E402


def main(case: dict[str, Any]) -> dict[str, Any]:
    """Train *case* (see benchmarks/memory.py) for a few steps.

    Returns:
        ``{"peak": bytes, "allocated": bytes}`` of this rank.
    """
    import torch

    from model.attention import block_mask
    from model.config import ModelConfig
    from pretrain.engine.build import build_engine, build_network, build_run_optimizer
    from pretrain.engine.ds_config import merge_ds_config
    from pretrain.engine.ds_config_check import read_ds_config
    from pretrain.engine.patches import prepare_deepspeed
    from pretrain.plan.micro_batch import plan_batch
    from pretrain.runtime.world import start_world

    prepare_deepspeed()
    warnings.simplefilter("ignore")
    command = command_line_of(*case["arguments"])
    run = command.run
    model = ModelConfig.from_json(case["model"])
    c, degrees = run.context_parallel, (run.tensor_parallel, run.sequence_parallel)
    world = start_world(case["threads"], False, *degrees, context_parallel=c)
    wanted, copies, device = (
        (run.global_batch_tokens, run.micro_batch),
        world.data_parallel,
        world.device.type,
    )
    plan = plan_batch(*wanted, model, copies, 1 << 40, device, world.tensor_parallel)
    ds_config = read_ds_config(command.ds_config)
    ds_config["zero_optimization"] |= case["zero"]
    merged = merge_ds_config(ds_config, run, plan, run.precision == "bf16", model)

    def train(config: ModelConfig, steps: int) -> None:
        chosen: Any = {"compiled": run.compile is True}
        chosen |= {name: value for name in ("fused", "attention") if (value := getattr(run, name)) != "auto"}
        network = build_network(run, config, merged, world.grid, **chosen)
        engine = build_engine(run, network, build_run_optimizer(run, network, merged), merged, world.grid)
        engine.train()
        generator = torch.Generator().manual_seed(world.data_rank)
        shape = (plan.micro_batch, config.context_length)
        for _ in range(steps * plan.accumulation):
            tokens = torch.randint(0, config.vocab_size, shape, generator=generator).to(world.device)
            loss = engine(tokens, tokens)
            engine.backward(loss)
            engine.step()

    # A tiny model first: kernels, thread pools, DeepSpeed's modules and the process group take what they take
    # once.
    train(model.replace(d_model=2 * math.lcm(*model.heads), ffn_width=64, vocab_size=256), steps=1)
    block_mask.cache_clear()  # of this model, too
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train(model, case["steps"])
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return {"peak": peak, "allocated": peak, "device": torch.cuda.get_device_name()}
    if case["trace"]:
        return {"allocated": _traced(torch, lambda: train(model, case["steps"]))}
    before = process_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    train(model, case["steps"])
    return {"peak": process_memory("VmHWM") - before}


def _traced(torch: Any, function: Any) -> int:
    """The highest sum of torch's CPU allocations and releases while *function* runs."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        function()
    held = highest = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
