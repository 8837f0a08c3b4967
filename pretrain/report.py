"""The lines that a run prints: at the start, what it is going to do; at the end, what it did."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from model.attention import any_length
from model.config import ModelConfig
from model.heads import format_heads
from pretrain.data.corpus import Corpus
from pretrain.diagnostics.measure import group_and_seed
from pretrain.engine.ds_config import EngineSettings
from pretrain.engine.kernels import attention_kernels, kernel_line
from pretrain.evaluation.accuracy import AccuracyResult
from pretrain.evaluation.baselines import compare_baselines
from pretrain.generate import generate
from pretrain.growth.hook import Growth
from pretrain.metrics.file import FILE_NAME
from pretrain.metrics.session import Metrics
from pretrain.plots import draw_runs
from pretrain.runtime.hardware import MEASURED, describe_device, peak_flops

if TYPE_CHECKING:
    from pretrain.session import Session
    from pretrain.trainer import Trainer

IN_ONE = {"all": "q, k, v; gate, up; head and loss", "loss": "head and loss", "none": "nothing"}


def opening(session: Session) -> list[str]:
    """Lines about the run, its data and its devices, printed before the first step. For rank 0; not collective."""
    run, model, batch, world = session.run, session.model, session.batch, session.world
    where = f"{world.size} rank{'s' * (world.size > 1)}, each on {describe_device(world.device)}"
    if world.tensor_parallel > 1:
        where += f"; {world.tensor_parallel} tensor-parallel x {world.data_parallel} data-parallel"
    record = session.state.world
    lines = [
        f"run      {run.folder}",
        f"world    {where}",
        f"engine   ZeRO stage {record['stage']}; {record['dtype']} ({session.dtype_reason})",
        f"compile  {'yes' if run.compile else 'no'} ({session.compile_reason})",
        f"kernels  attention: {_attention_line(session)}; in one: {_in_one(session)}",
        f"model    {_model_line(run.model, model)}",
        *(f"data     {line}" for line in session.sequences.describe().splitlines()),
        *["data     documents are kept apart: attention and positions begin anew in each"]
        * run.document_mask,
        *(f"source   {_source(corpus)}" for corpus, _ in session.data.corpora),
        f"steps    {run.steps:,} of {session.tokens_per_step:,} tokens = {batch.sequences} sequences "
        f"({batch.micro_batch} a micro-batch x {batch.accumulation} accumulated x {batch.data_parallel} ranks)",
        *(f"epochs   {line}" for line in _epochs(session)),
        *([_growth_line(session)] if run.growth.active else []),
    ]
    if session.resumed_from:
        lines.append(
            f"resume   from {session.resumed_from} (step {session.state.step:,}, "
            f"{session.state.sequences:,} sequences seen)"
        )
    settings = EngineSettings.of(run, session.ds_config, session.bf16, model)
    if settings.whole_gradients and world.data_parallel > 1:
        lines.append(
            "note     ZeRO 1 in bf16 reduces all gradients after the backward pass; "
            "ds_configs/zero2.json does so during it"
        )
    return lines + [f"note     {note}" for note in session.notes]


def _in_one(session: Session) -> str:
    """What is computed in one; not the head and loss of a classifier, which are small, nor of ranks that share both."""
    text = IN_ONE[session.run.fused]
    if session.model.classes is None and session.world.tensor_parallel == 1:
        return text
    return text.removesuffix("head and loss").rstrip("; ") or "nothing"


def _attention_line(session: Session) -> str:
    dtype = torch.bfloat16 if session.bf16 else torch.float32
    blocks = session.run.attention == "blocks"
    kernels = attention_kernels(session.model, session.world.device, dtype, session.run.document_mask, blocks)
    return kernel_line(kernels)


def _growth_line(session: Session) -> str:
    """What asks for heads, and how far they may go."""
    growth = session.run.growth
    hook = next((hook for hook in session.hooks if isinstance(hook, Growth)), None)
    when = f"at steps {', '.join(map(str, sorted(growth.schedule)))}" if growth.schedule else ""
    when = when or (f"checked every {hook.every} steps up to {hook.last:,}" if hook else "")
    budget = f", {growth.budget} in all" if growth.budget else ""
    return f"growth   {growth.criterion}: at most {session.run.most_heads} heads a layer{budget}; {when}"


def _epochs(session: Session) -> list[str]:
    """How often all steps of the run, those already done included, read each of its corpora."""
    state, sequences = session.state, session.sequences
    total_sequences = state.sequences + max(0, session.run.steps - state.step) * session.batch.sequences
    lines = []
    for corpus, epochs in zip(sequences.corpora, sequences.epochs(total_sequences), strict=True):
        again = "; beyond one, the same text is trained on again" * (epochs > 1)
        lines.append(f"{corpus.name} is read {epochs:.3g} times in {session.run.steps:,} steps{again}")
    return lines


def _model_line(name: str, model: ModelConfig) -> str:
    """What is trained, in one line."""
    parts = [f"{model.num_parameters():,} parameters", f"{model.num_layers} layers"]
    parts.append(f"heads {format_heads(model.heads)}")
    if model.classes is not None:
        parts.append(f"{model.classes} classes")
    if model.kv_heads is not None:
        parts.append(f"KV heads {format_heads(model.kv_heads)}")
    if model.head_dim is not None:
        parts.append(f"head dim {format_heads(model.head_dim)}")
    windows = [model.layer_window(layer) for layer in range(model.num_layers)]
    if any(windows):
        parts.append(f"attention windows {','.join(str(window or 'all') for window in windows)}")
    return f"{name}: {', '.join(parts)}, d_model {model.d_model}, context {model.context_length}"


def _source(corpus: Corpus) -> str:
    """Where a corpus's text came from, with the hash that identifies it."""
    meta = corpus.meta
    name = meta.source["name"]
    if "python" in meta.source:
        name = f"standard library of Python {meta.source['python']}"
    skipped = ", ".join(f"{count} {reason}" for reason, count in meta.skipped.items())
    return f"{name}, content {meta.content_hash[:12]}" + (
        f", documents skipped: {skipped}" if skipped else ""
    )


