"""Imports a Hugging Face folder of one of our formats as a run to continue pretraining from.

The run holds one checkpoint, of step 0, unsharded: weights without optimizer state.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError, escape_controls
from model.parameters import has_vocabulary_rows
from pretrain.checkpoint.state import DataIdentity, TrainingState
from pretrain.checkpoint.weights_only import write_weights
from pretrain.config.hf_config_file import MODEL_TYPES, Format
from pretrain.config.run_config import IMPORTED_MODEL
from pretrain.config.sources import load_recipe, nest
from pretrain.data.sentencepiece_bpe import byte_fallback_bpe
from pretrain.data.tokenizer import SentencePieceTokenizer, Tokenizer, tokenizer_hash
from pretrain.hf.comparison import MAX_LENGTH, WINDOWS, compare, our_logits, their_logits
from pretrain.hf.formats import folder_tensors, is_transposed, parameter_shapes
from pretrain.hf.model_folder import check_folder
from pretrain.hf.new_folder import new_folder
from pretrain.hf.open_model import load_as_written, load_exported, load_exported_tokenizer
from pretrain.hf.tokenizer_files import TEMPLATE_NOTE, has_template
from pretrain.run.resume import IMPORTED
from pretrain.run.saved import SavedRun
from pretrain.utils.files import write_atomically
from pretrain.utils.format import log_line
from pretrain.utils.parsing import read_json_object

CONTINUE = "continue"
"""The recipe whose settings an import has."""


def import_folder(folder: Path, run_folder: Path) -> None:
    """Make a run from *folder* and compare its logits with those of transformers, which reads the folder
    itself. Prints what was done.

    Memory: one copy of the weights in fp32 (the folder's, then ours), and about one tensor.

    Raises:
        UserError: an architecture or a setting that we do not have, weights that do not fit, a run folder
            that exists. No run is left then.
    """
    model, tokenizer, notes = open_folder(folder)
    for note in notes:
        print(log_line("note", note))
    with new_folder(run_folder, kind="run") as created:
        network = load_exported(folder, torch.float32)
        _write_run(created, run_folder, model, tokenizer, network)
        del network  # never two copies
        run = SavedRun.open(created)
        tokens, _ = run.real_tokens(WINDOWS, min(model.context_length, MAX_LENGTH))
        theirs = their_logits(load_as_written(folder), tokens)[..., : model.vocab_size]
        print(log_line("logits", compare(our_logits(run.load_model(), tokens), theirs, torch.float32)))
    print(
        log_line(
            "ready", f"{escape_controls(str(run_folder))}: {model.num_parameters():,} parameters, step 0"
        )
    )
    print(log_line("note", "config.yaml has the settings of the recipe continue: check its rate and steps"))
    tokenizer_folder, settings = (
        shlex.quote(str(run_folder / name)) for name in ("tokenizer", "config.yaml")
    )
    prepare = f"head-schedules prepare --text … --tokenizer {tokenizer_folder} --out data/NAME"
    train = f"deepspeed --module pretrain.main --config {settings} --data data/NAME"
    print(log_line("next", f"{prepare}\n{train}"))


def open_folder(folder: Path) -> tuple[ModelConfig, Tokenizer, list[str]]:
    """Our model of a folder, its tokenizer, and lines for whoever trains it further.

    Raises:
        UserError: as check_folder and load_exported_tokenizer; a tokenizer that cannot be exported again.
    """
    described = check_folder(folder)
    model, notes = described.model, described.notes
    tokenizer = load_exported_tokenizer(folder, model.vocab_size)
    if isinstance(tokenizer, SentencePieceTokenizer):
        byte_fallback_bpe(tokenizer)  # refused now, and not when the run is to be exported
    if has_template(tokenizer):
        notes.append(TEMPLATE_NOTE)
    if left := _list_left_out(folder):
        notes.append(f"an export will lack what the folder has besides: {', '.join(left)}")
    if tokenizer.vocab_size < model.vocab_size:
        unused = model.vocab_size - tokenizer.vocab_size
        notes.append(f"{unused} vocabulary rows that no token uses are left out")
        model = model.replace(vocab_size=tokenizer.vocab_size)
    return model, tokenizer, notes


def _list_left_out(folder: Path) -> list[str]:
    """What a folder has for chats, and no run or export of one: a template, and more end tokens than one."""
    configs: dict[str, dict[str, Any]] = {"tokenizer": {}, "generation": {}}
    for kind in configs:
        with suppress(UserError):
            configs[kind] = read_json_object(folder / f"{kind}_config.json", "model")
    left = []
    if (folder / "chat_template.jinja").is_file() or "chat_template" in configs["tokenizer"]:
        left.append("the chat template")
    if isinstance(ends := configs["generation"].get("eos_token_id"), list) and len(ends) > 1:
        left.append(f"all but one of its {len(ends)} end tokens")
    return left


def _write_run(
    created: Path, run_folder: Path, model: ModelConfig, tokenizer: Tokenizer, network: Any
) -> None:
    """Write the run that will be *run_folder* into *created*."""
    tokenizer.save(created / "tokenizer")
    state = TrainingState(model=model.to_json(), data=DataIdentity(tokenizer_hash(tokenizer)))
    (created / "checkpoints").mkdir()
    weights = parameters(model, MODEL_TYPES[network.config.model_type], network.state_dict())
    write_weights(created / "checkpoints" / "step_000000", state, weights, created / "tokenizer")
    write_atomically(created / "latest", "step_000000\n")
    write_atomically(created / IMPORTED_MODEL, json.dumps(model.to_json(), indent=1) + "\n")
    settings = nest(load_recipe(CONTINUE).values) | {
        "init_from": str(run_folder),  # under another name a run begins with these weights
        "model": str(run_folder / IMPORTED_MODEL),
        "name": run_folder.name,
        "runs_dir": str(run_folder.parent),
        "recipe": IMPORTED,
    }
    write_atomically(created / "config.yaml", yaml.safe_dump(settings, sort_keys=False))


def parameters(
    model: ModelConfig, chosen: Format, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Our parameters, fp32 with padded vocabulary rows, from the tensors of a folder of the format."""
    shapes = parameter_shapes(model)
    for name, our_names in folder_tensors(model, chosen).items():
        tensor = tensors[name].t() if is_transposed(name) else tensors[name]
        for our_name, piece in zip(our_names, tensor.chunk(len(our_names)), strict=True):
            value = piece[: shapes[our_name][0]].float()
            if has_vocabulary_rows(our_name):
                padded = value.new_zeros(model.padded_vocab_size(), *value.shape[1:])
                padded[: len(value)] = value
                value = padded
            yield our_name, value.contiguous()
