"""Tables of every ds_config key that DeepSpeed 0.19.8 knows: which values are valid, and what is refused.

A key is supported (it reaches DeepSpeed), owned by the run (it may hold the run's value), or refused with what to
write instead. A refused key is accepted with a value that turns it off. pretrain/engine/ds_config_check.py reads
these tables; a test compares them with DeepSpeed's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LARGEST = 2**63 - 1
LARGEST_BUFFER = 10**10
"""Elements of a buffer that is allocated: 40 GB in fp32."""


@dataclass(frozen=True)
class Kind:
    """The values that a key accepts."""

    valid: str
    """The valid values in words, for messages."""
    accepts: Callable[[Any], bool]


@dataclass(frozen=True)
class Key:
    """A key that holds a value, not a block."""

    kind: Kind
    null: bool = False
    """Whether null is valid, and means DeepSpeed's default."""
    only: tuple[Any, ...] | None = None
    """The only values of the kind that are accepted; others are refused with *instead*."""
    instead: str = ""


@dataclass(frozen=True)
class Section:
    """A supported block, with its keys."""

    keys: dict[str, Key | Section | Off]
    null: bool = False


@dataclass(frozen=True)
class Off:
    """A block that is refused when it is switched on; while it is off it is accepted, and left out."""

    instead: str
    names: str
    """Its keys, separated by spaces; "*" accepts any."""
    switch: str = "enabled"
    """The key that switches it on. "": any key whose value is not false, null, 0, 1, "auto" or empty."""


