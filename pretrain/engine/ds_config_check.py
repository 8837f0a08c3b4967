"""Reads a ds_config: the keys that are supported, and what to write in place of others.

DeepSpeed ignores unknown keys at the top level and reads "false" as true there. Here keys and types are
checked, without DeepSpeed or torch. DeepSpeed checks ranges inside its blocks when it builds the engine; see
pretrain.engine.build.explain_refusals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from model.errors import UserError, quote, suggest
from pretrain.utils.parsing import quote_json, read_json_object

OWNED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
"""Keys whose value the run decides; "auto" stays in them until merge_ds_config fills in the run's value."""
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
"""Keys of zero_optimization in which "auto" stays until it is filled in from the model's shapes."""
AUTOMATIC = {*OWNED, "bf16.enabled", *(f"zero_optimization.{key}" for key in BUCKETS)}
HINT = "; by their names alone: zero1, zero2, zero3, zero2_offload and zero3_offload"


Kind = tuple[Callable[[Any], bool], str]
"""Whether a key may hold a value, and the end of the message about one that it may not hold."""


def _only(*values: Any, valid: str) -> Kind:
    """One of *values*; true is not 1."""
    return lambda value: any(type(value) is type(v) and value == v for v in values), valid


def _is_number(value: Any, least: int) -> bool:
    return type(value) in (int, float) and value >= least


def _is_whole(value: Any, least: int) -> bool:
    """5e8, as DeepSpeed's documentation writes sizes, is a whole number."""
    return _is_number(value, least) and (type(value) is int or value.is_integer())


_SWITCH: Kind = (lambda value: isinstance(value, bool), "give true or false")
_COUNT: Kind = (lambda value: _is_whole(value, 1), "give a whole number from 1")
_SIZE: Kind = (lambda value: _is_whole(value, 0), "give a whole number from 0")
_NUMBER: Kind = (lambda value: _is_number(value, 0), "give a number from 0")
_TEXT: Kind = (lambda value: isinstance(value, str), "give a text")
_LIST: Kind = (lambda value: isinstance(value, list), "give a list")
_MAPPING: Kind = (lambda value: isinstance(value, dict), "give a mapping")
_DTYPE = _only("fp32", "bf16", valid="give fp32 or bf16")
_DEVICE = _only("none", "cpu", valid='write "device": "cpu" (ds_configs/zero3_offload.json), or "none"')
_STAGES = "valid stages are 1, 2 and 3 (stage 0 with bf16 computes wrong norms; stage 1 replaces it)"
_AVERAGED = "gradients are averaged after their reduction; leave it out"
_LEVELS = ("debug", "info", "warning", "error", "critical")
_MONITOR = {"enabled": _SWITCH, "output_path": _TEXT, "job_name": _TEXT}
_OFFLOAD = {"device": _DEVICE, "nvme_path": _TEXT, "buffer_count": _SIZE, "pin_memory": _SWITCH}
_ZERO_SWITCHES = """
    contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
    stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters
    round_robin_gradients parameter_alignment memory_efficient_linear override_module_apply
    log_trace_cache_warnings enable_sanity_checks
"""
_ZERO_SIZES = """
    stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
    stage3_max_live_parameters stage3_max_reuse_distance
"""
SUPPORTED: dict[str, Any] = {
    **dict.fromkeys(OWNED[:3], _COUNT),
    "gradient_clipping": _NUMBER,
    "zero_optimization": {
        "stage": _only(1, 2, 3, valid=_STAGES),
        **dict.fromkeys(_ZERO_SWITCHES.split(), _SWITCH),
        **dict.fromkeys(["reduce_bucket_size", "allgather_bucket_size", "sub_group_size"], _COUNT),
        **dict.fromkeys(_ZERO_SIZES.split(), _SIZE),
        "compute_grad_norm": _only(True, valid="every step's gradient norm is logged; write true"),
        "load_from_fp32_weights": _only(True, valid="runs continue exactly from fp32 weights; write true"),
        # Above 0 the backward pass fails with two or more ranks.
        "stage3_module_granularity_threshold": _only(0, valid="modules are gathered one by one; write 0"),
        "zero_hpz_partition_size": _only(0, 1, valid="all data-parallel ranks share parameters; write 1"),
        "offload_param": {**_OFFLOAD, "buffer_size": _SIZE, "max_in_cpu": _SIZE},
        "offload_optimizer": {
            **_OFFLOAD,
            **dict.fromkeys(["pipeline_read", "pipeline_write", "fast_init"], _SWITCH),
            "ratio": _only(1, 1.0, valid="the whole optimizer is offloaded; write 1.0"),
            "cpuadam_cores_perc": _NUMBER,
        },
    },
    "bf16": {
        "enabled": _only(True, False, "auto", valid='write true, false or "auto"'),
        "immediate_grad_update": _SWITCH,
        "check_grad_overflow": _only(True, valid="an update that is not finite is skipped; write true"),
    },
    "data_types": {"grad_accum_dtype": _DTYPE},
    "gradient_predivide_factor": _only(1, 1.0, valid=_AVERAGED),
    "communication_data_type": _DTYPE,
    **dict.fromkeys(["zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"], _SWITCH),
    **dict.fromkeys(["wall_clock_breakdown", "memory_breakdown", "disable_python_gc"], _SWITCH),
    "steps_per_print": _COUNT,
    "log_level": _only(*_LEVELS, valid=f"give one of {', '.join(_LEVELS)}"),
    "timers": {"throughput": {"enabled": _SWITCH, "synchronized": _SWITCH}},
    "flops_profiler": {
        **dict.fromkeys(["enabled", "detailed"], _SWITCH),
        **dict.fromkeys(["profile_step", "top_modules"], _COUNT),
        # A level of modules that the network does not have ends DeepSpeed's table in a KeyError.
        "module_depth": _only(*range(-1, 6), valid="give a whole number from -1 to 5"),
        "recompute_fwd_factor": _NUMBER,
        "output_file": _TEXT,
    },
    "comms_logger": dict.fromkeys(["enabled", "prof_all", "verbose", "debug"], _SWITCH) | {"prof_ops": _LIST},
    "csv_monitor": _MONITOR,
    "tensorboard": _MONITOR,
    "checkpoint": {"tag_validation": _TEXT},
    "aio": _MAPPING,  # for NVMe: nothing reads it
}
"""Blocks and keys, as they stand in a ds_config."""

