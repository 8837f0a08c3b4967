"""Maps other programs' names of settings to ours, for suggestions when a name is unknown."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from model.errors import closest

# A flag of main.py, or what to do instead, by what transformers and Megatron-LM call it.
OTHER_NAMES = {
    "adam_beta1": "--optimizer.betas",
    "adam_beta2": "--optimizer.betas",
    "adam_epsilon": "--optimizer.eps",
    "batch_size": "--global_batch_tokens (tokens per step over all ranks) or --micro_batch (sequences)",
    "bf16": "--precision",
    "clip_grad": "--optimizer.gradient_clipping",
    "data_path": "--data",
    "deepspeed": "--ds_config",
    "eval_interval": "--validation.every",
    "eval_steps": "--validation.every",
    "fp16": "--precision: bf16 or fp32",
    "global_batch_size": "--global_batch_tokens",
    "gradient_accumulation_steps": "--micro_batch, from which the accumulation follows",
    "gradient_checkpointing": "--activation_checkpointing",
    "hidden_size": "--architecture.d_model",
    "log_interval": "--logging.every",
    "logging_steps": "--logging.every",
    "lr": "--optimizer.learning_rate",
    "lr_decay_style": "--schedule.kind",
    "lr_scheduler_type": "--schedule.kind",
    "max_grad_norm": "--optimizer.gradient_clipping",
    "max_steps": "--steps",
    "micro_batch_size": "--micro_batch",
    "min_lr": "--schedule.minimum, a fraction of the peak",
    "num_attention_heads": "--heads, a count per layer such as 6x12",
    "num_layers": "--architecture '{heads: 6x12}', one head count per layer",
    "num_train_epochs": "--steps: a run is as long as its steps",
    "output_dir": "--runs_dir (of all runs) and --name (of this one)",
    "per_device_train_batch_size": "--micro_batch",
    "resume_from_checkpoint": "--resume; the same command continues a run by itself",
    "run_name": "--name",
    "save_interval": "--checkpoint.every",
    "save_steps": "--checkpoint.every",
    "save_total_limit": "--checkpoint.keep_last",
    "seq_length": "--architecture.context_length",
    "tensor_model_parallel_size": "--tensor_parallel",
    "train_batch_size": "--global_batch_tokens",
    "train_iters": "--steps",
    "warmup_ratio": "--schedule.warmup",
    "warmup_steps": "--schedule.warmup",
}


def suggestion(given: str, flags: Sequence[str], other_names: Mapping[str, str] = OTHER_NAMES) -> str:
    """A hint at the flag that *given* (with or without its dashes) may mean; empty when nothing comes near.

    Names of other programs come first, then the last parts of nested names, then whatever is spelled alike.

    Args:
        flags: those that are valid, such as ``--optimizer.eps``.
        other_names: what to give in place of a name that is not ours.
    """
    name = given.lstrip("-").lower().replace("-", "_")
    if name in other_names:
        return f"; here that is {other_names[name]}"
    by_ending: dict[str, list[str]] = {}
    for flag in flags:
        by_ending.setdefault(flag.removeprefix("--").rsplit(".", 1)[-1], []).append(flag)
    if name in by_ending:
        return f"; did you mean {' or '.join(map(repr, by_ending[name]))}?"
    if "." not in name and (near := difflib.get_close_matches(name, by_ending, n=1, cutoff=0.6)):
        return f"; did you mean {' or '.join(map(repr, by_ending[near[0]]))}?"
    return closest(f"--{name}", flags)
