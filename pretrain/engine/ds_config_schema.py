"""Declares what a ds_config may hold: what DeepSpeed 0.19.8 knows, less what the run owns or cannot do.

DeepSpeed reads the top level and a few blocks by hand: their names and types are here, and a test compares
the names with its source. Names and types inside its other blocks are those of its own classes; here are only
the settings of those that the run refuses, each with what to write instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

LARGEST_BUFFER = 10**10
"""Elements of a buffer that is allocated: 40 GB in fp32."""
_MASTER = "master weights and their gradients stay in fp32; leave it out"
_CHECKPOINTS = "checkpoints are the run's; use --checkpoint.*"
_NO_FP16 = 'it is not supported; use bf16 or fp32: write "bf16": {"enabled": "auto"}'
_AVERAGED = "gradients are averaged after their reduction; leave it out"
_NOT_SUPPORTED = """
    data_efficiency dataloader_drop_last datastates_ckpt disable_allgather expert_parallel pipeline
    use_data_before_expert_parallelism vocabulary_size weight_quantization

    compression_training curriculum_learning eigenvalue elasticity graph_harvesting nebula
    progressive_layer_drop quantize_training sparse_attention sparse_gradients

    checkpoint.use_node_local_storage checkpoint.writer
    zero_optimization.leaf_module zero_optimization.legacy_stage1
    zero_optimization.mics_hierarchical_params_gather zero_optimization.mics_shard_size
    zero_optimization.offload_optimizer.super_offload zero_optimization.pipeline_loading_checkpoint
    zero_optimization.save_muon_momentum_buffer_in_memory zero_optimization.zenflow
    zero_optimization.zero_quantized_gradients zero_optimization.zero_quantized_nontrainable_weights
    zero_optimization.zero_quantized_weights zero_optimization.zeropp_loco_param
"""

REFUSED = {
    **dict.fromkeys(_NOT_SUPPORTED.split(), "it is not supported; leave it out"),
    "optimizer": "the run's settings say it; use --optimizer.*",
    "scheduler": "the run's settings say it; use --schedule.*",
    "fp16": _NO_FP16,
    "amp": _NO_FP16,
    "torch_autocast": "use --precision bf16",
    "activation_checkpointing": "blocks are recomputed by --activation_checkpointing true",
    "wandb": "use --logging.wandb online and --logging.wandb_project",
    "comet": "every step's metrics are in the run folder's metrics.jsonl; wandb is --logging.wandb online",
    "autotuning": "python -m pretrain.plan says what fits and how fast it is",
    "compile": "use --compile true",
    "tensor_parallel": "use --tensor_parallel",
    "sequence_parallel_size": "use --sequence_parallel true with --tensor_parallel",
    "hybrid_engine": "it generates while training; use python -m pretrain.generate",
    "allgather_size": 'write "allgather_bucket_size" in zero_optimization',
    "dump_state": "the merged configuration is the run folder's ds_config.json",
    "prescale_gradients": _AVERAGED,
    "checkpoint.load_universal": "a run continues on other shapes by itself; leave it out",
    "bf16.bf16_master_weights_and_grads": _MASTER,
    "bf16.bf16_optimizer_states": _MASTER,
    "zero_optimization.elastic_checkpoint": "runs continue on other ranks without it; leave it out",
    "zero_optimization.cpu_offload": 'write "offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'write "offload_param": {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": 'write "offload_optimizer": {"pin_memory": true}',
}
"""Settings and blocks that are accepted while they are off, and then left out: what to write instead."""


def _valid_if(is_valid: Callable[[Any], bool], instead: str) -> Any:
    """The type of what a function accepts; *instead* says what to write."""

    def check(value: Any) -> Any:
        if not is_valid(value):
            raise PydanticCustomError("refused", "{instead}", {"instead": instead})
        return value

    return Annotated[Any, AfterValidator(check)]


def only(*values: Any, instead: str) -> Any:
    """The type of a setting that must be one of *values*; true is not 1."""
    return _valid_if(lambda value: any(type(value) is type(v) and value == v for v in values), instead)


def _is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return _is_off(value["enabled"]) if "enabled" in value else all(map(_is_off, value.values()))
    return value == "auto" or not value


def _whole(value: Any) -> Any:
    """5e8, as DeepSpeed's documentation writes sizes, is a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
_BATCH = Annotated[Whole, Field(ge=1, le=2**31)]
_POSITIVE = Annotated[Whole, Field(ge=1)]
_FROM_ZERO = Annotated[float, Field(ge=0)]
_BUFFER = Annotated[Whole, Field(ge=1, le=LARGEST_BUFFER)]
_DTYPE = Literal["fp32", "bf16"]


def _block(ours: Mapping[str, Any], prefix: str = "", theirs: type[BaseModel] | None = None) -> Any:
    """The class of a block, strict: a number is no text, true is no number.

    Args:
        ours: types of settings by name, with dots inside its blocks; a tuple has a type and its Field.
        prefix: the block's own name and a dot; what REFUSED has under it must be off.
        theirs: DeepSpeed's class, whose names and types are valid where they are not restricted here.
    """
    fields: dict[str, Any] = {}
    for name, field in (theirs.model_fields if theirs else {}).items():
        name, inner = field.alias or name, model_in(field.annotation)
        kind: Any = Whole if field.annotation is int else field.annotation
        if inner is not None:
            start = f"{name}."
            inside = {key.removeprefix(start): ours[key] for key in ours if key.startswith(start)}
            kind = _block(inside, prefix + start, inner)
        for constraint in field.metadata:
            kind = Annotated[kind, constraint]
        fields[name] = kind
    fields |= {name: kind for name, kind in ours.items() if "." not in name}
    for path, instead in REFUSED.items():
        block, _, name = path.rpartition(".")
        if block == prefix.rstrip("."):
            fields[name] = _valid_if(_is_off, instead)
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    made: Any = create_model  # whose overloads do not know a mapping of fields
    given = {name: kind if isinstance(kind, tuple) else (kind, None) for name, kind in fields.items()}
    return made(prefix.rstrip(".") or "ds_config", __config__=config, **given)


