"""What in-loop diagnostics cost: seconds of a look against seconds of a training step, on this machine.

    python benchmarks/diagnostics_cost.py [--model prism-tiny] [--rounds 5] [FLAGS of pretrain/main.py]

Steps and looks take turns in one process, in the trainer's own objects; medians are printed, and the cost at the
default interval: seconds of a look / (interval x seconds of a step). Peak memory of a look is not in it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import statistics
import tempfile
import time

import torch

from pretrain.config.command_line import parse_command_line
from pretrain.config.run_config import RunConfig
from pretrain.data.loader import BatchPrefetcher
from pretrain.engine.build import build_engine
from pretrain.engine.ds_config_check import read_ds_config
from pretrain.engine.patches import prepare_deepspeed
from pretrain.metrics.session import Metrics
from pretrain.run.data import open_data
from pretrain.runtime.world import start_world
from pretrain.session import build_session
from pretrain.trainer import Trainer


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        command = parse_command_line([*flags, "--runs_dir", folder, "--logging.wandb", "disabled"])
        run = command.run
        prepare_deepspeed()
        world = start_world(run.threads, run.deterministic)
        session = build_session(run, read_ds_config(command.ds_config), open_data(run, print), world)
        diagnostics = session.hooks[-1]
        trainer = Trainer(session, Metrics(run.folder, total_steps=run.steps, wandb="disabled"))
        trainer.engine = engine = build_engine(run, session.model, session.ds_config, world.grid)
        steps, looks = [], []
        with BatchPrefetcher(lambda index: session.micro_batch(0, index), start=0) as batches:
            for index in range(options.rounds + 1):
                steps.append(seconds(world.device, lambda: trainer._forward_backward(batches)))
                trainer._count(True)
                looks.append(seconds(world.device, lambda: diagnostics.run(engine, session.state)))
                if index == 0:  # the first of each fills caches
                    print(f"first step {steps.pop():.3f} s, first look {looks.pop():.3f} s")
    step, look = statistics.median(steps), statistics.median(looks)
    tokens = session.tokens_per_step
    default = RunConfig().diagnostics_every
    print(f"{run.model}: {session.model.num_parameters():,} parameters, {tokens:,} tokens a step")
    print(
        f"step {step:.3f} s, look {look:.3f} s ({run.diagnostics.sequences} windows); medians of {len(steps)}"
    )
    print(f"cost at every {default} steps: {look / (default * step):.2%}")
    if run.diagnostics_every not in (0, default):
        print(f"cost at every {run.diagnostics_every} steps: {look / (run.diagnostics_every * step):.2%}")


def seconds(device: torch.device, work) -> float:  # type: ignore[no-untyped-def]
    """Wall-clock seconds of a call, the device's work included."""
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
