"""Maps other programs' names of settings to ours, for suggestions when a name is unknown."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from model.errors import NEAR, suggest

MEANT = (
    ("adam_beta1 adam_beta2 beta1 beta2", "--optimizer.betas"),
    ("adam_eps adam_epsilon", "--optimizer.eps"),
    (
        "batch_size",
        "--micro_batch (sequences per forward pass, as in nanoGPT) or --global_batch_tokens (tokens per step "
        "over all ranks)",
    ),
    ("bf16 bfloat16 dtype", "--precision"),
    ("clip_grad max_grad_norm grad_clip", "--optimizer.gradient_clipping"),
    ("context_parallel_size cp ulysses_degree sp_size", "--context_parallel"),
    ("data_path dataset dataset_name train_file", "--data (head-schedules prepare makes a corpus)"),
    ("deepspeed deepspeed_config", "--ds_config"),
    ("eval_interval eval_steps", "--validation.every"),
    ("eval_iters", "--validation.sequences, in windows rather than batches"),
    ("ffn_hidden_size intermediate_size n_inner", "--architecture.ffn_width"),
    ("exit_duration_in_mins", "--interruption.minutes"),
    ("fp16 half", "--precision, bf16 or fp32"),
    (
        "global_batch_size train_batch_size",
        "--global_batch_tokens, in tokens: sequences times the context length",
    ),
    (
        "gradient_accumulation_steps",
        "--micro_batch: a step accumulates global_batch_tokens / (context length x micro_batch x "
        "data-parallel ranks) of them",
    ),
    ("gradient_checkpointing recompute_activations", "--activation_checkpointing"),
    (
        "recompute_granularity recompute_method recompute_num_layers",
        "--activation_checkpointing true, which computes every block again",
    ),
    ("group_query_attention", "--architecture.kv_heads, key/value heads of each layer"),
    ("hidden_size n_embd d_model", "--architecture.d_model"),
    ("kv_channels", "--architecture.head_dim, of all layers or of each"),
    ("init_method_std initializer_range", "--architecture.init_std"),
    ("log_interval logging_steps", "--logging.every"),
    ("lr", "--optimizer.learning_rate"),
    ("lr_decay_iters", "--steps, where every schedule ends"),
    ("lr_decay_style lr_scheduler_type", "--schedule.kind"),
    ("lr_wsd_decay_iters", "--schedule.decay"),
    ("max_steps train_iters max_iters num_steps", "--steps"),
    ("micro_batch_size per_device_train_batch_size", "--micro_batch"),
    ("min_lr", "--schedule.minimum, a fraction of the peak"),
    (
        "model_name_or_path pretrained init_checkpoint finetune",
        "--init_from, whose weights a new run begins with",
    ),
    ("num_attention_heads n_head n_heads num_heads", "--heads, one count per layer, such as 6x12"),
    (
        "num_layers n_layer n_layers num_hidden_layers",
        "--heads, one count per layer, such as 6x12, with --architecture.num_layers for another depth",
    ),
    ("num_key_value_heads n_kv_heads num_query_groups", "--architecture.kv_heads"),
    ("num_train_epochs epochs", "--steps, the length of the run"),
    ("output_dir save out_dir", "--runs_dir (of all runs) and --name (of this one)"),
    ("normalization", "--architecture.norm, rmsnorm or layernorm"),
    ("position_embedding_type", "--architecture.positions, rope or learned"),
    ("report_to use_wandb wandb_log", "--logging.wandb"),
    (
        "reset_position_ids reset_attention_mask",
        "--document_mask true, which restarts positions and attention at each document",
    ),
    ("resume_from_checkpoint load", "--resume; the same command resumes a run automatically"),
    ("rope_theta rotary_base", "--architecture.rope_base"),
    ("run_name", "--name"),
    ("save_interval save_steps always_save_checkpoint", "--checkpoint.every"),
    ("save_total_limit", "--checkpoint.keep_last"),
    ("seq_length block_size max_position_embeddings n_positions", "--architecture.context_length"),
    (
        "split",
        "--data PREFIX, which validates on the last 5 % of a .bin/.idx pair, or --validation.data with "
        "another",
    ),
    ("swiglu", "--architecture.ffn, swiglu or mlp"),
    ("tensor_model_parallel_size tp", "--tensor_parallel"),
    ("tokenizer_name tokenizer_name_or_path", "--tokenizer"),
    ("train_samples", "--steps: samples times the context length, divided by --global_batch_tokens"),
    (
        "untie_embeddings_and_output_weights tie_word_embeddings",
        "--architecture.tie_embeddings, true or false",
    ),
    ("use_distributed_optimizer", "--ds_config zero1 (or zero2, zero3), which shards the optimizer"),
    (
        "use_flash_attn attn_implementation",
        "--attention, whose default, auto, uses flash attention where it can",
    ),
    (
        "warmup_ratio warmup_steps warmup_iters lr_warmup_iters lr_warmup_fraction lr_warmup_samples",
        "--schedule.warmup, in steps or as a fraction of the run",
    ),
    (
        "window_size sliding_window window_attn_skip_freq",
        "--architecture.local_window, the tokens that a query sees, of each layer",
    ),
    ("no_rope_freq", "--architecture.rope_base, null in layers without positions"),
    ("bias add_bias_linear", "--architecture.attention_bias and --architecture.ffn_bias"),
    ("weight_decay", "--optimizer.weight_decay"),
)
"""What transformers, nanoGPT and Megatron-LM call a setting, and the flag of main.py."""
ABSENT = (
    ("dropout attention_dropout hidden_dropout", "there is no dropout"),
    (
        "eod_mask_loss",
        "there is no mask of the loss: the end of a document predicts the next one's first token",
    ),
    ("expert_model_parallel_size num_experts", "there is no mixture of experts"),
    ("fp8_format fp8", "there is no FP8 training"),
    ("device", "there is no such flag: devices are detected; set CUDA_VISIBLE_DEVICES or DS_ACCELERATOR=cpu"),
    ("decay_lr", "every schedule decays, to --schedule.minimum of the peak"),
    ("pipeline_model_parallel_size pp", "there is no pipeline parallelism"),
)
"""Settings of theirs that have no flag here, and why."""
OTHER_NAMES = {
    **{name: f"use {meant}" for names, meant in MEANT for name in names.split()},
    **{name: f"{reason}; leave it out" for names, reason in ABSENT for name in names.split()},
    "version": "`pip show head-schedules` prints it",
}


def suggest_flag(given: str, flags: Sequence[str], other_names: Mapping[str, str] = OTHER_NAMES) -> str:
    """A hint at the flag that *given* (with or without its dashes) may mean; empty when nothing comes near.

    Names of other programs come first, then the last parts of nested names, then whatever is spelled alike.

    Args:
        flags: those that are valid, such as ``--optimizer.eps``.
        other_names: what to give in place of a name that is not ours.
    """
    name = given.lstrip("-").lower().replace("-", "_")
    section, _, ending = name.rpartition(".")
    if meant := other_names.get(name) or other_names.get(ending):
        ours = re.sub(r"--\w+\.", f"--{section}.", meant)  # muon.lr is muon.learning_rate
        return f"; {ours if section and ours.split()[1] in flags else meant}"
    if f"--{name}" in flags:  # written with dashes, or in capitals
        return f"; did you mean '--{name}'?"
    by_ending: dict[str, list[str]] = {}
    for flag in flags:
        by_ending.setdefault(flag.removeprefix("--").rsplit(".", 1)[-1], []).append(flag)
    if name in by_ending:
        return f"; did you mean {' or '.join(map(repr, by_ending[name]))}?"
    if "." not in name and (near := difflib.get_close_matches(name, by_ending, n=1, cutoff=NEAR)):
        return f"; did you mean {' or '.join(map(repr, by_ending[near[0]]))}?"
    return suggest(f"--{name}", flags)
