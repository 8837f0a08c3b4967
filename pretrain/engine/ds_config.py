"""A ds_config: read, checked, completed from the RunConfig, and what of it memory depends on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.engine.batch import BatchPlan
from pretrain.runtime.hardware import supports_bf16

if TYPE_CHECKING:
    from pretrain.config.run_config import RunConfig

FP32_BYTES = 4
_DTYPE_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
# Field of EngineSettings -> the names it may have in a ds_config's zero_optimization.
_SIZES = {
    "reduce_bucket": ("reduce_bucket_size",),
    "prefetch_bucket": ("stage3_prefetch_bucket_size", "prefetch_bucket_size"),
    "reuse_distance": ("stage3_max_reuse_distance", "max_reuse_distance"),
    "persistence_threshold": ("stage3_param_persistence_threshold", "param_persistence_threshold"),
}


def read_ds_config(path: str) -> dict[str, Any]:
    """Read a ds_config and refuse what this stack cannot honour.

    Raises:
        UserError: missing file, no JSON, a block the RunConfig owns, stage 0, fp16.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(
            f"ds_config: cannot read {path!r} ({reason}); ds_configs/ holds zero1, zero2, zero3, "
            "zero2_offload and zero3_offload"
        ) from None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"ds_config: {path} is not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise UserError(f"ds_config: {path} holds a {type(config).__name__}; it must be a JSON object")
    for block, owner in {"scheduler": "schedule", "optimizer": "optimizer"}.items():
        if block in config:
            raise UserError(
                f"ds_config: {path} has a {block!r} block, but the run's {owner} settings own that; "
                f"remove it and use --{owner}.* flags or the recipe"
            )
    for mode in ("fp16", "amp"):
        if _section(config, mode, path).get("enabled"):
            raise UserError(f"ds_config: {path} enables {mode}, which is not supported; use bf16 or fp32")
    zero = _section(config, "zero_optimization", path)
    if zero.get("stage") not in (1, 2, 3):
        # Stage 0 computes a wrong gradient norm in bf16 under tensor parallelism and cannot skip a bad update.
        raise UserError(
            f"ds_config: zero_optimization.stage is {zero.get('stage', 'missing')} in {path}; "
            "valid stages are 1, 2 and 3 (stage 0 with bf16 computes wrong norms; stage 1 replaces it)"
        )
    return config


def _section(config: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, dict):
        raise UserError(f"ds_config: {name} is {section!r} in {path}; it must be a JSON object")
    return section


def resolve_bf16(run: RunConfig, ds_config: dict[str, Any], device: torch.device) -> tuple[bool, str]:
    """Decide the compute dtype.

    Returns:
        Whether to train in bf16, and the reason in one phrase.

    Raises:
        UserError: ``precision`` and the ds_config contradict.
    """
    enabled = ds_config.get("bf16", {}).get("enabled", False)
    if enabled not in (True, False, "auto"):
        raise UserError(f'ds_config: bf16.enabled is {enabled!r}; valid are true, false and "auto"')
    wanted = {"auto": None, "bf16": True, "fp32": False}[run.precision]
    if enabled != "auto":
        if wanted is not None and wanted != enabled:
            raise UserError(
                f"precision: {run.precision} contradicts bf16.enabled={str(enabled).lower()} in the "
                'ds_config; write "auto" there'
            )
        return enabled, "set in the ds_config"
    if wanted is not None:
        return wanted, f"precision: {run.precision}"
    return supports_bf16(device)


