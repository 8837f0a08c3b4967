"""ds_config + RunConfig -> a DeepSpeed engine.

A ds_config holds ZeRO, dtypes and engine knobs. What the RunConfig owns (batch sizes, clipping, optimizer, schedule)
is "auto" there, or equal to the RunConfig's value; anything else is refused before a process group exists.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from model.config import ModelConfig
from model.errors import UserError
from model.initialization import initialize
from model.process_grid import deepspeed_mpu
from model.transformer import Transformer
from pretrain.config.lr_rules import parse_rules
from pretrain.config.run_config import RunConfig
from pretrain.optim.groups import build_optimizer, parameter_groups
from pretrain.plan.micro_batch import BatchPlan
from pretrain.runtime.hardware import supports_bf16


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


def build_engine(
    run: RunConfig, model_config: ModelConfig, merged: dict[str, Any], device: torch.device
) -> Any:
    """Build the seeded model (this rank's part of it, on a grid with t > 1), its optimizer and the engine around them.

    Args:
        merged: the result of merge_ds_config.

    Returns:
        A DeepSpeedEngine; its client optimizer's groups carry names.
    """
    quiet_deepspeed()
    import deepspeed

    from pretrain.checkpoint.universal import universal_info
    from pretrain.checkpoint.unsharded import parameter_specs

    zero = merged["zero_optimization"]
    partitioned = zero["stage"] == 3
    mpu = deepspeed_mpu()
    # Stage 3 partitions over the ranks that hold the same shard; without an mpu over all ranks.
    over = {"mpu": mpu, "data_parallel_group": mpu.get_data_parallel_group()} if mpu else {}
    with deepspeed.zero.Init(config_dict_or_path=merged, **over) if partitioned else contextlib.nullcontext():
        network = Transformer(model_config, checkpoint_activations=run.activation_checkpointing)
    if partitioned:
        initialize(
            network, run.seed, gather=lambda p: deepspeed.zero.GatheredParameters([p], modifier_rank=0)
        )
    else:
        initialize(network, run.seed)
    if run.compile:
        compile_blocks(network)
    # DeepSpeed saves this with every checkpoint, for its own converter.
    network.universal_checkpoint_info = universal_info(  # type: ignore[assignment]
        parameter_specs(model_config), model_config.vocab_size
    )
    offload = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    groups = parameter_groups(network, run.optimizer, parse_rules(run.lr_rules))
    optimizer = build_optimizer(groups, run.optimizer, offload)
    engine, _, _, _ = deepspeed.initialize(
        model=network, optimizer=optimizer, config=merged, dist_init_required=False, mpu=mpu
    )
    return engine


def compile_blocks(network: Transformer) -> None:
    """Have every block compiled at its first use; parameter names stay.

    Blocks with equal shapes share a graph. Each distinct shape needs its own, for training and for evaluation, and
    torch would give up after 8 of them.
    """
    import torch._dynamo

    limit = 4 * len(network.layers) + 8
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    for block in network.layers:
        block.compile()


def quiet_deepspeed() -> None:
    """Keep DeepSpeed's informational lines out of the log; warnings and errors stay. Call it before DeepSpeed loads."""
    if not torch.cuda.is_available():
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # told, it does not warn on every rank that it had to guess
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