_DEVICE = only("none", "cpu", instead='write "device": "cpu" (ds_configs/zero3_offload.json), or "none"')
_STAGES = "valid stages are 1, 2 and 3 (stage 0 with bf16 computes wrong norms; stage 1 replaces it)"
_ZERO = {
    "stage": (only(1, 2, 3, instead=_STAGES), Field(None, validate_default=True)),
    "reduce_bucket_size": _BUFFER,
    "allgather_bucket_size": Annotated[_BUFFER, Field(multiple_of=2)],
    "stage3_prefetch_bucket_size": Annotated[Whole, Field(ge=0, le=LARGEST_BUFFER)],
    "sub_group_size": _POSITIVE,
    "compute_grad_norm": only(True, instead="every step's gradient norm is logged; write true"),
    "load_from_fp32_weights": only(True, instead="runs continue exactly from fp32 weights; write true"),
    # Above 0 the backward pass fails with two or more ranks.
    "stage3_module_granularity_threshold": only(0, instead="modules are gathered one by one; write 0"),
    "zero_hpz_partition_size": only(
        0, 1, instead="parameters are partitioned over all data-parallel ranks; write 1"
    ),
    "offload_param.device": _DEVICE,
    "offload_optimizer.device": _DEVICE,
    "offload_optimizer.ratio": only(1, 1.0, instead="the whole optimizer is offloaded; write 1.0"),
}
_BF16 = {
    "enabled": (
        only(True, False, "auto", instead='write true, false or "auto"'),
        Field(None, validate_default=True),
    ),
    "check_grad_overflow": only(
        True, instead="an update that is not finite is skipped on every rank; write true"
    ),
}
_DATA_TYPES = {
    "grad_accum_dtype": _DTYPE,
    "param_dtype": only(instead="the run's precision says it; use --precision bf16 or fp32"),
    "buffer_dtype": only(instead="buffers keep their precision; leave it out"),
    "keep_in_fp32_modules": only(instead='buffers keep their precision; write "auto"'),
}
_FLOPS_PROFILER = {
    "enabled": bool,
    "recompute_fwd_factor": Annotated[_FROM_ZERO, Field(le=10)],
    "profile_step": _POSITIVE,
    # A level of modules that the network does not have ends DeepSpeed's table in a KeyError.
    "module_depth": Annotated[Whole, Field(ge=-1, le=5)],
    "top_modules": Annotated[Whole, Field(ge=1, le=10000)],
    "detailed": bool,
    "output_file": str,
}
_CHECKPOINT = {
    "tag_validation": Literal["Warn", "Ignore", "Fail", "WARN", "IGNORE", "FAIL", "warn", "ignore", "fail"],
    "checkpoint_serialization": only(True, instead=_CHECKPOINTS),
    "parallel_write": _block({"pipeline_stage": only(False, instead=_CHECKPOINTS)}, "parallel_write."),
}

_TOP_LEVEL = {
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "gradient_clipping": _FROM_ZERO,
    "data_types": _block(_DATA_TYPES, "data_types."),
    "communication_data_type": _DTYPE,
    "seq_parallel_communication_data_type": only(
        "fp32", instead="sequence parallelism is the run's; use --sequence_parallel true"
    ),
    "gradient_predivide_factor": only(1, 1.0, instead=_AVERAGED),
    "gradient_allreduce_op": only("mean", instead='write "mean"'),
    "managed_gradient_accumulation": only(
        True, instead="the run accumulates by global_batch_tokens; write true"
    ),
    "zero_allow_untested_optimizer": bool,
    "zero_force_ds_cpu_optimizer": bool,
    "steps_per_print": _POSITIVE,
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "disable_python_gc": bool,
    "log_level": Literal["debug", "info", "warning", "error", "critical"],
    "flops_profiler": _block(_FLOPS_PROFILER),
    "aio": dict[str, Any],  # for NVMe: nothing reads it
    "checkpoint": _block(_CHECKPOINT, "checkpoint."),
}


@functools.cache
def ds_config_class() -> type[BaseModel]:
    """The class of a ds_config without "auto" and null. Imports DeepSpeed.

    In DeepSpeed's own blocks values are not converted ("false" is no switch).
    """
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    throughput = _block({}, "timers.throughput.", DeepSpeedThroughputTimerConfig)
    blocks = {
        "zero_optimization": (_block(_ZERO, "zero_optimization.", DeepSpeedZeroConfig), ...),
        "bf16": _block(_BF16, "bf16.", DeepSpeedBF16Config),
        "comms_logger": _block({}, "comms_logger.", CommsLoggerConfig),
        "csv_monitor": _block({}, "csv_monitor.", CSVConfig),
        "tensorboard": _block({}, "tensorboard.", TensorBoardConfig),
        "timers": _block({"throughput": throughput}, "timers."),
    }
    made: type[BaseModel] = _block(_TOP_LEVEL | blocks)
    return made


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The pydantic class that an annotation is, or is one of the choices of."""
    choices = (annotation, *get_args(annotation))
    return next((kind for kind in choices if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def setting_paths(kind: type[BaseModel], prefix: str = "") -> list[str]:
    """The names of all settings of a class and of the blocks in it, such as zero_optimization.stage."""
    paths = []
    for name, field in kind.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        inner = model_in(field.annotation)
        paths += [path, *(setting_paths(inner, f"{path}.") if inner else ())]
    return paths
