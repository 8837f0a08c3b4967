"""Opens a model for inference on this machine, from a run's folder or an exported one."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.errors import UserError
from model.transformer import Transformer
from pretrain.checkpoint.finder import is_run
from pretrain.config.hf_config_file import Format
from pretrain.data.tokenizer import SENTENCEPIECE_FILE, Tokenizer, load_tokenizer
from pretrain.hf.formats import ARCHITECTURES, folder_config, folder_shapes
from pretrain.hf.model_folder import check_folder, check_model, read_weights
from pretrain.hf.new_folder import is_as_written
from pretrain.hf.tokenizer_files import TEMPLATE_NOTE, has_template
from pretrain.run.saved import SavedRun
from pretrain.runtime.environment import environment_rank
from pretrain.runtime.hardware import detect_device
from pretrain.utils.format import log_line


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
        UserError: *folder* is neither, or cannot be used; a step of an exported folder; weights that are not
            finite; a tokenizer with more entries than the model; as detect_device.
    """
    check_model(folder, step)
    device = detect_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # as model.attention.allow_any_length, for the whole process
        torch.backends.cuda.enable_cudnn_sdp(False)
    if is_run(folder):
        run = SavedRun.open(folder, step, report=lambda line: print(line, file=sys.stderr))
        run.refuse_classifier("sampled from or scored")
        network = run.load_model().to(device, dtype or torch.float32)
        refuse_not_finite(network, folder)
        return OpenedModel(network, run.tokenizer, run.model.context_length, device, run.state.step)
    exported = load_exported(folder, dtype).to(device)
    tokenizer = load_exported_tokenizer(folder, exported.config.vocab_size)
    if has_template(tokenizer) and environment_rank() == 0:
        print(log_line("note", TEMPLATE_NOTE), file=sys.stderr)
    return OpenedModel(exported, tokenizer, exported.config.max_position_embeddings, device, None)


def load_exported(folder: str | Path, dtype: torch.dtype | None = None) -> Any:
    """Load the model of a Hugging Face folder into transformers' class, in evaluation mode on the CPU.

    transformers reads none of the folder's files, and code in it is not run: folders of the native format run
    this package's own architecture.

    Args:
        dtype: to compute in; None is that of the weights.

    Raises:
        UserError: as check_folder and read_weights; weights that are not finite.
    """
    described = check_folder(folder)
    weights = read_weights(folder, folder_shapes(described.model, described.format))
    stored = {weight.dtype for weight in weights.values()} - {torch.float64}
    network = _network_class(described.format).from_pretrained(
        None,
        # Some classes have ids of special tokens by default, which a smaller vocabulary does not have.
        config=folder_config(
            described.model,
            described.format,
            dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        ),
        state_dict=weights,
        dtype=dtype or (stored.pop() if len(stored) == 1 else torch.float32),
        local_files_only=True,
    )
    refuse_not_finite(network, folder)
    return network.eval()


def load_as_written(folder: str | Path) -> Any:
    """Load the model of a Hugging Face folder in fp32 on the CPU as a user of transformers does: its class
    reads config.json and the weights itself. Code in the folder is not run.

    Raises:
        UserError: as check_folder; weights that are not finite.
    """
    from transformers import GenerationConfig

    described = check_folder(folder)
    kind = _network_class(described.format)
    network = kind.from_pretrained(
        folder,
        dtype=torch.float32,
        local_files_only=True,
        generation_config=GenerationConfig(),  # else it reads the folder's, which the logits do not need
    )
    refuse_not_finite(network, folder)
    return network.eval()


def _network_class(chosen: Format) -> Any:
    import transformers

    from pretrain.hf.modeling_head_schedule import HeadScheduleForCausalLM

    return getattr(transformers, ARCHITECTURES[chosen], HeadScheduleForCausalLM)


def refuse_not_finite(network: torch.nn.Module, folder: str | Path) -> None:
    """Raise UserError for the first parameter with NaN or infinity, of the model in *folder*."""
    for name, parameter in network.named_parameters():
        if not all(math.isfinite(bound) for bound in torch.aminmax(parameter.detach())):  # one pass, no copy
            raise UserError(
                f"model: {name} in {str(folder)!r} is not finite; valid: weights from before the run diverged"
            )


def load_exported_tokenizer(folder: str | Path, vocab_size: int) -> Tokenizer:
    """Load the tokenizer of an exported folder: the run's own files if they are there, else tokenizer.json.

    Raises:
        UserError: there is none, it is damaged or has more entries than the model, *vocab_size*.
    """
    root = Path(folder)
    ours = is_as_written(root, SENTENCEPIECE_FILE, "tokenizer.json")
    tokenizer = load_tokenizer(root / SENTENCEPIECE_FILE if ours else root)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer: {tokenizer.name} in {str(folder)!r} has {tokenizer.vocab_size:,} entries, its model "
            f"only {vocab_size:,}; put the model's own tokenizer there"
        )
    return tokenizer
