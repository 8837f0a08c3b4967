"""Formats a plan as aligned text, and as a JSON object."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from model.heads import format_heads

if TYPE_CHECKING:
    from pretrain.plan.run_plan import RunPlan

GIB = 1 << 30
ASSUMED_MFU = (0.3, 0.4, 0.5)
"""What large models reach on GPUs, where no run was measured."""
PHASES = {
    "loss": "activations, logits and their gradients, at the end of the forward pass",
    "layers": "inside the backward pass",
    "reduction": "the last gradients, reduced",
    "step": "the optimizer's step",
}


def describe(plan: RunPlan, ds_config: str) -> str:
    """Format the plan in sections, every value with its unit; memory and traffic are of one rank."""
    run, model, machine, batch = plan.run, plan.model, plan.machine, plan.batch
    precision = "bf16" if plan.settings.bf16 else "fp32"
    gpu = f"{machine.gpu}, {machine.memory / GIB:.1f} GiB"
    blocks = "" if model.block_width is None else f"block width {format_heads(model.block_widths)}, "
    lines = [
        f"recipe   {run.recipe}",
        f"model    {run.model}: {model.num_parameters():,} parameters, {model.num_layers} layers, "
        f"heads {format_heads(model.heads)}, FFN width {format_heads(model.ffn_widths)}, {blocks}d_model "
        f"{model.d_model}, context {model.context_length}, "
        f"vocabulary {model.vocab_size:,}",
        *(f"budget   {line}" for line in run.describe_budgets(model)),
        f"ranks    {machine.ranks} = {machine.nodes} x {machine.gpus_per_node} GPUs ({gpu}); "
        f"{run.tensor_parallel} tensor-parallel x "
        + (f"{run.context_parallel} context-parallel x " if run.context_parallel > 1 else "")
        + f"{batch.data_parallel} data-parallel",
        f"engine   {ds_config}: ZeRO stage {plan.settings.stage}, {precision}"
        + (", activation checkpointing" if plan.settings.checkpointing else "")
        + (", sequence parallelism" if plan.settings.sequence_parallel and run.tensor_parallel > 1 else ""),
        f"batch    {plan.tokens_per_step:,} tokens a step = {batch.sequences} sequences = "
        f"{batch.micro_batch} a micro-batch x {batch.accumulation} accumulated x "
        f"{batch.data_parallel} data-parallel ranks",
        "",
        *_memory_lines(plan),
        "",
        *_traffic_lines(plan),
        "",
        *_time_lines(plan),
    ]
    if run.growth.active:
        lines += ["", "note     heads grow: memory, FLOPs and time are those of the largest model"]
    if run.tensor_parallel > machine.gpus_per_node:
        lines += ["", "note     tensor-parallel ranks of different nodes: every layer waits for the network"]
    return "\n".join(lines)


def _memory_lines(plan: RunPlan) -> list[str]:
    memory, settings, machine = plan.memory, plan.settings, plan.machine
    states, acts, buffers = memory.states, memory.activations, memory.buffers
    weights = ("bf16" if settings.bf16 else "fp32") + (", this rank's part" if settings.stage == 3 else "")
    accumulated = f"accumulated in {8 * settings.accumulation_bytes} bits"
    moments = f"fp32 x 2{', of matrices x 1' if settings.muon else ''}, this rank's part"
    layers = f"all {plan.model.num_layers} layers"
    if settings.checkpointing:
        layers = f"inputs of {layers}; {max(acts.per_layer) / GIB:.3f} GiB while one is recomputed"
    head = (
        "logits, their gradient, fp32 chunks" if acts.logits else "a chunk of logits, the LM head's gradient"
    )
    usable = f"{machine.usable / GIB:.1f} of {machine.memory / GIB:.1f} GiB are usable"
    rows = [
        ("parameters", states.parameters, weights),
        ("master weights", states.master, "fp32, this rank's part"),
        ("moments", states.moments, moments),
        ("gradients", states.gradients + memory.gradients, accumulated),
        (
            "reduction buffers",
            buffers.bucket + buffers.copies,
            "buckets, and copies of one while it is reduced",
        ),
        ("activations", sum(acts.kept), layers),
        ("logits and loss", 2 * acts.logits + acts.head_gradient + acts.loss_chunks, head),
    ]
    if acts.gathered:
        rows.append(("gathered keys", acts.gathered, "and values of one layer, again in the backward pass"))
    if settings.document_mask:
        note = "positions, rotary tables, masks where no kernel takes offsets"
        rows.append(("document mask", acts.documents, note))
    if settings.stage == 3:
        rows.append(("gathered parameters", memory.gathered, "whole at the end of the forward pass"))
    if states.host:
        rows.append(("in host memory", states.host, "offloaded, for each rank; not in the peak"))
    rows += [(f"peak: {phase}", size, PHASES[phase]) for phase, size in memory.phases.items()]
    rows.append(("predicted peak", memory.peak, f"{'fits' if plan.fits else 'does not fit'}: {usable}"))
    return _table("memory of a rank", rows)


def _traffic_lines(plan: RunPlan) -> list[str]:
    run, traffic, among = plan.run, plan.traffic, "among tensor-parallel ranks"
    exchange = f"{among}; head-schedules presets exchange has layers"
    replicas = "data- and context-parallel" if run.context_parallel > 1 else "data-parallel"
    rows = [
        ("gradients", traffic.gradients, f"among {replicas} ranks"),
        ("parameters", traffic.parameters, f"among {replicas} ranks"),
        ("all-reduces", traffic.tensor_all_reduces, among),
        ("head exchange", traffic.head_exchange, exchange),
    ]
    if run.context_parallel > 1:
        note = "among context-parallel ranks; head-schedules presets context has layers"
        rows.append(("heads, keys, values", traffic.context, note))
    if traffic.host:
        rows.append(("host and device", traffic.host, "gradients down and up again, weights up"))
    if traffic.muon:
        rows.append(("Muon's matrices", traffic.muon, "among all ranks, there and back"))
    lines = _table("sent by a rank in a step", rows)
    if plan.seconds_per_step is not None:
        rate = traffic.total / plan.seconds_per_step / 1e9
        lines.append(f"  on average {rate:,.2f} GB/s of each rank, if the step takes the time below")
    return lines


def _time_lines(plan: RunPlan) -> list[str]:
    run, machine = plan.run, plan.machine
    total = plan.tokens_per_step * run.steps
    lines = [
        f"tokens   {run.steps:,} steps x {plan.tokens_per_step:,} = {total:,} tokens",
        *_data_lines(plan, total),
        f"compute  {plan.model.flops_per_token():,} FLOP a token (6 N_matmul + 12 sum min(T, window) A); "
        f"{plan.flops_per_step:.3e} a step, {plan.flops_per_step * run.steps:.3e} in all",
    ]
    seconds = plan.seconds_per_step
    if seconds is None:
        precision = "bf16" if plan.settings.bf16 else "fp32"
        if machine.peak is None:
            return [*lines, f"time     not estimated: no {precision} peak is known; give --peak_tflops"]
        assumed = ((mfu, dataclasses.replace(plan, mfu=mfu).seconds_per_step or 0) for mfu in ASSUMED_MFU)
        times = ", ".join(f"{each * run.steps / 3600:,.3g} hours at {mfu:g}" for mfu, each in assumed)
        return [
            *lines,
            f"time     {times} MFU (assumed); give --mfu as a run like this one printed it",
        ]
    hours, mfu = seconds * run.steps / 3600, plan.predicted_mfu
    share = (
        ""
        if mfu is None or machine.peak is None
        else (f", at an MFU of {mfu:.3g} of {machine.peak / 1e12:,.0f} TFLOP/s a GPU")
    )
    lines.append(
        f"time     {seconds:.3g} s a step, {plan.tokens_per_step / seconds:,.0f} tokens/s, {hours:,.3g} "
        f"hours in all ({hours * machine.ranks:,.3g} GPU-hours){share}"
    )
    if plan.mfu is None and plan.rates is not None:
        lines.append(
            f"         predicted from counted work and {plan.rates.source}, without communication; --rates "
            "or --mfu give what was measured"
        )
    if plan.settings.checkpointing and plan.mfu is not None:
        lines.append("         MFU does not count what is recomputed: expect about a quarter less of it")
    return lines


def _data_lines(plan: RunPlan, tokens: int) -> list[str]:
    """How often each corpus is read. A classifier reads documents, padded or cut, and no stream of tokens."""
    if plan.corpora is None and plan.run.data != "builtin":
        return [f"data     {plan.run.data} is not on this machine; the vocabulary is the model's"]
    if plan.corpora is None or plan.run.task == "classification":
        return []
    lines = []
    for number, corpus in enumerate(plan.corpora):
        passes = corpus.passes(tokens)
        times = f"{passes:,.0f}" if passes >= 10 else f"{passes:.2g}"
        name, size = "" if number else "data", corpus.meta.training.tokens
        lines.append(f"{name:<8} {corpus.folder}: {size:,} training tokens, read {times} times")
    return lines


def _table(title: str, rows: list[tuple[str, int, str]]) -> list[str]:
    """Lines of names, sizes in GiB and notes."""
    return [f"{title:<33}GiB", *(f"  {name:<22}{size / GIB:>12.3f}  {note}" for name, size, note in rows)]


def to_json(plan: RunPlan) -> dict[str, Any]:
    """Return every value of the plan; bytes as integers, seconds and FLOP/s as floats."""
    run, machine, seconds = plan.run, plan.machine, plan.seconds_per_step
    return {
        "model": run.model,
        "recipe": run.recipe,
        "parameters": plan.model.num_parameters(),
        "heads": list(plan.model.heads),
        "tensor_parallel": run.tensor_parallel,
        "context_parallel": run.context_parallel,
        "engine": dataclasses.asdict(plan.settings),
        "machine": dataclasses.asdict(machine) | {"ranks": machine.ranks, "usable": machine.usable},
        "batch": dataclasses.asdict(plan.batch),
        "memory_bytes": dataclasses.asdict(plan.memory) | {"peak": plan.memory.peak},
        "sent_bytes_per_step": dataclasses.asdict(plan.traffic),
        "tokens_per_step": plan.tokens_per_step,
        "steps": run.steps,
        "tokens": plan.tokens_per_step * run.steps,
        "epochs": None
        if plan.corpora is None
        else {each.folder: each.passes(plan.tokens_per_step * run.steps) for each in plan.corpora},
        "flops_per_token": plan.model.flops_per_token(),
        "flops_per_step": plan.flops_per_step,
        "mfu": plan.predicted_mfu,
        "rates": None if plan.rates is None else plan.rates.source,
        "seconds_per_step": seconds,
        "seconds": None if seconds is None else seconds * run.steps,
        "fits": plan.fits,
    }
