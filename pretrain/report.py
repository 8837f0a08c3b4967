"""What a run tells the person in front of it: at the start, what it is going to do; at the end, what it did."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from model.heads import format_heads
from pretrain.data.corpus import Corpus, unigram_entropy
from pretrain.metrics.session import Metrics
from pretrain.runtime.hardware import describe_device, peak_flops

if TYPE_CHECKING:
    from pretrain.trainer import Trainer


def opening(trainer: Trainer) -> list[str]:
    """Lines that say what runs where, printed before the first step."""
    run, model, plan, world = trainer.run, trainer.model_config, trainer.plan, trainer.world
    where = f"{world.size} rank{'s' * (world.size > 1)}, each on {describe_device(world.device)}"
    if world.tensor_parallel > 1:
        where += f"; {world.tensor_parallel} tensor-parallel x {world.data_parallel} data-parallel"
    tokens = plan.sequences * model.context_length
    record = trainer.state.world
    stage = record["stage"]
    lines = [
        f"run      {run.folder}",
        f"world    {where}",
        f"engine   ZeRO stage {stage}; {record['dtype']} ({trainer.dtype_reason})",
        f"model    {run.model}: {model.num_parameters():,} parameters, {model.num_layers} layers, "
        f"heads {format_heads(model.heads)}, d_model {model.d_model}, context {model.context_length}",
        *(f"data     {line}" for line in trainer.sequences.describe().splitlines()),
        *["data     documents are kept apart: attention and positions begin anew in each"]
        * run.document_mask,
        *(f"source   {_source(corpus)}" for corpus, _ in trainer.data.corpora),
        f"steps    {run.steps:,} of {tokens:,} tokens = {plan.sequences} sequences "
        f"({plan.micro_batch} a micro-batch x {plan.accumulation} accumulated x {plan.data_parallel} ranks)",
    ]
    if trainer.resumed_from:
        lines.append(
            f"resume   from {trainer.resumed_from} (step {trainer.state.step:,}, "
            f"{trainer.state.sequences:,} sequences seen)"
        )
    return lines + [f"note     {note}" for note in trainer.notes]


def _source(corpus: Corpus) -> str:
    """Where a corpus's text came from, with the hash that says it is the same text."""
    meta = corpus.meta
    name = meta["source"]["name"]
    if "python" in meta["source"]:
        name = f"standard library of Python {meta['source']['python']}"
    skipped = ", ".join(f"{count} {reason}" for reason, count in meta["skipped"].items())
    return f"{name}, content {meta['content_hash'][:12]}" + (f", files skipped: {skipped}" if skipped else "")


def continue_command(trainer: Trainer, ds_config: str, arguments: list[str], steps: int) -> str:
    """The command that takes the run further, to *steps*."""
    launcher = "deepspeed pretrain/main.py"
    local = int(os.environ.get("LOCAL_SIZE", "1"))
    if local > 1:
        launcher = f"deepspeed --num_accelerators {local} pretrain/main.py"
    kept = _without(arguments, {"--ds_config", "--steps", "--local_rank"})
    return " ".join([launcher, "--ds_config", ds_config, *kept, "--steps", str(steps)])


def _without(arguments: list[str], flags: set[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument.split("=", 1)[0] in flags:
            skip = "=" not in argument
        else:
            kept.append(argument)
    return kept


def finished_already(trainer: Trainer, ds_config: str, arguments: list[str]) -> list[str]:
    """Lines for a run that has all its steps."""
    more = continue_command(trainer, ds_config, arguments, 2 * trainer.state.step)
    return [f"{trainer.run.folder} is already finished at step {trainer.state.step:,}; to go on: {more}"]


def metrics_of(trainer: Trainer) -> Metrics:
    """The metrics of this session, MFU against the peak of all devices together."""
    world, run = trainer.world, trainer.run
    flops = trainer.model_config.flops_per_token()
    peak = None
    if world.is_main:
        per_device, source = peak_flops(world.device, torch.bfloat16 if trainer.bf16 else torch.float32)
        peak = per_device * world.size
        world.say(
            f"MFU      = tokens/s x {flops / 1e6:,.1f} MFLOP per token (6 N_matmul + 12 sum min(T, window) A) / "
            f"{peak / 1e12:,.3g} TFLOP/s ({source})"
        )
    return Metrics(
        run.folder,
        total_steps=run.steps,
        start_step=trainer.state.step,
        main=world.is_main,
        flops_per_token=flops,
        peak_flops=peak,
        every_seconds=run.logging.seconds,
        wandb=run.logging.wandb,
        wandb_project=run.logging.wandb_project,
        config={
            "run": run.to_dict(),
            "model": trainer.model_config.to_json(),
            "ds_config": trainer.ds_config,
        },
    )


def closing(trainer: Trainer, ds_config: str, arguments: list[str], sample: str | None) -> list[str]:
    """Lines printed after the last step: results, a sample, where everything is, what to do next."""
    run, state = trainer.run, trainer.state
    lines = [
        f"finished {state.step:,} steps, {state.tokens:,} tokens in {state.seconds:,.0f} s"
        + (f"; {state.skipped} updates skipped" if state.skipped else "")
        + f"; {trainer.data_share:.2%} of this session's training time spent waiting for data"
    ]
    if trainer.measurements.result:
        lines.append(
            f"result   validation loss {trainer.measurements.result.loss:.4f} nats per token, "
            f"{trainer.measurements.result.bpb:.4f} bits per byte"
        )
    corpora = trainer.data.corpora
    if trainer.measurements.result and len(corpora) == 1:
        nats, bits = unigram_entropy(corpora[0][0])
        lines.append(
            f"compare  guessing by token frequency: {nats:.4f} nats per token, {bits:.4f} bits per byte"
        )
    if sample is not None:
        lines += ["sample", *(f"  | {line}" for line in sample.splitlines())]
    more = continue_command(trainer, ds_config, arguments, 2 * run.steps)
    newest = trainer.store.path(state.step).name
    return [
        *lines,
        f"saved    {run.folder}: config.yaml, metrics.jsonl, plots/training.png, tokenizer/, "
        f"checkpoints/{newest}",
        "next",
        f"  convert   python -m pretrain.convert {run.folder} --out hf/{run.run_name}",
        f"  evaluate  python -m pretrain.evaluation {run.folder} --tasks hellaswag,piqa",
        f"  continue  {more}",
    ]