_NO_FP16 = 'it is not supported; use bf16 or fp32: write "bf16": {"enabled": "auto"}'
_NAMES = """
    compression_training curriculum_learning data_efficiency dataloader_drop_last disable_allgather
    eigenvalue elasticity pipeline progressive_layer_drop quantize_training sparse_attention sparse_gradients
    zero_optimization.elastic_checkpoint zero_optimization.leaf_module zero_optimization.legacy_stage1
    zero_optimization.mics_hierarchical_params_gather zero_optimization.mics_shard_size
    zero_optimization.pipeline_loading_checkpoint zero_optimization.save_muon_momentum_buffer_in_memory
    zero_optimization.zenflow zero_optimization.zero_quantized_gradients
    zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zero_quantized_weights
    zero_optimization.zeropp_loco_param bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
"""
NOT_SUPPORTED = {
    **dict.fromkeys(_NAMES.split(), "it is not supported; leave it out"),
    "optimizer": "the run's settings say it; use --optimizer.*",
    "scheduler": "the run's settings say it; use --schedule.*",
    "fp16": _NO_FP16,
    "amp": _NO_FP16,
    "bfloat16": 'write "bf16"',
    "torch_autocast": "use --precision bf16",
    "activation_checkpointing": "blocks are recomputed by --activation_checkpointing true",
    "wandb": "use --logging.wandb online and --logging.wandb_project",
    "comet": "every step's metrics are in the run folder's metrics.jsonl; wandb is --logging.wandb online",
    "autotuning": "head-schedules plan computes what fits and how long it takes",
    "compile": "use --compile true",
    "tensor_parallel": "use --tensor_parallel",
    "sequence_parallel_size": "use --context_parallel, which takes any head count",
    "hybrid_engine": "it generates while training; use head-schedules generate",
    "dump_state": "the merged configuration is the run folder's ds_config.json",
    "prescale_gradients": _AVERAGED,
    "zero_optimization.cpu_offload": 'write "offload_optimizer": {"device": "cpu"}',
}
"""Keys and blocks that are accepted while they are off, and then left out: what to write instead."""