def merge_ds_config(ds_config: dict[str, Any], run: RunConfig, plan: BatchPlan, bf16: bool) -> dict[str, Any]:
    """Fill every "auto" from the RunConfig.

    Returns:
        A complete DeepSpeed configuration, as saved in the run folder.

    Raises:
        UserError: a value in the ds_config differs from the RunConfig's, or DeepSpeed does not accept a ZeRO setting.
    """
    owned = {
        "train_batch_size": (plan.sequences, "global_batch_tokens"),
        "train_micro_batch_size_per_gpu": (plan.micro_batch, "micro_batch"),
        "gradient_accumulation_steps": (plan.accumulation, "global_batch_tokens and micro_batch"),
        "gradient_clipping": (run.optimizer.gradient_clipping, "optimizer.gradient_clipping"),
    }
    merged = json.loads(json.dumps(ds_config))
    for key, (value, owner) in owned.items():
        if merged.get(key, "auto") not in ("auto", value):
            raise UserError(
                f'ds_config: {key} is {merged[key]!r}, but the run\'s {owner} makes it {value}; write "auto"'
            )
        merged[key] = value
    merged["bf16"] = {**merged.get("bf16", {}), "enabled": bf16}
    merged.setdefault("steps_per_print", None)
    # Offloading to the host needs DeepSpeed's own CPU optimizer, which build_optimizer gives it.
    _check_zero_section(merged["zero_optimization"])
    if run.compile and merged["zero_optimization"]["stage"] == 3:
        # Its parameter hooks break a block into dozens of frames, and nothing is gained.
        raise UserError("compile: true is not valid at ZeRO stage 3; use stage 1 or 2, or leave it out")
    return merged


def _check_zero_section(section: dict[str, Any]) -> None:
    import pydantic
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**section)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"ds_config: zero_optimization.{field} is {first['input']!r}: {first['msg']}"
        ) from None


@dataclass(frozen=True)
class EngineSettings:
    """What memory and communication depend on beside the model, the batch and the number of ranks.

    Defaults are DeepSpeed 0.19.8's (deepspeed/runtime/zero/config.py), which a ds_config without the key gets.
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
    checkpointing: bool = False
    """The run's activation_checkpointing."""
    sequence_parallel: bool = False
    """The run's sequence_parallel; without effect at t = 1."""
    document_mask: bool = False
    """The run's document_mask."""

    @classmethod
    def of(cls, run: RunConfig, ds_config: Mapping[str, Any], bf16: bool) -> EngineSettings:
        """Settings of a run and a ds_config that read_ds_config accepted."""
        zero = ds_config["zero_optimization"]
        stage = zero["stage"]
        compute = 2 if bf16 else FP32_BYTES
        accumulation = ds_config.get("data_types", {}).get("grad_accum_dtype")
        sizes = {
            name: int(zero[key])
            for name, keys in _SIZES.items()
            for key in keys
            if isinstance(zero.get(key), int | float)
        }
        overlap = zero.get("overlap_comm")
        return cls(
            stage=stage,
            bf16=bf16,
            offload_optimizer=_offloads(zero, "offload_optimizer"),
            offload_parameters=stage == 3 and _offloads(zero, "offload_param"),
            accumulation_bytes=_DTYPE_BYTES.get(str(accumulation), compute),
            communication_bytes=_DTYPE_BYTES.get(str(ds_config.get("communication_data_type")), compute),
            overlap=stage == 3 if overlap is None else bool(overlap),
            all_reduce_buckets=bool(zero.get("use_multi_rank_bucket_allreduce", True)),
            checkpointing=run.activation_checkpointing,
            sequence_parallel=run.sequence_parallel,
            document_mask=run.document_mask,
            **sizes,
        )

    @property
    def compute_bytes(self) -> int:
        """s: bytes of an element of weights and activations."""
        return 2 if self.bf16 else FP32_BYTES

    @property
    def whole_gradients(self) -> bool:
        """Whether DeepSpeed's BF16_Optimizer runs, which keeps fp32 gradients of all parameters on every rank.

        It is chosen at stage 1 with bf16 weights, fp32 accumulation and no offload (deepspeed/runtime/engine.py,
        _do_optimizer_sanity_check).
        """
        fp32_accumulation = self.accumulation_bytes == FP32_BYTES
        return self.stage == 1 and self.bf16 and fp32_accumulation and not self.offload_optimizer

    @property
    def separate_accumulation(self) -> bool:
        """Whether gradients are accumulated in another precision than the one they are computed in."""
        return self.accumulation_bytes != self.compute_bytes


def _offloads(zero: Mapping[str, Any], section: str) -> bool:
    found = zero.get(section) or {}
    return str(found.get("device", "none")) != "none"
