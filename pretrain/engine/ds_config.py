"""Completes a ds_config from the RunConfig, and reads the settings that memory depends on."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model.config import ModelConfig
from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.engine.batch import BatchPlan
from pretrain.engine.ds_config_check import BUCKETS

if TYPE_CHECKING:
    from model.transformer import Fused

FP32_BYTES = 4
SMALLEST_BUCKET, LARGEST_BUCKET = 5_000_000, 50_000_000
"""Bounds of what "auto" makes of a bucket, in elements: 20 MB in fp32, below which a collective's latency
counts, and 200 MB."""
_DTYPE_BYTES = {"fp32": FP32_BYTES, "bf16": 2}
# Field of EngineSettings -> its name in a ds_config's zero_optimization.
_SIZES = {
    "reduce_bucket": "reduce_bucket_size",
    "prefetch_bucket": "stage3_prefetch_bucket_size",
    "reuse_distance": "stage3_max_reuse_distance",
    "persistence_threshold": "stage3_param_persistence_threshold",
}


def bf16_by(run: RunConfig, ds_config: dict[str, Any]) -> tuple[bool, str] | None:
    """Whether the settings ask for bf16, and which; None if they leave it to the device.

    Raises:
        UserError: ``precision`` and the ds_config contradict each other.
    """
    given = "enabled" in ds_config.get("bf16", {})
    enabled = ds_config.get("bf16", {}).get("enabled", False)
    requested = {"auto": None, "bf16": True, "fp32": False}[run.precision]
    if enabled != "auto":
        if requested is not None and requested != enabled:
            there = "the ds_config, which has no bf16.enabled"
            if given:
                there = f"bf16.enabled={str(enabled).lower()} in the ds_config"
            raise UserError(
                f'precision: {run.precision} contradicts {there}; write "bf16": {{"enabled": "auto"}} there'
            )
        return enabled, "set in the ds_config" if given else "the ds_config has no bf16.enabled"
    return None if requested is None else (requested, f"precision: {run.precision}")


@functools.lru_cache(maxsize=64)
def auto_bucket(model: ModelConfig, tensor_parallel: int = 1) -> int:
    """Elements of a bucket whose size is "auto": about SMALLEST_BUCKET of a rank's parameters, cut by blocks.

    A block with more is cut into as many equal parts of at least SMALLEST_BUCKET as it has, but no part is
    smaller than the block's largest parameter. Of smaller blocks as many are joined as it takes. The final
    norm is added, since its gradient comes first. So gradients are reduced while those of the blocks below
    are computed, and little more than the embedding is left after the backward pass. The number is even, as
    DeepSpeed requires, and not above LARGEST_BUCKET.
    """
    from model.parameters import parameter_specs  # imports torch

    blocks = [0] * model.num_layers
    largest = final_norm = 0
    for spec in parameter_specs(model).values():
        elements = math.prod(spec.shape) // (1 if spec.shard_dimension is None else tensor_parallel)
        if spec.role.layer is not None:
            blocks[spec.role.layer] += elements
            largest = max(largest, elements)
        elif spec.role.part == "norm":
            final_norm += elements
    block = max(blocks)
    if block < SMALLEST_BUCKET:
        elements = block * math.ceil(SMALLEST_BUCKET / block)
    else:
        elements = max(largest, math.ceil(block / (block // SMALLEST_BUCKET)))
    elements += final_norm
    return min(elements + elements % 2, LARGEST_BUCKET)


def _fill_buckets(zero: Mapping[str, Any], model: ModelConfig, tensor_parallel: int) -> dict[str, Any]:
    """zero_optimization with auto_bucket in place of the buckets' "auto"; numbers stay."""
    automatic = [key for key in BUCKETS if zero.get(key) == "auto"]
    if not automatic:
        return dict(zero)
    return {**zero, **dict.fromkeys(automatic, auto_bucket(model, tensor_parallel))}


def check_against_run(ds_config: dict[str, Any], run: RunConfig) -> None:
    """Reject what a run and a ds_config contradict each other in, as far as no rank is needed to tell.

    ZeRO stage 3 cannot compile or fuse all: its hooks split a compiled block into dozens of frames, and it
    gathers weights layer by layer.
    """
    bf16_by(run, ds_config)
    _check_owned(ds_config, _list_optimizer_keys(run))
    if ds_config["zero_optimization"]["stage"] != 3:
        return
    if run.compile is True:
        raise UserError("compile: true is not valid at ZeRO stage 3; use stage 1 or 2, or leave it out")
    if run.fused == "all":
        raise UserError("fused: all is not valid at ZeRO stage 3; give --fused loss or none")


def _list_optimizer_keys(run: RunConfig) -> dict[str, tuple[float, str]]:
    owned: dict[str, tuple[float, str]] = {
        "gradient_clipping": (run.optimizer.gradient_clipping, "optimizer.gradient_clipping")
    }
    if run.optimizer.kind == "muon":  # true would ask for DeepSpeed's own optimizer where it is offloaded
        owned["zero_force_ds_cpu_optimizer"] = (False, "optimizer.kind muon")
    return owned


def _check_owned(ds_config: Mapping[str, Any], owned: Mapping[str, tuple[float, str]]) -> None:
    """Reject keys that are neither "auto" nor the run's value; *owned*: that value, and whose it is."""
    for key, (value, owner) in owned.items():
        if (found := ds_config.get(key, "auto")) not in ("auto", value):
            raise UserError(
                f'ds_config: {key} is {found}, but the run\'s {owner} makes it {value}; write "auto"'
            )


