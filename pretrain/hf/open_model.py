"""Opens a model for inference on this machine, from a run's folder or an exported one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.errors import UserError
from model.transformer import Transformer
from pretrain.data.tokenizer import Tokenizer
from pretrain.hf.exported_model import exported_tokenizer, load_exported
from pretrain.run.saved import SavedRun, is_run
from pretrain.runtime.hardware import detect_device


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
    device = detect_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # as model.attention.any_length, for the whole process
    if is_run(folder):
        run = SavedRun.open(folder, step, report=lambda line: print(line, file=sys.stderr))
        run.refuse_classifier("sampled from or scored")
        network = run.load_model().to(device, dtype or torch.float32)
        return OpenedModel(network, run.tokenizer, run.model.context_length, device, run.state.step)
    if step is not None:
        raise UserError(f"step: {step} was given, but {folder!r} is not a run's folder; leave it out")
    exported = load_exported(folder, dtype or "auto").to(device)
    tokenizer = exported_tokenizer(folder)
    if tokenizer.vocab_size > exported.config.vocab_size:
        raise UserError(
            f"tokenizer: {tokenizer.name} in {folder!r} has {tokenizer.vocab_size:,} entries, its model only "
            f"{exported.config.vocab_size:,}; put the model's own tokenizer there"
        )
    return OpenedModel(exported, tokenizer, exported.config.max_position_embeddings, device, None)
