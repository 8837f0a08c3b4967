"""Profile of one training step of pretrain/main.py, by operator.

    python benchmarks/profile_step.py [--shape small] [--kind llama] [--rows 25] [FLAGS of pretrain/main.py]

The shapes are those of benchmarks/throughput.py. Two steps come first, so that caches are filled and graphs compiled.
Nothing is compiled unless --compile asks for it. On a GPU the table is sorted by the device's time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from benchmarks.throughput import SHAPES  # noqa: E402
from pretrain.config.command_line import parse_command_line  # noqa: E402
from pretrain.data.loader import BatchPrefetcher  # noqa: E402
from pretrain.engine.build import build_engine  # noqa: E402
from pretrain.engine.ds_config_check import read_ds_config  # noqa: E402
from pretrain.engine.patches import prepare_deepspeed  # noqa: E402
from pretrain.metrics.session import Metrics  # noqa: E402
from pretrain.run.data import open_data  # noqa: E402
from pretrain.runtime.world import start_world  # noqa: E402
from pretrain.session import build_session  # noqa: E402
from pretrain.trainer import Trainer  # noqa: E402


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--kind", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--rows", type=int, default=25)
    options, flags = parser.parse_known_args()
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.json"
        model.write_text(json.dumps(shape.model(options.kind).to_json()))
        run = parse_command_line(
            [
                "--model", str(model), "--vocab_size", str(shape.vocab_size), "--micro_batch", str(shape.micro_batch),
                "--global_batch_tokens", str(shape.micro_batch * shape.context), "--runs_dir", folder,
                "--validation.every", "0", "--diagnostics_every", "0", "--compile", "false", *flags,
            ]
        ).run  # fmt: skip
        prepare_deepspeed()
        world = start_world(run.threads, run.deterministic)
        ds_config = read_ds_config(str(ROOT / "ds_configs/zero2.json"))
        session = build_session(run, ds_config, open_data(run, print), world)
        trainer = Trainer(session, Metrics(run.folder, total_steps=run.steps, wandb="disabled"))
        trainer.engine = build_engine(session.run, session.model, session.ds_config, world.grid)
        cuda = world.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        with BatchPrefetcher(lambda index: session.micro_batch(0, index), start=0) as batches:
            for _ in range(2):
                trainer._forward_backward(batches)
            began = time.perf_counter()
            trainer._forward_backward(batches)
            if cuda:
                torch.cuda.synchronize()
            print(f"a step without the profiler: {time.perf_counter() - began:.3f} s")
            with profile(activities=activities) as profiler:
                trainer._forward_backward(batches)
                if cuda:
                    torch.cuda.synchronize()
        order = "self_device_time_total" if cuda else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=order, row_limit=options.rows, max_name_column_width=60))
    sys.stdout.flush()
    os._exit(0)  # the prefetcher's and the launcher's threads need not end one by one


if __name__ == "__main__":
    main()