def merge_ds_config(
    ds_config: dict[str, Any], run: RunConfig, plan: BatchPlan, bf16: bool, model: ModelConfig
) -> dict[str, Any]:
    """Fill every "auto" from the RunConfig and the model's shapes.

    Returns:
        A complete DeepSpeed configuration, as saved in the run folder.

    Raises:
        UserError: a value in the ds_config differs from the RunConfig's.
    """
    owned = {
        # DeepSpeed multiplies micro-batches by the ranks that gradients are averaged over.
        "train_batch_size": (plan.sequences * run.context_parallel, "global_batch_tokens"),
        "train_micro_batch_size_per_gpu": (plan.micro_batch, "micro_batch"),
        "gradient_accumulation_steps": (plan.accumulation, "global_batch_tokens and micro_batch"),
        **_list_optimizer_keys(run),
    }
    _check_owned(ds_config, owned)
    merged = json.loads(json.dumps(ds_config))
    merged |= {key: value for key, (value, _) in owned.items()}
    merged["zero_optimization"] = _fill_buckets(merged["zero_optimization"], model, run.tensor_parallel)
    merged["bf16"] = {**merged.get("bf16", {}), "enabled": bf16}
    merged.setdefault("steps_per_print", None)
    # DeepSpeed's own meter waits for the device twice a micro-batch; ours reads the clock when metrics are
    # read anyway.
    merged.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    return merged


@dataclass(frozen=True)
class EngineSettings:
    """The settings that memory and communication depend on, besides the model, the batch and the number of
    ranks.

    Defaults are DeepSpeed 0.19.8's (deepspeed/runtime/zero/config.py), which a ds_config without the key
    gets.
    """

    stage: int = 2
    bf16: bool = True
    offload_optimizer: bool = False
    """Master weights, moments and the optimizer's gradients live in the host's memory."""
    offload_parameters: bool = False
    """At stage 3, the parameter partitions live in the host's memory."""
    accumulation_bytes: int = FP32_BYTES
    """Size of an accumulated gradient element."""
    communication_bytes: int = FP32_BYTES
    """Size of a gradient element while it is reduced."""
    reduce_bucket: int = 500_000_000
    """Elements of one reduction buffer."""
    overlap: bool = False
    """Whether a second reduction buffer is filled while the first is reduced."""
    all_reduce_buckets: bool = True
    """Stages 1 and 2: whether a bucket is all-reduced; else each part is reduced to the rank that owns it."""
    prefetch_bucket: int = 50_000_000
    """Stage 3: elements gathered ahead of use."""
    reuse_distance: int = 1_000_000_000
    """Stage 3: a gathered parameter stays if it is used again within so many elements."""
    persistence_threshold: int = 100_000
    """Stage 3: parameters of at most so many elements are never partitioned."""
    fused: Fused = "loss"
    """Which products are fused, decided."""
    checkpointing: bool = False
    """The run's activation_checkpointing."""
    sequence_parallel: bool = False
    """The run's sequence_parallel; without effect at t = 1."""
    context_parallel: int = 1
    """The run's context_parallel."""
    document_mask: bool = False
    """The run's document_mask."""
    grows: bool = False
    """Whether head counts change while training."""
    muon: bool = False
    """Whether Muon steps the matrices of the blocks."""

    @classmethod
    def from_run(
        cls,
        run: RunConfig,
        ds_config: Mapping[str, Any],
        bf16: bool,
        model: ModelConfig,
        fused: Fused = "loss",
    ) -> EngineSettings:
        """Build the settings of a run and a ds_config that ds_config_check.read_ds_config accepted, merged or
        not."""
        zero = _fill_buckets(ds_config["zero_optimization"], model, run.tensor_parallel)
        stage = zero["stage"]
        compute = 2 if bf16 else FP32_BYTES
        accumulation = ds_config.get("data_types", {}).get("grad_accum_dtype", "")
        communication = ds_config.get("communication_data_type", "")
        sizes = {name: int(zero[key]) for name, key in _SIZES.items() if key in zero}
        overlap = zero.get("overlap_comm")
        return cls(
            stage=stage,
            bf16=bf16,
            offload_optimizer=is_offloaded(zero, "offload_optimizer"),
            offload_parameters=stage == 3 and is_offloaded(zero, "offload_param"),
            accumulation_bytes=_DTYPE_BYTES.get(accumulation, compute),
            communication_bytes=_DTYPE_BYTES.get(communication, compute),
            overlap=stage == 3 if overlap is None else bool(overlap),
            all_reduce_buckets=bool(zero.get("use_multi_rank_bucket_allreduce", True)),
            fused=fused,
            checkpointing=run.activation_checkpointing,
            sequence_parallel=run.sequence_parallel,
            context_parallel=run.context_parallel,
            document_mask=run.document_mask,
            grows=run.growth.active,
            muon=run.optimizer.kind == "muon",
            **sizes,
        )

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of weights and activations, s in the formulas."""
        return 2 if self.bf16 else FP32_BYTES

    @property
    def whole_gradients(self) -> bool:
        """Whether DeepSpeed's BF16_Optimizer runs, which keeps fp32 gradients of all parameters on every
        rank.

        It is chosen at stage 1 with bf16 weights, fp32 accumulation and no offload
        (deepspeed/runtime/engine.py, _do_optimizer_sanity_check).
        """
        fp32_accumulation = self.accumulation_bytes == FP32_BYTES
        return self.stage == 1 and self.bf16 and fp32_accumulation and not self.offload_optimizer

    @property
    def separate_accumulation(self) -> bool:
        """Whether gradients are accumulated in another precision than the one they are computed in."""
        return self.accumulation_bytes != self.compute_bytes


def is_offloaded(zero: Mapping[str, Any], section: str) -> bool:
    """Whether a section of zero_optimization, such as offload_optimizer, names a device."""
    block = zero.get(section) or {}
    return str(block.get("device", "none")) != "none"