def _is_whole(value: Any) -> bool:
    # 5e8 is how DeepSpeed's documentation writes sizes.
    return not isinstance(value, bool) and (
        isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(low: int = 0, high: int = LARGEST, even: bool = False) -> Kind:
    """A whole number in [low, high]; 5e8 is one."""
    text = f"{'an even' if even else 'a'} whole number from {low:,}" + (
        f" to {high:,}" if high < LARGEST else ""
    )
    return Kind(text, lambda v: _is_whole(v) and low <= v <= high and not (even and v % 2))


def number(low: float, high: float = float("inf")) -> Kind:
    """A finite number in [low, high]."""
    text = f"a number from {low:g}" + (f" to {high:g}" if high < float("inf") else "")
    return Kind(text, lambda v: _is_number(v) and low <= v <= high and v < float("inf"))


def choice(*values: str) -> Kind:
    """One of the strings *values*."""
    return Kind(" or ".join(f'"{value}"' for value in values), lambda v: isinstance(v, str) and v in values)


def text_list(value: Any) -> bool:
    """Whether *value* is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


FLAG = Kind("true or false", lambda v: isinstance(v, bool))
TEXT = Kind("a printable string", lambda v: isinstance(v, str) and v.isprintable())
TEXTS = Kind("a list of strings", text_list)
BATCH = whole(1, 2**31)
THRESHOLD = whole()
BUFFER = whole(1, LARGEST_BUFFER)

flag = Key(FLAG)


def only_false(instead: str) -> Key:
    """A boolean key that must be false."""
    return Key(FLAG, only=(False,), instead=instead)


REMOVED = "DeepSpeed 0.19 has removed it; leave it out"
_OFFLOAD = 'write "device": "cpu" (ds_configs/zero3_offload.json)'
_CPU = 'write "offload_optimizer": {"device": "cpu"}'
_MASTER = "master weights and their gradients stay in fp32; leave it out"
_DIVISION = "gradients are averaged after their reduction; leave it out"
_CHECKPOINTS = "checkpoints are the run's; use --checkpoint.*"
_QUANTIZED = "weights and gradients travel unquantized; leave it out"
_NO_FP16 = 'it is not supported; use bf16 or fp32: write "bf16": {"enabled": "auto"}'
_METRICS = "every step's metrics are in the run folder's metrics.jsonl; wandb is --logging.wandb online"

_offload_device = Key(choice("none", "cpu", "nvme"), only=("none", "cpu"), instead=_OFFLOAD)
_OFFLOAD_PARAM = Section(
    {
        "device": _offload_device,
        "nvme_path": Key(TEXT, null=True),
        "buffer_count": Key(whole()),
        "buffer_size": Key(whole()),
        "max_in_cpu": Key(whole()),
        "pin_memory": flag,
    },
    null=True,
)
_OFFLOAD_OPTIMIZER = Section(
    {
        "device": _offload_device,
        "nvme_path": Key(TEXT, null=True),
        "buffer_count": Key(whole()),
        "pin_memory": flag,
        "pipeline_read": flag,
        "pipeline_write": flag,
        "fast_init": flag,
        "ratio": Key(number(0, 1), only=(1,), instead="the whole optimizer is offloaded; write 1.0"),
        "super_offload": only_false("it is for one kind of machine; leave it out"),
        "cpuadam_cores_perc": Key(number(0, 1)),
    },
    null=True,
)

ZERO: dict[str, Key | Section | Off] = {
    "stage": Key(
        Kind(
            "1, 2 and 3 (stage 0 with bf16 computes wrong norms; stage 1 replaces it)",
            lambda v: type(v) is int and v in (1, 2, 3),
        )
    ),
    "contiguous_gradients": flag,
    "reduce_scatter": flag,
    "reduce_bucket_size": Key(BUFFER),
    "use_multi_rank_bucket_allreduce": flag,
    "allgather_partitions": flag,
    "allgather_bucket_size": Key(whole(2, LARGEST_BUFFER, even=True)),
    "overlap_comm": Key(FLAG, null=True),
    "compute_grad_norm": Key(FLAG, only=(True,), instead="every step's gradient norm is logged; write true"),
    "load_from_fp32_weights": Key(
        FLAG, only=(True,), instead="runs continue exactly from fp32 weights; write true"
    ),
    "elastic_checkpoint": only_false("runs continue on other numbers of ranks without it; leave it out"),
    "offload_param": _OFFLOAD_PARAM,
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "zenflow": Off(
        "updates would lag behind the step; leave it out",
        "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
        "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch",
        switch="",
    ),
    "sub_group_size": Key(whole(1)),
    "cpu_offload_param": Key(FLAG, True, (False,), 'write "offload_param": {"device": "cpu"}'),
    "cpu_offload_use_pin_memory": Key(
        FLAG, True, (False,), 'write "offload_optimizer": {"pin_memory": true}'
    ),
    "cpu_offload": Key(FLAG, True, (False,), _CPU),
    "stage3_prefetch_bucket_size": Key(whole(0, LARGEST_BUFFER)),
    "stage3_param_persistence_threshold": Key(THRESHOLD),
    "stage3_model_persistence_threshold": Key(THRESHOLD),
    "stage3_max_live_parameters": Key(THRESHOLD),
    "stage3_max_reuse_distance": Key(THRESHOLD),
    "stage3_gather_16bit_weights_on_model_save": flag,
    # Above 0 the backward pass fails with two or more ranks.
    "stage3_module_granularity_threshold": Key(
        THRESHOLD, only=(0,), instead="modules are gathered one by one; write 0"
    ),
    "stage3_use_all_reduce_for_fetch_params": flag,
    "stage3_allgather_sequential": flag,
    "stage3_gather_fp16_weights_on_model_save": flag,
    "ignore_unused_parameters": flag,
    "legacy_stage1": only_false("DeepSpeed no longer has it; leave it out"),
    "round_robin_gradients": flag,
    "parameter_alignment": flag,
    "zero_hpz_partition_size": Key(
        whole(), only=(0, 1), instead="parameters are partitioned over all data-parallel ranks; write 1"
    ),
    "zero_quantized_weights": only_false(_QUANTIZED),
    "zero_quantized_nontrainable_weights": only_false(_QUANTIZED),
    "zero_quantized_gradients": only_false(_QUANTIZED),
    "memory_efficient_linear": flag,
    "pipeline_loading_checkpoint": only_false("there are no pipeline stages; leave it out"),
    "override_module_apply": flag,
    "log_trace_cache_warnings": flag,
    "enable_sanity_checks": flag,
    "save_muon_momentum_buffer_in_memory": only_false("the optimizer is AdamW; leave it out"),
    "leaf_module": Off(
        "it is for mixtures of experts; leave it out", "classes names name_suffixes", switch=""
    ),
    "mics_shard_size": Off(REMOVED, "", switch=""),
    "mics_hierarchical_params_gather": Off(REMOVED, "", switch=""),
    "zeropp_loco_param": Off(REMOVED, "*", switch=""),
}
ALIASES = {
    name.removeprefix("stage3_"): name
    for name in ZERO
    if name.startswith("stage3_") and name != "stage3_gather_fp16_weights_on_model_save"
} | {"stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save"}
"""Other names that DeepSpeed accepts for keys of zero_optimization."""
ZERO |= {name: ZERO[target] for name, target in ALIASES.items()}

BF16 = Section(
    {
        "enabled": flag,
        "immediate_grad_update": flag,
        "check_grad_overflow": Key(
            FLAG, only=(True,), instead="an update that is not finite is skipped on every rank; write true"
        ),
        "bf16_master_weights_and_grads": only_false(_MASTER),
        "bf16_optimizer_states": only_false(_MASTER),
    }
)

KEYS: dict[str, Key | Section | Off] = {
    "train_batch_size": Key(BATCH),
    "train_micro_batch_size_per_gpu": Key(BATCH),
    "gradient_accumulation_steps": Key(BATCH),
    "gradient_clipping": Key(number(0)),
    "bf16": BF16,
    "bfloat16": BF16,
    "data_types": Section(
        {
            "grad_accum_dtype": Key(choice("fp32", "bf16"), null=True),
            "param_dtype": Key(TEXT, True, (), "the run's precision says it; use --precision bf16 or fp32"),
            "buffer_dtype": Key(TEXT, True, (), "buffers keep their precision; leave it out"),
            "keep_in_fp32_modules": Key(TEXTS, False, (), 'buffers keep their precision; write "auto"'),
        }
    ),
    "communication_data_type": Key(choice("fp32", "bf16"), null=True),
    "seq_parallel_communication_data_type": Key(
        TEXT, True, ("fp32",), "sequence parallelism is the run's; use --sequence_parallel true"
    ),
    "prescale_gradients": only_false(_DIVISION),
    "gradient_predivide_factor": Key(number(0), only=(1,), instead=_DIVISION),
    "gradient_allreduce_op": Key(choice("mean", "sum"), only=("mean",), instead='write "mean"'),
    "disable_allgather": only_false("DeepSpeed no longer reads it; leave it out"),
    "managed_gradient_accumulation": Key(
        FLAG, only=(True,), instead="the run accumulates by global_batch_tokens; write true"
    ),
    "zero_allow_untested_optimizer": flag,
    "zero_force_ds_cpu_optimizer": flag,
    "zero_optimization": Section(ZERO),
    "allgather_size": Off('write "allgather_bucket_size" in zero_optimization', "", switch=""),
    "steps_per_print": Key(whole(1), null=True),
    "wall_clock_breakdown": flag,
    "memory_breakdown": flag,
    "dump_state": only_false("the merged configuration is the run folder's ds_config.json"),
    "disable_python_gc": flag,
    "log_level": Key(choice("debug", "info", "warning", "error", "critical"), null=True),
    "timers": Section({"throughput": Section({"enabled": flag, "synchronized": flag})}),
    "flops_profiler": Section(
        {
            "enabled": flag,
            "recompute_fwd_factor": Key(number(0, 10)),
            "profile_step": Key(whole(1)),
            "module_depth": Key(whole(-1, 1000)),
            "top_modules": Key(whole(1, 10000)),
            "detailed": flag,
            "output_file": Key(TEXT, null=True),
        }
    ),
    "comms_logger": Section(
        {"enabled": flag, "prof_all": flag, "prof_ops": Key(TEXTS), "verbose": flag, "debug": flag}
    ),
    "csv_monitor": Section({"enabled": flag, "output_path": Key(TEXT), "job_name": Key(TEXT)}),
    "tensorboard": Section({"enabled": flag, "output_path": Key(TEXT), "job_name": Key(TEXT)}),
    "aio": Section(
        {
            "block_size": Key(whole(1)),
            "queue_depth": Key(whole(1)),
            "intra_op_parallelism": Key(whole(1)),
            "single_submit": flag,
            "overlap_events": flag,
            "use_gds": only_false("it is for offloading to NVMe, which is not supported; leave it out"),
        },
        null=True,
    ),
    "checkpoint": Section(
        {
            "tag_validation": Key(
                choice("Warn", "Ignore", "Fail", "WARN", "IGNORE", "FAIL", "warn", "ignore", "fail")
            ),
            "checkpoint_serialization": Key(FLAG, only=(True,), instead=_CHECKPOINTS),
            "load_universal": only_false(
                "a run continues on other shapes by itself (docs/checkpoints.md); leave it out"
            ),
            "use_node_local_storage": only_false(
                "a run folder is on storage that all nodes share; leave it out"
            ),
            "parallel_write": Section({"pipeline_stage": only_false(_CHECKPOINTS)}),
            "writer": Off(
                _CHECKPOINTS,
                "type io_buffer_size io_buffer_double show_statistics data_parallel decoupled io_multiplier",
                switch="",
            ),
        }
    ),
    "dataloader_drop_last": only_false("the run reads every window of an epoch; leave it out"),
    "use_data_before_expert_parallelism": only_false("there are no experts; leave it out"),
    "vocabulary_size": Off("the tokenizer says it; leave it out", "", switch=""),
    "sequence_parallel_size": Off("use --sequence_parallel true with --tensor_parallel", "", switch=""),
    "fp16": Off(
        _NO_FP16,
        "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
        "min_loss_scale fp16_master_weights_and_grads",
    ),
    "amp": Off(_NO_FP16, "*"),
    "torch_autocast": Off("use --precision bf16", "enabled dtype lower_precision_safe_modules"),
    "optimizer": Off("", "type params legacy_fusion"),
    "scheduler": Off("", "type params"),
    "activation_checkpointing": Off(
        "blocks are recomputed by --activation_checkpointing true",
        "partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints "
        "synchronize_checkpoint_boundary profile",
        switch="",
    ),
    "wandb": Off("use --logging.wandb online and --logging.wandb_project", "enabled group team project"),
    "comet": Off(
        _METRICS,
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    ),
    "autotuning": Off(
        "python -m pretrain.plan says what fits and how fast it is",
        "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path "
        "tuner_type tuner_early_stopping tuner_num_trials arg_mappings model_info model_info_path mp_size "
        "max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu "
        "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes",
    ),
    "compile": Off(
        "use --compile true",
        "deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation "
        "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
        "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
        "keep_int_input_tensors keep_all_input_tensors passes",
        switch="deepcompile",
    ),
    "tensor_parallel": Off(
        "use --tensor_parallel",
        "dtype autotp_size tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend tp tensor_parallel "
        "injection_policy_tuple partition_config preset_model keep_module_on_host kernel_inject "
        "replace_with_kernel_inject",
        switch="autotp_size",
    ),
    "hybrid_engine": Off(
        "it generates while training; use python -m pretrain.generate",
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
        "enable_cuda_graph",
    ),
    "data_efficiency": Off(
        "the run owns its data's order; leave it out", "enabled seed data_sampling data_routing"
    ),
    "expert_parallel": Off("there are no experts; leave it out", "*"),
    "pipeline": Off(
        "there are no pipeline stages; leave it out",
        "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned",
        switch="",
    ),
    "weight_quantization": Off(_QUANTIZED, "enabled quantized_initialization post_init_quant", switch=""),
    "datastates_ckpt": Off(_CHECKPOINTS, "*", switch=""),
}
_GONE = """
    nebula compression_training quantize_training sparse_gradients eigenvalue sparse_attention elasticity
    graph_harvesting curriculum_learning progressive_layer_drop
"""
KEYS |= {name: Off(REMOVED, "*") for name in _GONE.split()}
