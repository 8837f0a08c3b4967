"""Declares what a ds_config may hold where DeepSpeed 0.19.8 has no class for it, or this stack is stricter.

DeepSpeed reads the top level and a few blocks by hand: their names and types are here, and a test compares
the names with its source. Names and types inside its other blocks are those of its own classes (see
deepspeed_sections); here are only the settings of those that the run refuses, each with what to write
instead.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

from pretrain.utils.parsing import shown_json

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

    aio.use_gds checkpoint.use_node_local_storage checkpoint.writer
    zero_optimization.leaf_module zero_optimization.legacy_stage1
    zero_optimization.mics_hierarchical_params_gather zero_optimization.mics_shard_size
    zero_optimization.offload_optimizer.super_offload zero_optimization.pipeline_loading_checkpoint
    zero_optimization.save_muon_momentum_buffer_in_memory zero_optimization.zenflow
    zero_optimization.zero_quantized_gradients zero_optimization.zero_quantized_nontrainable_weights
    zero_optimization.zero_quantized_weights zero_optimization.zeropp_loco_param
"""

REFUSED = {
    **dict.fromkeys(_NOT_SUPPORTED.split(), "it is not supported; leave it out"),
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

_SWITCHES = ("enabled", "deepcompile", "autotp_size")
"""Names that alone say whether a block is on."""
_FLAGS = {
    "optimizer": {
        "lr": "--optimizer.learning_rate",
        "betas": "--optimizer.betas",
        "eps": "--optimizer.eps",
        "weight_decay": "--optimizer.weight_decay",
    },
    "scheduler": {
        "warmup_max_lr": "--optimizer.learning_rate",
        "warmup_num_steps": "--schedule.warmup",
        "total_num_steps": "--steps",
    },
}
"""The run's flags for parameters of DeepSpeed's optimizers and schedules."""


def _refusal(instead: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{instead}", {"instead": instead})


def only(*values: Any, instead: str) -> Any:
    """The type of a setting that must be one of *values*; true is not 1."""

    def check(value: Any) -> Any:
        if not any(type(value) is type(valid) and value == valid for valid in values):
            raise _refusal(instead)
        return value

    return Annotated[Any, AfterValidator(check)]


def _off(instead: str) -> Any:
    """The type of a setting or block that must be off."""

    def is_on(value: Any) -> bool:
        if isinstance(value, dict):
            switches = [name for name in _SWITCHES if name in value]
            if switches == ["autotp_size"] and value["autotp_size"] == 1:
                return False
            return any(is_on(value[name]) for name in switches or value)
        return value != "auto" and bool(value)

    def check(value: Any) -> Any:
        if is_on(value):
            raise _refusal(instead)
        return value

    return Annotated[Any, AfterValidator(check)]


def _owned(name: str, settings: str) -> Any:
    """The type of a block that must not be there; the message has the flags to write instead."""

    def check(value: Any) -> Any:
        params = value.get("params") if isinstance(value, dict) else None
        values = params if isinstance(params, dict) else {}
        flags = [
            f"{flag} {shown_json(values[key]).replace(' ', '')}"
            for key, flag in _FLAGS[name].items()
            if _is_written_as_it_is(values.get(key))
        ]
        write = " ".join(flags) or f"{settings} flags or the recipe"
        raise _refusal(f"the run's {settings} settings own that; leave it out and write {write}")

    return Annotated[Any, AfterValidator(check)]


def _is_written_as_it_is(value: Any) -> bool:
    """Whether a value can be copied into a command: a number or a list of two."""
    if isinstance(value, list):
        return len(value) == 2 and all(type(item) in (int, float) for item in value)
    return type(value) in (int, float)


def _whole(value: Any) -> Any:
    """5e8, as DeepSpeed's documentation writes sizes, is a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
_BATCH = Annotated[Whole, Field(ge=1, le=2**31)]
_POSITIVE = Annotated[Whole, Field(ge=1)]
_FROM_ZERO = Annotated[float, Field(ge=0)]
_BUFFER = Annotated[Whole, Field(ge=1, le=LARGEST_BUFFER)]
_DTYPE = Literal["fp32", "bf16"]


def block(names: Mapping[str, Any], prefix: str = "", extra: Literal["allow", "forbid"] = "forbid") -> Any:
    """The class of a block with these names and types, and with those that REFUSED has under *prefix*."""
    refused = {
        path.removeprefix(prefix): _off(instead)
        for path, instead in REFUSED.items()
        if path.startswith(prefix) and "." not in path.removeprefix(prefix)
    }
    fields = {name: kind if isinstance(kind, tuple) else (kind, None) for name, kind in names.items()}
    fields |= {name: (kind, None) for name, kind in refused.items()}
    config = ConfigDict(strict=True, extra=extra, allow_inf_nan=False)
    made: Any = create_model  # whose overloads do not know a mapping of fields
    return made(prefix.rstrip(".") or "ds_config", __config__=config, **fields)


def _partly(name: str, names: Mapping[str, Any]) -> Any:
    """The class of a block of which DeepSpeed's own class says the rest."""
    return block(names, f"{name}.", "allow")


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
    "offload_param": _partly("zero_optimization.offload_param", {"device": _DEVICE}),
    "offload_optimizer": _partly(
        "zero_optimization.offload_optimizer",
        {
            "device": _DEVICE,
            "ratio": only(1, 1.0, instead="the whole optimizer is offloaded; write 1.0"),
        },
    ),
}
_BF16 = {
    "enabled": bool,
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
    "module_depth": Annotated[Whole, Field(ge=-1, le=1000)],
    "top_modules": Annotated[Whole, Field(ge=1, le=10000)],
    "detailed": bool,
    "output_file": str,
}
_CHECKPOINT = {
    "tag_validation": Literal["Warn", "Ignore", "Fail", "WARN", "IGNORE", "FAIL", "warn", "ignore", "fail"],
    "checkpoint_serialization": only(True, instead=_CHECKPOINTS),
    "parallel_write": block({"pipeline_stage": only(False, instead=_CHECKPOINTS)}, "parallel_write."),
}

DS_CONFIG: type[BaseModel] = block(
    {
        "train_batch_size": _BATCH,
        "train_micro_batch_size_per_gpu": _BATCH,
        "gradient_accumulation_steps": _BATCH,
        "gradient_clipping": _FROM_ZERO,
        "optimizer": _owned("optimizer", "--optimizer.*"),
        "scheduler": _owned("scheduler", "--schedule.*"),
        "zero_optimization": (_partly("zero_optimization", _ZERO), ...),
        "bf16": _partly("bf16", _BF16),
        "data_types": block(_DATA_TYPES, "data_types."),
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
        "timers": block({"throughput": _partly("timers.throughput", {})}, "timers."),
        "flops_profiler": block(_FLOPS_PROFILER, "flops_profiler."),
        "comms_logger": _partly("comms_logger", {}),
        "csv_monitor": _partly("csv_monitor", {}),
        "tensorboard": _partly("tensorboard", {}),
        "aio": _partly("aio", {}),  # for NVMe: nothing reads it
        "checkpoint": block(_CHECKPOINT, "checkpoint."),
    }
)


@functools.cache
def deepspeed_sections() -> type[BaseModel]:
    """The class of the blocks that DeepSpeed has classes for. Imports DeepSpeed.

    Its names, types and ranges are those of DeepSpeed's, but values are not converted ("false" is no switch),
    and renamed settings are not warned about.
    """
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    sections = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "csv_monitor": CSVConfig,
        "tensorboard": TensorBoardConfig,
    }
    fields = {name: (_strict(section), None) for name, section in sections.items()}
    timers = create_model("timers", throughput=(_strict(DeepSpeedThroughputTimerConfig), None))
    return create_model("sections", timers=(timers, None), **fields)  # type: ignore[call-overload]


def _strict(section: type[BaseModel]) -> Any:
    """A class like DeepSpeed's, without its conversions."""
    fields = {}
    for name, field in section.model_fields.items():
        inner = model_in(field.annotation)
        kind: Any = _strict(inner) if inner else Whole if field.annotation is int else field.annotation
        for constraint in field.metadata:
            kind = Annotated[kind, constraint]
        fields[name] = (kind, Field(None, alias=field.alias))
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    return create_model(section.__name__, __config__=config, **fields)  # type: ignore[call-overload]


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