def launcher_command() -> list[str]:
    """The beginning of the command that started this session, as far as the environment shows it."""
    local = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1"))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return ["torchrun", "--nproc_per_node", local, "pretrain/main.py"]
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    first = [str(number) for number in range(int(local))]
    if "LOCAL_SIZE" in os.environ and len(devices) == len(first) and devices != first and "" not in devices:
        # DeepSpeed's launcher sets the variable in every rank, and ignores it beside a number of accelerators.
        return ["deepspeed", "--include", f"localhost:{','.join(devices)}", "pretrain/main.py"]
    if local != "1":
        return ["deepspeed", "--num_accelerators", local, "pretrain/main.py"]
    return ["deepspeed", "pretrain/main.py"]


def continue_command(ds_config: str, arguments: list[str], steps: int) -> str:
    """The command that continues the run to *steps*, quoted for a shell."""
    other_arguments = _without(arguments, {"--ds_config", "--steps", "--local_rank"})
    return shlex.join(
        [*launcher_command(), "--ds_config", ds_config, *other_arguments, "--steps", str(steps)]
    )


def _python(module: str, *arguments: str) -> str:
    return shlex.join(["python", "-m", module, *arguments])


def _without(arguments: list[str], flags: set[str]) -> list[str]:
    remaining, skip_value = [], False
    for argument in arguments:
        if skip_value:
            skip_value = False
        elif argument.split("=", 1)[0] in flags:
            skip_value = "=" not in argument
        else:
            remaining.append(argument)
    return remaining


def finished_already(session: Session, ds_config: str, arguments: list[str]) -> list[str]:
    """Lines for a run that has all its steps. Draws its curves if the last session ended before it did.

    For rank 0; not collective.
    """
    step, folder = session.state.step, session.run.folder
    picture = folder / "plots" / "training.png"
    if not picture.is_file() and (folder / FILE_NAME).is_file():
        draw_runs([folder], picture)
    more = continue_command(ds_config, arguments, 2 * step)
    return [f"{folder} is already finished at step {step:,}; to go on: {more}"]


def _mfu_line(flops: float, peak: float, source: str) -> str:
    """What MFU refers to, and whether it compares with that of another session."""
    line = (
        f"MFU      = tokens/s x {flops / 1e6:,.1f} MFLOP per token (6 N_matmul + 12 sum min(T, window) A) / "
        f"{peak / 1e12:,.3g} TFLOP/s ({source})"
    )
    if source.startswith(MEASURED):
        line += "; a peak measured anew by every session: compare tokens/s between sessions, and not MFU"
    return line


