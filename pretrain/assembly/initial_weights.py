"""Begins a run with the weights of another run or of a Hugging Face folder (``init_from``).

The weights become the checkpoint of step 0 in the new run's folder, as those of an import do. So any parallel
configuration loads them, and the source is not needed any more once the run has begun.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError, escape_controls, quote
from model.heads import format_heads
from model.initialization import initial_value
from model.parameters import ParameterSpec, parameter_specs
from pretrain.assembly.loading import Found
from pretrain.checkpoint.finder import checkpoint_path, is_run
from pretrain.checkpoint.state import DataIdentity, TrainingState
from pretrain.checkpoint.weights_only import write_weights
from pretrain.config.model_file import split_step
from pretrain.config.run_config import DEFAULT_RECIPE, INITIAL_MODEL, RunConfig
from pretrain.data.same_tokenizer import tokenizer_difference
from pretrain.data.tokenizer import Tokenizer, tokenizer_hash
from pretrain.growth.edit import has_heads
from pretrain.growth.models import choose_models
from pretrain.hf.formats import folder_shapes
from pretrain.hf.import_folder import open_folder, parameters
from pretrain.hf.model_folder import check_folder, read_weights
from pretrain.run.saved import SavedRun
from pretrain.runtime.world import World
from pretrain.utils.files import write_atomically

HEADS = ("heads", "kv_heads", "head_dim")
MAY_DIFFER = (
    *("context_length", "rope_base", "rope_scaling", "local_window", "logit_softcap", "z_loss"),
    *("init_std", "tie_embeddings", "classes", *HEADS),
)
"""Fields of ModelConfig that need not be those of the weights; what else differs is another network."""


@dataclass(frozen=True)
class Source:
    """Weights to begin with."""

    model: ModelConfig
    tokenizer: Tokenizer
    origin: str
    """What they are, in a phrase."""
    notes: list[str]
    read: Callable[[], Iterator[tuple[str, Tensor]]]
    """Reads every parameter by name: fp32, full shape."""


def open_source(name: str) -> Source:
    """Open ``RUN``, ``RUN:STEP`` or a Hugging Face folder; no weights are in memory yet.

    Raises:
        UserError: as SavedRun.open and open_folder.
    """
    text, step = split_step(name)
    folder = Path(text)
    shown = escape_controls(text)
    if not is_run(folder):
        model, tokenizer, notes = open_folder(folder)
        stored = check_folder(folder)  # its model has the vocabulary rows that no token uses

        def read() -> Iterator[tuple[str, Tensor]]:
            shapes = folder_shapes(stored.model, stored.format)
            return parameters(model, stored.format, read_weights(folder, shapes))

        return Source(model, tokenizer, shown, notes, read)
    damaged: list[str] = []
    run = SavedRun.open(folder, step, damaged.append)

    def read_run() -> Iterator[tuple[str, Tensor]]:
        for parameter in run.checkpoint.names():
            yield parameter, run.checkpoint.parameter(parameter)
            run.checkpoint.release()

    notes = [line.removeprefix("note").strip() for line in damaged]
    return Source(run.model, run.tokenizer, f"{shown} at step {run.state.step:,}", notes, read_run)


def begin_from(run: RunConfig, asked: ModelConfig, tokenizer: Tokenizer, world: World) -> Found:
    """Where a run stands that begins with other weights; nothing is written before its ``begin``. Collective.

    Args:
        asked: the model that the settings describe.
        tokenizer: the run's.

    Raises:
        UserError: the source cannot be used, or its weights do not fit the run (all reasons named).
    """
    assert run.init_from is not None
    opened: list[Source] = []

    def compare() -> tuple[TrainingState, list[str]]:
        try:
            source = open_source(str(run.init_from))
        except UserError as error:
            raise UserError(f"init_from: {error}") from None
        opened.append(source)
        model = asked
        if run.growth.active:  # as a run of fixed heads that continues with growth
            model, _ = choose_models(asked, TrainingState(model=source.model.to_json()))
        problems = misfits(source.model, model)
        if run.growth.active:  # the source's heads stay, and others have their width
            problems += _list_other_widths(run, model)
        if difference := tokenizer_difference(source.tokenizer, tokenizer):
            problems.append(f"tokenizer: {difference}")
        if problems:
            advice = "leave --model and these settings out"
            if difference:
                advice = "give --data that was prepared with its tokenizer (prepare --tokenizer FOLDER)"
            raise UserError(
                f"init_from: the weights of {source.origin} do not fit this run ({'; '.join(problems)}); "
                f"{advice}, or give another source"
            )
        state = TrainingState(
            model=model.to_json(), data=DataIdentity(tokenizer_hash(tokenizer)), origin=source.origin
        )
        return state, [
            *source.notes,
            f"begins with the weights of {source.origin}",
            describe_settings(run),
            *news(source.model, model),
        ]

    state, notes = world.on_rank_zero(compare)

    def write() -> Path:
        source, model = opened[0], ModelConfig.from_json(state.model)
        target = checkpoint_path(run.folder, 0)
        weights = fit_parameters(source, model, run.seed)
        try:
            write_weights(target, state, weights, run.folder / "tokenizer")
            write_atomically(run.folder / INITIAL_MODEL, json.dumps(source.model.to_json(), indent=1) + "\n")
            write_atomically(run.folder / "latest", f"{target.name}\n")
        except OSError as error:
            raise UserError(f"checkpoint: cannot write {target}: {error.strerror or error}") from error
        return target

    return Found(None, state, notes, lambda: world.on_rank_zero(write))


def describe_settings(run: RunConfig) -> str:
    """The settings that matter most to weights that are there, and are not those they were trained with."""
    optimizer, recipe = run.optimizer, quote(run.recipe, plain=True)
    hint = "; --config continue has settings for trained weights" if run.recipe == DEFAULT_RECIPE else ""
    return (
        f"optimizer and length are those of the recipe {recipe} and of flags, not of the source: "
        f"{optimizer.kind}, peak learning rate {optimizer.learning_rate:g}, {run.steps:,} steps of "
        f"{run.global_batch_tokens:,} tokens{hint}"
    )


# ---------------------------------------------------------------------- what fits


def _list_other_widths(run: RunConfig, model: ModelConfig) -> list[str]:
    """Settings of head dims that are not those of *model*."""
    own = [model.layer_head_dim(layer) for layer in range(model.num_layers)]
    asked = {
        "growth.head_dim": run.growth.head_dim,
        "architecture.head_dim": run.architecture.get("head_dim"),
    }
    problems = []
    for name, given in asked.items():
        if given is None:
            continue
        dims = model.replace(head_dim=[given] * len(own) if isinstance(given, int) else given).head_dim
        if [*(dims or ())] != own:
            widths = f"{format_heads(dims or ())}, and the weights have heads of width {format_heads(own)}"
            problems.append(f"{name}: {widths}")
    return problems


def misfits(source: ModelConfig, model: ModelConfig) -> list[str]:
    """Why weights of *source* cannot begin *model*, a phrase for each reason; empty if they can.

    The heads of a layer fit if there are as many or more, of the same width, and each key/value head still
    serves as many query heads.
    """
    problems = [line for line in model.difference(source) if line.split(":")[0] not in MAY_DIFFER]
    if source.classes is not None and model.classes is None:
        problems.append("classes: a classifier's weights have no LM head")
    if model.tie_embeddings and not source.tie_embeddings:
        problems.append("tie_embeddings: true, and the weights have a separate LM head")
    if source.num_layers != model.num_layers:
        return [*problems, f"heads: {model.num_layers} layers, and the weights have {source.num_layers}"]
    for layer in range(model.num_layers):
        now, before = (
            (each.heads[layer], each.layer_kv_heads(layer), each.layer_head_dim(layer))
            for each in (model, source)
        )
        if now == before:
            continue
        same_groups = now[1] and before[1] and now[0] // now[1] == before[0] // before[1]
        if not same_groups or now[2] != before[2] or now[0] < before[0] or model.attention_gate != "none":
            described = (f"{h} heads ({kv} key/value) of width {dim}" for h, kv, dim in (now, before))
            gate = ", and heads cannot be added with attention_gate" * (model.attention_gate != "none")
            problems.append("heads: layer {} has {}, the weights {}{}".format(layer, *described, gate))
    return problems


def news(source: ModelConfig, model: ModelConfig) -> list[str]:
    """What is not as in the source, a line each: settings, weights that are new, weights that are left
    out."""
    lines = [f"differs from the source: {line}" for line in model.difference(source)]
    specs, stored = parameter_specs(model), parameter_specs(source)
    new, left_out = [], [name for name in stored if name not in specs]
    for name, spec in specs.items():
        if (before := stored.get(name)) is None:
            new.append(f"{name} (the token embedding)" if name == "output.weight" else name)
        elif spec.shape == before.shape:
            continue
        elif spec.role.part == "output":
            new.append(name)  # other classes: nothing of the head is taken
        elif _is_enlarged(spec, before):
            new.append(f"{name} beyond {list(before.shape)}")
        else:
            left_out.append(f"{name} beyond {list(spec.shape)}")
    if model.classes is not None and model.classes == source.classes:
        lines.append("the head is the source's: its classes must be these, in the same order")
    lines += [f"initialized: {', '.join(new)}"] if new else []
    return lines + ([f"left out: {', '.join(left_out)}"] if left_out else [])


def _is_enlarged(spec: ParameterSpec, stored: ParameterSpec) -> bool:
    return any(now > before for now, before in zip(spec.shape, stored.shape, strict=True))


def fit_parameters(source: Source, model: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of *model*: the source's, and the seed's initial values where it has none.

    The outputs of added heads are zero, so that the network's function does not change. A new untied LM head
    begins as a copy of the token embedding.

    Raises:
        UserError: a weight of the source is not finite.
    """
    specs = parameter_specs(model)
    written = set()
    for name, stored in source.read():
        if not torch.isfinite(stored).all():
            raise UserError(
                f"init_from: {name} of {source.origin} is not finite; give a step before that run diverged"
            )
        if name == "token_embedding.weight" and "output.weight" in specs and source.model.tied:
            written.add("output.weight")
            yield "output.weight", stored
        spec = specs.get(name)
        if spec is None:
            continue
        written.add(name)
        yield name, stored if spec.shape == tuple(stored.shape) else _enlarge(name, spec, stored, model, seed)
    for name in specs.keys() - written:
        yield name, initial_value(name, specs[name].role, specs[name].shape, model, seed)


def _enlarge(name: str, spec: ParameterSpec, stored: Tensor, model: ModelConfig, seed: int) -> Tensor:
    """A stored tensor in another shape, where only heads, positions or classes are new or left out."""
    value = initial_value(name, spec.role, spec.shape, model, seed)
    if spec.role.part == "output":  # other classes
        return value
    if has_heads(spec.role) and spec.role.part == "o":
        value.zero_()
    common = tuple(slice(min(now, before)) for now, before in zip(spec.shape, stored.shape, strict=True))
    value[common] = stored[common]
    return value