def read_ds_config(path: str) -> dict[str, Any]:
    """Read a ds_config and reject what this stack does not support.

    Returns:
        The ds_config without keys that are off or "auto", except those that merge_ds_config fills in.

    Raises:
        UserError: the file cannot be read (read_json_object), or it has mistakes, which one message lists.
    """
    config = read_json_object(Path(path), "ds_config", HINT)
    if mistakes := check_ds_config(config):
        raise UserError(f"ds_config: {quote(path, plain=True)}: {'; '.join(mistakes)}")
    return simplify(config)


def check_ds_config(config: Mapping[str, Any]) -> list[str]:
    """List what is unknown, not valid or not supported in a ds_config."""
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) or zero in (None, "auto"):
        zero = {"stage": None, **(zero if isinstance(zero, dict) else {})}  # DeepSpeed would take stage 0
    mistakes = list(_mistakes({**config, "zero_optimization": zero}))
    offloaded = isinstance(zero, dict) and isinstance(zero.get("offload_param"), dict)
    if offloaded and zero["offload_param"].get("device") in ("cpu", "nvme") and zero["stage"] in (1, 2):
        mistakes.append(
            f"zero_optimization.offload_param is for stage 3, and the stage is {zero['stage']}; leave it "
            "out, or use ds_configs/zero3_offload.json"
        )
    return mistakes


def supported_keys(supported: Mapping[str, Any] = SUPPORTED, prefix: str = "") -> Iterator[str]:
    """The paths of all keys and blocks that are supported, such as zero_optimization.stage."""
    for name, kind in supported.items():
        yield f"{prefix}{name}"
        if isinstance(kind, dict):
            yield from supported_keys(kind, f"{prefix}{name}.")


def _mistakes(
    block: Mapping[str, Any], supported: Mapping[str, Any] = SUPPORTED, prefix: str = ""
) -> Iterator[str]:
    for name, value in block.items():
        path, kind = f"{prefix}{name}", supported.get(name)
        if path in NOT_SUPPORTED:
            # For bfloat16, DeepSpeed's old name, "auto" would be on.
            if not _is_off(value) or (path == "bfloat16" and '"auto"' in quote_json(value)):
                yield f"{path} is {quote_json(value)}; {NOT_SUPPORTED[path]}"
        elif kind is None:
            if value is not None:  # as DeepSpeed's own defaults have old names
                yield f"{quote(path, plain=True)} is unknown or not supported{_nearest(path)}"
        elif value in (None, "auto") and path not in ("zero_optimization.stage", "bf16.enabled"):
            continue
        elif isinstance(kind, dict) and isinstance(value, dict):
            yield from _mistakes(value, kind, f"{path}.")
        else:
            accepts, valid = _MAPPING if isinstance(kind, dict) else kind
            if not accepts(value):
                yield f"{path} is {quote_json(value)}; {valid}"


def _nearest(path: str) -> str:
    """A hint at the key of the same name in another block, or at the nearest path."""
    paths, name = list(supported_keys()), path.rpartition(".")[2]
    elsewhere = [known for known in paths if known.rpartition(".")[2] == name]
    hint = f"; did you mean {elsewhere[0]!r}?" if len(elsewhere) == 1 else suggest(path, paths)
    return hint or "; leave it out"


def _is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return _is_off(value["enabled"]) if "enabled" in value else all(map(_is_off, value.values()))
    return value == "auto" or not value


def simplify(block: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Drop what is off, null or "auto" from a checked ds_config, except what merge_ds_config fills in."""
    result = {}
    for key, value in block.items():
        path = f"{prefix}{key}"
        if path == "bf16" and value == "auto":
            value = {"enabled": "auto"}
        is_default = value is None or (value == "auto" and path not in AUTOMATIC)
        if path not in NOT_SUPPORTED and not is_default:
            result[key] = simplify(value, f"{path}.") if isinstance(value, dict) else value
    return result
