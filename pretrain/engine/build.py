"""Builds the DeepSpeed engine of a run from its ds_config and RunConfig.

A ds_config holds ZeRO, dtypes and engine settings. Values that the RunConfig owns (batch sizes, clipping,
optimizer, schedule) are "auto" in it, or equal to the RunConfig's. Any other value is rejected before a
process group exists.
"""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist

from model.config import ModelConfig
from model.errors import UserError
from model.initialization import initialize
from model.process_grid import ProcessGrid
from model.transformer import Fused, Transformer
from pretrain.config.run_config import RunConfig
from pretrain.engine.compiling import compile_network, find_missing_compiler
from pretrain.engine.deepspeed_logging import quiet_start, show_requested_logs
from pretrain.engine.ds_config import is_offloaded
from pretrain.engine.matrix_exchange import connect_muon
from pretrain.engine.patches import (
    accept_optimizer,
    count_loaded_steps,
    forget_stage_3_modules,
    lock_by_process,
    prepare_deepspeed,
)
from pretrain.optim.groups import build_optimizer, parameter_groups


def build_network(
    run: RunConfig,
    model_config: ModelConfig,
    ds_config: dict[str, Any],
    grid: ProcessGrid,
    *,
    compiled: bool = False,
    fused: Fused = "loss",
    attention: Literal["blocks", "torch"] = "torch",
) -> Transformer:
    """Build the model with the weights of the run's seed: this rank's part of it on a grid with t > 1, and at
    ZeRO stage 3.

    Args:
        run: the requested settings; its ``compile``, ``fused`` and ``attention`` are decided elsewhere and
            passed separately.
        ds_config: the result of merge_ds_config.
        grid: the run's process grid.
    """
    prepare_deepspeed()
    import deepspeed

    partitioned = ds_config["zero_optimization"]["stage"] == 3
    mpu = deepspeed_mpu(grid)
    # Stage 3 partitions over the ranks that hold the same shard; without an mpu over all ranks.
    mpu_groups = {"mpu": mpu, "data_parallel_group": mpu.get_data_parallel_group()} if mpu else {}
    partitioning: Any = contextlib.nullcontext()
    if partitioned:
        with explain_refusals():
            partitioning = deepspeed.zero.Init(config_dict_or_path=ds_config, **mpu_groups)
    with partitioning:
        network = Transformer(
            model_config,
            grid,
            checkpoint_activations=run.activation_checkpointing,
            fused=fused,
            attention=attention,
        )
    if partitioned:
        initialize(
            network, run.seed, gather=lambda p: deepspeed.zero.GatheredParameters([p], modifier_rank=0)
        )
    else:
        initialize(network, run.seed)
    if compiled:
        compile_network(network)
    return network


def build_run_optimizer(
    run: RunConfig, network: Transformer, ds_config: dict[str, Any]
) -> torch.optim.Optimizer:
    """Build the run's optimizer, whose groups have names, over the parameters of *network*.

    Raises:
        UserError: an offloaded AdamW cannot be compiled, since there is no compiler.
    """
    offload = is_offloaded(ds_config["zero_optimization"], "offload_optimizer")
    if offload and run.optimizer.kind == "adamw":
        lock_by_process()  # DeepSpeed compiles its optimizer
    groups = parameter_groups(network, run.optimizer, run.lr_rules, run.llr.active)
    try:
        optimizer = build_optimizer(groups, run.optimizer, offload, run.muon)
    except RuntimeError as error:  # an operator that is built already needs no compiler
        missing = find_missing_compiler(torch.device("cpu"))
        if not (offload and missing):
            raise
        raise UserError(
            f"ds_config: offload_optimizer with AdamW compiles DeepSpeed's CPU Adam, and {missing}; "
            "install it, or give a ds_config without offload_optimizer"
        ) from error
    if run.optimizer.kind == "muon":
        accept_optimizer(type(optimizer))
    elif offload:
        count_loaded_steps(optimizer)
    return optimizer


