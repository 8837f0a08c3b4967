"""Opens a model for inference on this machine, from a run's folder or an exported one.

Of an exported folder safetensors are read unless told otherwise, and its code is never run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.declared import from_plain
from model.errors import UserError
from model.transformer import Transformer
from pretrain.checkpoint.finder import is_run
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.hf.model_folder import check_model, read_config
from pretrain.hf.tokenizer_files import ORIGINAL_FOLDER
from pretrain.run.saved import SavedRun
from pretrain.runtime.hardware import detect_device
from pretrain.utils.parsing import read_json_object


@dataclass(frozen=True)
class OpenedModel:
    """A network in evaluation mode on its device, with its tokenizer."""

    network: Any
    """Our Transformer for a run, transformers' model for an exported folder."""
    tokenizer: Tokenizer
    context_length: int
    """T, positions of the longest sequence."""
    device: torch.device
    step: int | None
    """Step of the run's checkpoint; None for an exported folder."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] of token ids [B, T]."""
        if isinstance(self.network, Transformer):
            return self.network(tokens)
        return self.network(tokens, use_cache=False).logits


def open_model(folder: str, step: int | None = None, dtype: torch.dtype | None = None) -> OpenedModel:
    """Open ``runs/NAME`` or an exported folder on this rank's GPU, where there is one, else on the CPU.

    Args:
        step: which checkpoint of a run; None is the newest valid one. Damaged ones are named on standard
            error.
        dtype: to compute in; None is fp32 for a run, and what the folder was exported in.

    Raises:
        UserError: *folder* is neither, or cannot be used; a step of an exported folder; a tokenizer with more
            entries than the model; as detect_device.
    """
    check_model(folder, step)
    device = detect_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # as model.attention.any_length, for the whole process
    if is_run(folder):
        run = SavedRun.open(folder, step, report=lambda line: print(line, file=sys.stderr))
        run.refuse_classifier("sampled from or scored")
        network = run.load_model().to(device, dtype or torch.float32)
        return OpenedModel(network, run.tokenizer, run.model.context_length, device, run.state.step)
    exported = load_exported(folder, dtype or "auto").to(device)
    tokenizer = exported_tokenizer(folder, exported.config.vocab_size)
    return OpenedModel(exported, tokenizer, exported.config.max_position_embeddings, device, None)


def load_exported(folder: str | Path, dtype: torch.dtype | str = "auto", *, importing: bool = False) -> Any:
    """Load the transformers model in *folder*, in evaluation mode on the CPU.

    Folders of the native format run this package's own architecture, not the copy that lies in them: what is
    in a folder may come from anywhere.

    Args:
        importing: take a pytorch_model.bin, too, of which torch reads nothing but tensors; and refuse weights
            that the architecture does not have.

    Raises:
        UserError: no model, an architecture that needs code from the folder, weights that are missing,
            damaged, of another shape than the configuration says or not safetensors.
    """
    config = read_config(folder)
    _refuse_other_places(Path(folder))
    kind: Any
    if config["model_type"] == "head_schedule":
        from pretrain.hf.modeling_head_schedule import HeadScheduleForCausalLM

        kind = HeadScheduleForCausalLM
    elif "auto_map" in config:
        raise UserError(
            f"model: {str(folder)!r} needs code of its own ({config['model_type']}), which is not run; "
            "valid: folders written by pretrain.convert, and architectures that transformers has"
        )
    else:
        from transformers import AutoModelForCausalLM

        kind = AutoModelForCausalLM
    try:
        network, found = kind.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=None if importing else True,  # None takes either kind of file
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
    except Exception as error:  # the library raises any kind for a damaged folder
        reason = " ".join(str(error).split())
        raise UserError(
            f"model: {str(folder)!r} cannot be loaded ({type(error).__name__}: {reason:.200})"
        ) from error
    for name, stored, expected in sorted(found["mismatched_keys"]):
        raise UserError(
            f"model: {name} in {str(folder)!r} has shape {list(stored)}, config.json wants {list(expected)}"
        )
    if missing := found["missing_keys"]:  # transformers would draw them at random
        raise UserError(f"model: {str(folder)!r} lacks {min(missing)}")
    if importing and (unknown := found["unexpected_keys"]):
        raise UserError(f"model: {str(folder)!r} has {min(unknown)}, which its architecture has not")
    return network.eval()


def _refuse_other_places(folder: Path) -> None:
    """Refuse an index that names files outside the folder."""
    for path in folder.glob("*.index.json"):
        index = read_json_object(path, "model")
        for file in from_plain(
            dict[str, str], index.get("weight_map"), f"model: {path}: weight_map"
        ).values():
            if Path(file).name != file:
                raise UserError(f"model: {path} names {file!r}, which is not a file of that folder")


def exported_tokenizer(folder: str | Path, vocab_size: int) -> Tokenizer:
    """Load the tokenizer of an exported folder: the run's own files if they are there, else tokenizer.json.

    Raises:
        UserError: there is none, it is damaged or has more entries than the model, *vocab_size*.
    """
    original = Path(folder) / ORIGINAL_FOLDER
    tokenizer = load_tokenizer(original if original.is_dir() else Path(folder))
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer: {tokenizer.name} in {str(folder)!r} has {tokenizer.vocab_size:,} entries, its model "
            f"only {vocab_size:,}; put the model's own tokenizer there"
        )
    return tokenizer
