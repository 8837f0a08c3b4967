"""The lines that a run prints: its plan at the start, its results at the end."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from model.config import ModelConfig
from model.documents import varlen_head_dim
from model.errors import UserError
from model.kernels import GpuKernel, gpu_kernel
from pretrain.data.corpus import Corpus
from pretrain.data.sentencepiece_bpe import find_export_obstacle
from pretrain.engine.layout import weights_are_finite
from pretrain.metrics.file import FILE_NAME
from pretrain.plan.context_parallel import describe_forms
from pretrain.run.decisions import Decision
from pretrain.run.hooks import Hook
from pretrain.run.session import Session
from pretrain.runtime.collective_guard import run_guarded
from pretrain.runtime.environment import continue_command
from pretrain.runtime.hardware import describe_device
from pretrain.runtime.signals import Stopped
from pretrain.utils.format import count_of, human_seconds, log_line
from pretrain.utils.stdio import note_errors

if TYPE_CHECKING:
    from pretrain.trainer import Trainer


GRAPH_SECONDS = 10
"""What compiling one graph takes, forward and backward: 9 s of processor time on two CPU cores."""
FUSED = {"all": "q, k, v; gate, up; LM head and loss", "loss": "LM head and loss", "none": "nothing"}


def describe_opening(
    session: Session,
    hooks: Sequence[Hook],
    resumed_from: Path | None,
    notes: Sequence[str],
    verbose: bool = False,
) -> list[str]:
    """Lines about the run, its data and its devices, printed before the first step. For rank 0; not
    collective.

    Args:
        resumed_from: the checkpoint that the session continues from.
        notes: what the user should know, a line each.
        verbose: with the reasons of decisions.json, the sources of the text, and how often it is read.
    """
    run, model, batch, world = session.run, session.model_config, session.batch, session.world
    decisions, settings = session.decisions, session.decisions.settings
    where = f"{world.size}, on {describe_device(world.device)}{' each' if world.size > 1 else ''}"
    if world.tensor_parallel * world.context_parallel > 1:
        where += f"; {world.tensor_parallel} tensor-parallel x "
        where += f"{world.context_parallel} context-parallel x " if world.context_parallel > 1 else ""
        where += f"{world.data_parallel} data-parallel"
    degrees = world.context_parallel, world.tensor_parallel

    def why(decision: Decision[Any]) -> str:
        return f" ({decision.reason})" if verbose else ""

    lines: list[tuple[str, object]] = [
        ("run", run.folder),
        ("ranks", where),
        ("engine", f"ZeRO stage {settings.stage}; {decisions.dtype.value}{why(decisions.dtype)}"),
        (
            "kernels",
            f"attention: {_attention_line(session)}{why(decisions.attention)}; "
            f"fused: {_describe_fused(session)}{why(decisions.fused)}",
        ),
        ("model", f"{run.model}: {model.summary()}"),
        *(("budget", line) for line in run.describe_budgets(model)),
        *(("data", line) for line in session.sequences.describe().splitlines()),
        *(
            [("data", "documents are separate: attention and positions start again in each")]
            if run.document_mask
            else []
        ),
        *(("source", _source(corpus)) for corpus, _ in session.data.corpora if verbose),
        (
            "steps",
            f"{run.steps:,} of {session.tokens_per_step:,} tokens: micro-batch {batch.micro_batch} x "
            f"accumulation {batch.accumulation} x data-parallel {batch.data_parallel}{why(decisions.batch)}",
        ),
        *([("context", describe_forms(model, *degrees))] if degrees[0] > 1 else []),
        *(("epochs", line) for line in _epochs(session, verbose)),
    ]
    if obstacle := find_export_obstacle(session.data.tokenizer):
        notes = [*notes, f"the run cannot be exported to Hugging Face: tokenizer {obstacle}"]
    last: list[tuple[str, object]] = [("note", note) for note in notes]
    if not verbose:
        last.append(("details", "decisions.json gives the reason for each choice; --verbose prints it"))
    last.append(("compile", _describe_compiling(session, verbose)))
    if resumed_from:
        seen = f"step {session.state.step:,}, {session.state.sequences:,} sequences seen"
        last.insert(0, ("resume", f"from {resumed_from} ({seen})"))
    return [
        *(log_line(*line) for line in lines),
        *(line for hook in hooks for line in hook.announce(session)),
        *(log_line(*line) for line in last),
    ]


def _describe_compiling(session: Session, verbose: bool) -> str:
    """Whether the model is compiled, or why not, and how long that takes."""
    found, model = session.decisions.compile, session.model_config
    if not found.value:
        return f"no ({found.reason})"
    shapes = len({_block_shape(model, layer) for layer in range(model.num_layers)})
    about = human_seconds(GRAPH_SECONDS * (shapes + 2))
    reason = f" ({found.reason})" if verbose else ""
    return (
        f"yes{reason}: the first step compiles {count_of(shapes, 'block shape')}, the final "
        f"norm and the loss, which takes about {about} on an idle machine, or some seconds from torch's "
        "cache; the first validation compiles them again"
    )


def _block_shape(model: ModelConfig, layer: int) -> tuple[object, ...]:
    """What layers have in common that share a compiled graph."""
    widths = model.layer_width(layer), model.layer_ffn_width(layer)
    if not model.heads[layer]:
        return widths
    heads = model.heads[layer], model.layer_kv_heads(layer), model.layer_head_dim(layer)
    rotated = (model.layer_rotary(layer) or (0, 0.0))[0]
    return *widths, *heads, model.layer_window(layer), rotated


def _describe_fused(session: Session) -> str:
    """What is fused; not the LM head and loss of a classifier, which are small, nor of ranks that share
    both."""
    text = FUSED[session.decisions.fused.value]
    if session.model_config.classes is None and session.world.tensor_parallel == 1:
        return text
    return text.removesuffix("LM head and loss").rstrip("; ") or "nothing"


def _attention_line(session: Session) -> str:
    """How attention is computed; on a GPU also which heads its fastest kernels do not take."""
    decisions, model, device = session.decisions, session.model_config, session.world.device
    text: str = decisions.attention.value
    if device.type != "cuda" or text != "torch":
        return text
    capability, element = torch.cuda.get_device_capability(device), 2 if decisions.bf16 else 4
    dims: dict[GpuKernel, set[int]] = {"memory-efficient": set(), "math": set(), "flash": set()}
    for layer in model.attention_layers:
        window, dim = model.layer_window(layer), model.layer_head_dim(layer)
        masked = window is not None and window < model.context_length
        if session.run.document_mask:  # flash takes offsets and windows
            masked = element != 2 or not varlen_head_dim(dim, capability)
        dims[gpu_kernel(element, dim, masked, capability)].add(dim)
    slower = dims["memory-efficient"] if decisions.bf16 else set()
    for note, found in (("without flash", slower), ("all logits in memory", dims["math"])):
        if found:
            text += f", {note} for head dim {', '.join(map(str, sorted(found)))}"
    return text


def _epochs(session: Session, verbose: bool) -> list[str]:
    """How often all steps of the run, those already done included, read each of its corpora; if not
    *verbose*, of those only that are read more than once."""
    state, sequences = session.state, session.sequences
    total_sequences = state.sequences + max(0, session.run.steps - state.step) * session.batch.sequences
    lines = []
    for corpus, epochs in zip(sequences.corpora, sequences.epochs(total_sequences), strict=True):
        again = "; beyond one, the same text is trained on again" if epochs > 1 else ""
        if again or verbose:
            lines.append(f"{corpus.name} is read {epochs:.3g} times in {session.run.steps:,} steps{again}")
    return lines


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


def describe_finished(session: Session, arguments: list[str], notes: Sequence[str] = ()) -> list[str]:
    """Lines for a run that has all its steps. For rank 0; not collective."""
    step, folder = session.state.step, session.run.folder
    more = continue_command(arguments, 2 * step, session.run.resume == "never")
    return [
        *(log_line("note", note) for note in notes),
        *_curves(session, again=False),
        f"{folder} is already finished at step {step:,}" + (f"; to continue: {more}" if more else ""),
    ]


def describe_closing(trainer: Trainer, arguments: list[str]) -> list[str]:
    """Lines printed after the last step: results, a sample, where everything is, what to do next. Collective.

    Everything is saved before: what fails here is a note, and a request to stop leaves the rest out; the
    process is to end with 0 in any case.

    Returns:
        The lines on rank 0, nothing on the others. They take part in the sample alone: no rank waits in a
        collective while rank 0 draws and counts.
    """
    session, run, state = trainer.session, trainer.run, trainer.state
    world, listener = session.world, trainer.control.listener
    skipped = f"; {state.skipped} updates skipped" if state.skipped else ""
    lines = [
        log_line(
            "finished",
            f"{state.step:,} steps, {state.tokens:,} tokens in {state.seconds:,.0f} s{skipped}; "
            f"{trainer.data_share:.2%} of this session's training time spent waiting for data",
        )
    ]
    assert listener is not None
    try:
        with listener.mark_saved():
            trainer.metrics.close()
            sample: list[str] = []
            with note_errors("sample", sample.append):
                sample += run_guarded(lambda: _sample_lines(trainer), world)
            if not world.is_main:
                return []
            lines += [*_collect_results(trainer.hooks, session), *sample, *_curves(session)]
    except Stopped as stopped:
        lines.append(log_line("stopped", f"({stopped.reason}) after the last save; the rest is left out"))
    lines.append(
        log_line(
            "saved",
            f"{run.folder}: config.yaml, decisions.json, metrics.jsonl, tokenizer/, "
            f"checkpoints/{trainer.store.path(state.step).name}",
        )
    )
    convert = ["convert", str(run.folder), "--out", f"hf/{run.run_name}"]
    commands = {"convert": shlex.join(["head-schedules", *convert])}
    if session.data.is_text:
        evaluate = ["evaluate", str(run.folder), "--tasks", "hellaswag,piqa"]
        commands["evaluate"] = shlex.join(["head-schedules", *evaluate])
    if more := continue_command(arguments, 2 * run.steps, run.resume == "never"):
        commands["continue"] = more
    return [*lines, "next", *(f"  {word:<9} {command}" for word, command in commands.items())]


def _collect_results(hooks: Iterable[Hook], session: Session) -> list[str]:
    """The closing lines of hooks, or a note on each that has failed."""
    lines: list[str] = []
    for hook in hooks:
        with note_errors(f"results of {hook.name}", lines.append):
            lines += hook.summarize(session)
    return lines


def _curves(session: Session, again: bool = True) -> list[str]:
    """Draw the run's curves, *again* if they were drawn before; the picture's path, or why there is none."""
    folder = session.run.folder
    lines: list[str] = []
    picture = folder / "plots" / "training.png"
    if (folder / FILE_NAME).is_file() and (again or not picture.is_file()):
        with note_errors("results of plots", lines.append):
            from pretrain.plots.command import draw_runs  # matplotlib

            lines.append(log_line("plots", f"{draw_runs([folder], picture)}"))
    return lines


def _sample_lines(trainer: Trainer) -> list[str]:
    """A sample of what the model writes, or that it can write nothing. Collective."""
    session = trainer.session
    try:
        if not all(session.world.gather(weights_are_finite(trainer.engine))):
            raise UserError("model: its weights are not finite (NaN or infinity); a lower rate may help")
        tokens = session.run.logging.sample
        if not (session.data.is_text and tokens):
            return []
        from pretrain.generate import sample_text

        text = sample_text(session, trainer.engine, tokens)
    except UserError as error:
        return [log_line("diverged", error)]
    return ["sample", *(f"  | {line}" for line in text.splitlines())] if text else []