def build_engine(
    run: RunConfig,
    network: Transformer,
    optimizer: torch.optim.Optimizer,
    ds_config: dict[str, Any],
    grid: ProcessGrid,
) -> Any:
    """Build the DeepSpeedEngine around a model and its optimizer."""
    import deepspeed

    from model.parameters import parameter_specs

    with explain_refusals(), quiet_start(wanted=bool(ds_config.get("memory_breakdown"))):
        engine, _, _, _ = deepspeed.initialize(
            model=network,
            optimizer=optimizer,
            config=ds_config,
            dist_init_required=False,
            mpu=deepspeed_mpu(grid),
        )
    show_requested_logs(ds_config)
    if run.optimizer.kind == "muon":
        connect_muon(engine, parameter_specs(network.config), network.config, run.muon)
    return engine


def destroy_engine(engine: Any) -> None:
    """Let an engine go, so that another can be built in its place; then drop every reference, and
    free_memory."""
    engine.destroy()
    engine.optimizer = None
    forget_stage_3_modules()


def free_memory(compiled: bool = True) -> None:
    """Free what engines that nobody refers to any more hold: they are cycles, which wait for the collector.

    Args:
        compiled: whether one of them was compiled.
    """
    if compiled:  # a model of other shapes is recompiled, and must not meet the recompile limit
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def explain_refusals() -> Iterator[None]:
    """Turn DeepSpeed's errors about its configuration into a one-line UserError. Wrap only calls of
    DeepSpeed.

    Errors that are not about the configuration pass through: no memory left, a device or another rank that
    failed. With PRETRAIN_TRACEBACK in the environment every error passes through, with its full traceback.

    Raises:
        UserError: with DeepSpeed's own first lines; the same on every rank, since all of them read
            the same configuration.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        passing = (MemoryError, ConnectionError, torch.OutOfMemoryError, torch.AcceleratorError)
        if isinstance(error, passing) or is_in_collective(error) or os.environ.get("PRETRAIN_TRACEBACK"):
            raise
        # The first line of pydantic's message counts the errors, the next two say which.
        reason = "; ".join(line.strip() for line in str(error).splitlines()[:3] if line.strip())[:300]
        reason = reason if reason.isprintable() else ascii(reason)
        raise UserError(
            f"ds_config: DeepSpeed rejects it: {reason or 'no reason given'} ({type(error).__name__}); "
            "PRETRAIN_TRACEBACK=1 shows where"
        ) from error


def is_in_collective(error: BaseException) -> bool:
    """Whether *error* was raised inside torch.distributed: then a rank is gone, however the backend words
    it."""
    return any("torch/distributed/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


class ModelParallelUnit:
    """A process grid with the methods that DeepSpeed calls on an ``mpu``. Its data-parallel ranks are those
    of all batches and, with context parallelism, of all positions.

    It has no ``initialize_sequence_parallel`` on purpose: DeepSpeed takes an mpu that has it for Ulysses
    sequence parallelism, and ignores its groups.
    """

    def __init__(self, grid: ProcessGrid) -> None:
        self._grid = grid

    def get_tensor_model_parallel_rank(self) -> int:
        """Index of this rank's part of every sharded parameter."""
        return self._grid.tensor_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        """The tensor-parallel degree t."""
        return self._grid.tensor_parallel

    def get_tensor_model_parallel_group(self) -> Any:
        """The ranks that share one copy of the model."""
        return self._grid.tensor_group

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Global rank of the tensor group's first member."""
        return dist.get_global_rank(self._grid.tensor_group, 0)

    def get_data_parallel_rank(self) -> int:
        """Which of the ranks with its part of the model this is, over batches and positions."""
        return self._grid.replica_rank

    def get_data_parallel_world_size(self) -> int:
        """Number of ranks that hold the same part of the model."""
        return self._grid.replicas

    def get_data_parallel_group(self) -> Any:
        """The ranks that hold the same part of the model."""
        return self._grid.replica_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Global ranks of the data-parallel group."""
        return dist.get_process_group_ranks(self._grid.replica_group)

    # Without pipelines, model parallelism is tensor parallelism.
    get_model_parallel_rank = get_tensor_model_parallel_rank
    get_model_parallel_world_size = get_tensor_model_parallel_world_size
    get_model_parallel_group = get_tensor_model_parallel_group


def deepspeed_mpu(grid: ProcessGrid) -> ModelParallelUnit | None:
    """Build the ``mpu`` argument of deepspeed.initialize; None at t = 1, where DeepSpeed needs none."""
    return ModelParallelUnit(grid) if grid.tensor_parallel > 1 else None