def build_metrics(session: Session) -> Metrics:
    """Build the metrics of a session, with MFU against the peak of all devices together."""
    world, run = session.world, session.run
    flops = session.model.flops_per_token()
    peak = None
    if world.is_main:
        per_device, source = peak_flops(world.device, torch.bfloat16 if session.bf16 else torch.float32)
        peak = per_device * world.size
        world.say(_mfu_line(flops, peak, source))
    return Metrics(
        run.folder,
        total_steps=run.steps,
        start_step=session.state.step,
        main=world.is_main,
        flops_per_token=flops,
        peak_flops=peak,
        every_seconds=run.logging.seconds,
        wandb=run.logging.wandb,
        wandb_project=run.logging.wandb_project,
        config={
            "run": run.to_dict(),
            "model": session.model.to_json(),
            "ds_config": session.ds_config,
        },
        group=group_and_seed(run.run_name)[0],
        tags=[Path(run.model).stem, f"zero{session.state.world['stage']}", session.state.world["dtype"]],
    )


def closing(trainer: Trainer, ds_config: str, arguments: list[str]) -> list[str]:
    """Lines printed after the last step: results, a sample, where everything is, what to do next. Collective.

    Also draws the curves into the run's folder.

    Returns:
        The lines on rank 0, nothing on the others. They take part in the sample alone: no rank waits in a collective
        while rank 0 draws and counts.
    """
    session, run, state = trainer.session, trainer.run, trainer.state
    sample = "" if session.data.labelled else sample_text(session, trainer.engine)
    if not session.world.is_main:
        return []
    draw_runs([run.folder], run.folder / "plots" / "training.png")
    result = session.validation.result if session.validation else None
    lines = [
        f"finished {state.step:,} steps, {state.tokens:,} tokens in {state.seconds:,.0f} s"
        + (f"; {state.skipped} updates skipped" if state.skipped else "")
        + f"; {trainer.data_share:.2%} of this session's training time spent waiting for data"
    ]
    if isinstance(result, AccuracyResult):
        lines += [
            f"result   accuracy {result.accuracy:.2%}, validation loss {result.loss:.4f} nats per example",
            f"compare  always the most frequent class: accuracy {result.most_frequent:.2%} of the same "
            f"{result.examples:,} examples",
        ]
    elif result:
        lines.append(
            f"result   validation loss {result.loss:.4f} nats per token, {result.bpb:.4f} bits per byte"
        )
        others = compare_baselines(
            session.data, session.model.context_length, run.validation.sequences, session.world.say
        )
        lines.append(f"compare  bits per byte of the same windows: the model {result.bpb:.4f}, {others}")
    more = continue_command(ds_config, arguments, 2 * run.steps)
    newest = session.store.path(state.step).name
    lines += ["sample", *(f"  | {line}" for line in sample.splitlines())] * bool(sample)
    lines += [
        f"saved    {run.folder}: config.yaml, metrics.jsonl, plots/training.png, tokenizer/, "
        f"checkpoints/{newest}",
        "next",
    ]
    if not session.data.labelled:
        lines += [
            f"  convert   {_python('pretrain.convert', str(run.folder), '--out', f'hf/{run.run_name}')}",
            f"  evaluate  {_python('pretrain.evaluation', str(run.folder), '--tasks', 'hellaswag,piqa')}",
        ]
    return [*lines, f"  continue  {more}"]


def sample_text(session: Session, engine: Any, tokens: int = 96) -> str:
    """Sample a document from the trained model without a prompt (temperature 0.8, top-p 0.95). Collective."""
    engine.eval()
    # Every length is another shape; compiling each would take longer than sampling.
    stance = "force_eager" if session.run.compile else "default"
    with torch.compiler.set_stance(stance), any_length():
        ids = generate(
            engine,
            [session.data.tokenizer.end_of_document],
            min(tokens, session.model.context_length),
            session.model.context_length,
            temperature=0.8,
            top_p=0.95,
            seed=session.run.seed,
            device=session.world.device,
        )
    return session.data.tokenizer.decode(ids)
