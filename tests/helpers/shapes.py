"""Sessions in any parallel configuration, and what their engines hold, gathered by DeepSpeed's functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor

from pretrain.checkpoint.sharded_files import UnshardedCheckpoint
from pretrain.checkpoint.store import CheckpointStore
from pretrain.config.run_config import RunConfig
from pretrain.engine.ds_config_check import read_ds_config
from tests.helpers.distributed import run_distributed
from tests.helpers.training import ROOT, Opened, fit, nano_run
from tests.helpers.training import build as open_here

# Odd sizes, so that ZeRO's partitions do not divide evenly over 2 ranks, and widths that 3 tensor-parallel
# ranks divide; every kind of parameter: biases of all projections and norms, learned positions, an untied
# output.
ODD_MODEL = [
    "--heads 3x1,5x1,9x2 --architecture.d_model 45 --architecture.ffn_width 63",
    "--architecture.tie_embeddings false --architecture.ffn_bias true",
    "--architecture.positions learned --architecture.norm layernorm --architecture.norm_bias true",
    "--architecture.attention_bias all --global_batch_tokens 768 --micro_batch 3",
]
SEQUENCES = 12
VOCABULARY_ROWS = 640  # 600 rounded up to a multiple of 128; 3 tensor-parallel ranks pad to 768


class Shape(NamedTuple):
    """A parallel configuration."""

    ranks: int
    stage: int
    precision: str = "fp32"
    zero: tuple[tuple[str, Any], ...] = ()
    """Settings of zero_optimization beyond those of ds_configs/zeroN.json."""
    tensor_parallel: int = 1
    context_parallel: int = 1

    def __str__(self) -> str:
        more = "".join(f"-{key}" for key, _ in self.zero)
        tensor = f"-t{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        tensor += f"-c{self.context_parallel}" if self.context_parallel > 1 else ""
        return f"{self.ranks}ranks{tensor}-zero{self.stage}-{self.precision}{more}"


def shape_run(data: Path, runs: Path, shape: Shape, *more: str) -> RunConfig:
    """A run of 3 steps without validation, saved at the end."""
    quick = "--steps 3 --validation.every 0 --checkpoint.every 0"
    degrees = f"--tensor_parallel {shape.tensor_parallel} --context_parallel {shape.context_parallel}"
    shaped = f"--precision {shape.precision} {degrees}"
    return nano_run(data, runs, shaped, quick, *more)


def build(run: RunConfig, shape: Shape) -> Opened:
    """A session in this worker."""
    ds_config = read_ds_config(str(ROOT / f"ds_configs/zero{shape.stage}.json"))
    ds_config["zero_optimization"] |= dict(shape.zero)
    return open_here(run, ds_config)


def gathered(engine: Any) -> dict[str, dict[str, Any]]:
    """What the data-parallel ranks hold together. Collective.

    By parameter: fp32, exp_avg, exp_avg_sq, weight (what the model computes with) and the dimension that
    tensor parallelism cuts; the groups' hyperparameters; the step counts of all flat tensors.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed 0.19.8 links the moments when the first group is stepped, and the other groups have none
        # yet.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = {"fp32": safe_get_full_fp32_param(parameter).clone()}
        # megatron's layers say along which dimension they cut; nothing else is cut.
        cut = getattr(parameter, "tensor_model_parallel", False)
        found[name]["dimension"] = parameter.partition_dim if cut else None
        for key in ("exp_avg", "exp_avg_sq"):
            found[name][key] = safe_get_full_optimizer_state(parameter, key).clone()
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            found[name]["weight"] = parameter.detach().clone()
    inner = optimizer.optimizer
    keys = ("lr", "weight_decay", "betas", "eps")
    settings = {group["name"]: {key: group[key] for key in keys} for group in inner.param_groups}
    steps = {int(state["step"]) for state in inner.state.values() if "step" in state}
    return {"parameters": found, "groups": settings, "steps": steps}  # type: ignore[dict-item]


def train_and_gather(run: RunConfig, shape: Shape) -> Any:
    """Train a run in this worker to its end, which saves it; what the engine holds then."""
    found = gathered(fit(build(run, shape)))
    return found if torch.distributed.get_rank() < shape.tensor_parallel else None


def load_and_gather(run: RunConfig, shape: Shape, resave: Path) -> Any:
    """Load a finished run in this shape, save it again under *resave*; what the engine holds, and the
    notes."""
    session = build(run, shape)
    engine = fit(session)
    store = CheckpointStore(resave, run.checkpoint, session.world)
    store.begin(engine, session.state, run.folder / "tokenizer")
    store.finish()
    found: dict[str, Any] = gathered(engine)
    found["notes"] = session.notes
    found["counters"] = (engine.global_steps, engine.global_samples, engine.skipped_steps)
    return found if torch.distributed.get_rank() < shape.tensor_parallel else None


def joined(results: list[Any], rows: int) -> Any:
    """Join what the tensor-parallel ranks hold (the results that are there), the vocabulary cut to *rows*."""
    parts = [part for part in results if part is not None]
    whole: Any = dict(parts[0], parameters={})
    assert all(part["groups"] == whole["groups"] and part["steps"] == whole["steps"] for part in parts)
    for name, first in parts[0]["parameters"].items():
        merged = whole["parameters"][name] = {}
        for key in ("fp32", "exp_avg", "exp_avg_sq", "weight"):
            shards = [part["parameters"][name][key] for part in parts]
            if first["dimension"] is None:
                assert all(same_bits(shard, shards[0]) for shard in shards), f"ranks hold another {name}"
                merged[key] = shards[0]
            else:
                merged[key] = torch.cat(shards, first["dimension"])
            if name in ("token_embedding.weight", "output.weight"):
                assert not merged[key][rows:].any()
                merged[key] = merged[key][:rows]
    return whole


class Saved(NamedTuple):
    """A finished run and what its engine held at the end."""

    run: RunConfig
    shape: Shape
    reference: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        return newest(self.run.folder)


def train(data: Path, runs: Path, shape: Shape, *more: str) -> Saved:
    """Train a run of 3 steps in a shape."""
    run = shape_run(data, runs, shape, *more)
    # Long enough for a busy machine to compile DeepSpeed's CPU optimizer, at the first offloaded shape.
    results = run_distributed(train_and_gather, shape.ranks, run, shape, timeout=400)
    return Saved(run, shape, joined(results, VOCABULARY_ROWS))


def newest(run_folder: Path) -> Path:
    """A run's newest checkpoint."""
    return run_folder / "checkpoints" / (run_folder / "latest").read_text().strip()


def contents(folder: Path) -> dict[str, dict[str, Any]]:
    """The whole tensors and step counts of a checkpoint."""
    checkpoint = UnshardedCheckpoint.open(folder)
    return {
        name: {"fp32": checkpoint.parameter(name), **checkpoint.optimizer_state(name)}
        for name in checkpoint.names()
    }


def differences(first: dict[str, dict[str, Any]], second: dict[str, dict[str, Any]]) -> list[str]:
    """Which tensors are not bit-identical, and which parameters only one side has."""
    names, both = sorted(first.keys() ^ second.keys()), first.keys() & second.keys()
    tensors = [(name, key) for name in both for key in ("fp32", "exp_avg", "exp_avg_sq")]
    wrong = [(name, key) for name, key in tensors if not same_bits(first[name][key], second[name][key])]
    return names + [f"{key} of {name}" for name, key in wrong]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and every bit (0.0 and -0.0 differ)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
