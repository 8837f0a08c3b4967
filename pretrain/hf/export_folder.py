"""Exports a run as a Hugging Face folder: written under a temporary name, compared, and only then renamed."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

from model.blocks import BLOCKS
from model.config import ModelConfig
from model.errors import UserError, escape_controls
from model.parameters import has_vocabulary_rows
from model.schedules import Llama3Scaling, YarnScaling
from model.transformer import Transformer
from pretrain.config.hf_config_file import Format
from pretrain.hf import classifier
from pretrain.hf.comparison import MAX_LENGTH, WINDOWS, compare, our_logits, their_logits
from pretrain.hf.formats import (
    PADDED,
    choose_format,
    fold_divisor,
    folder_config,
    folder_weights,
    list_plain_formats,
)
from pretrain.hf.model_card import model_card
from pretrain.hf.new_folder import list_files, new_folder
from pretrain.hf.padding import folded_model, padded_model
from pretrain.hf.tokenizer_files import check_tokenizer, describe_conventions, write_tokenizer
from pretrain.prepare.sources.plain_files import BuiltinCorpus
from pretrain.run.saved import SavedRun
from pretrain.utils.env_check import check_variables
from pretrain.utils.format import log_line
from pretrain.utils.malloc import return_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CODE_FILES = tuple(f"{part}_head_schedule.py" for part in ("configuration", "modeling", "rotary"))


def export_run(
    source: SavedRun,
    out: Path,
    format: Format | Literal["auto"],
    dtype: str,
    overwrite: bool,
    license_name: str | None,
    fold: bool = False,
) -> None:
    """Write *source* to the folder *out* in a Hugging Face format and compare its logits with our model's.

    Prints what was done. Memory: the weights in fp32 and, where they are not plain copies (another dtype,
    GPT-2, padded Llama), those of the folder; later only the loaded folder.

    Args:
        fold: put the divisor of the logits into the final norm's weights; always done for a classifier,
            llama and qwen3.

    Raises:
        UserError: the format cannot hold the model, it has nothing to fold, *out* exists or cannot be
            written, or the logits differ. *out* is then as it was before.
    """
    check_variables("hub")  # transformers copies the folder's code there
    model, tokenizer, ratio = source.model, source.tokenizer, source.model.width_ratio
    classifies = model.classes is not None
    if fold and ratio == 1:
        raise UserError("fold: this model's logits have no divisor; leave it out")
    if fold or classifies or format in PADDED:
        model = folded_model(model)
    if classifies:
        model = classifier.exported_model(model)
    torch_dtype = DTYPES[dtype]
    chosen = choose_format(model, format)
    extra = special_ids(tokenizer.end_of_document) | {"dtype": torch_dtype}
    config = folder_config(model, chosen, extra | (classifier.label_settings(source) if classifies else {}))
    name = config.architectures[0]
    with new_folder(out, overwrite) as partial:
        length = min(model.context_length, MAX_LENGTH)
        tokens, text = source.real_tokens(WINDOWS, length)
        print(log_line("reading", source.checkpoint.folder))
        network = source.load_model()
        end = tokenizer.end_of_document
        rows, ends = classifier.examples(tokens, end, tokenizer.vocab_size)
        if classifies:
            reference = classifier.our_scores(network, rows, ends, end)
        else:
            reference = our_logits(network, tokens)
        print(log_line("writing", f"{name}, {dtype}"))
        parameters = list_parameters(network)
        if model.width_ratio != ratio:
            parameters = fold_divisor(parameters, ratio)
            exact = "exact: a power of two" if math.frexp(ratio)[0] == 0.5 else "each weight is rounded"
            print(log_line("folded", f"the final norm's weights are divided by {ratio:.6g} ({exact})"))
        if classifies:
            classifier.add_padding_token(parameters)
        weights = folder_weights(model, chosen, parameters)
        size = sum(weight.numel() for weight in weights.values())
        write_weights(partial, weights, torch_dtype)
        del network, parameters, weights  # before the written folder is loaded
        return_memory()
        write_description(partial, config)
        write_tokenizer(tokenizer, partial, model.context_length)
        compared_ids, notes = check_tokenizer(partial, tokenizer, _texts())
        if classifies:
            compared_ids += classifier.complete_tokenizer(partial, tokenizer, _texts())
        print(log_line("tokens", f"{compared_ids:,} ids of the exported tokenizer equal the run's"))
        for note in (*describe_conventions(tokenizer, partial), *notes):
            print(log_line("note", note))
        print(log_line("checking", f"{WINDOWS} x {length} tokens: {text}"))
        kind: Any = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
        theirs = kind.from_pretrained(partial, dtype=torch.float32, trust_remote_code=True).eval()
        logits = classifier.their_scores(theirs, rows) if classifies else their_logits(theirs, tokens)
        comparison = compare(reference, logits, torch_dtype)
        print(log_line("logits", comparison))
        if added := size - model.num_parameters():
            padding = describe_padding(model, config, size, added)
            print(log_line("padding", padding))
            comparison += f"; {padding}"
        if not classifies and (note := describe_head(model)):
            print(log_line("note", note))
        card = model_card(source, model, config, comparison, out.name, license_name)
        (partial / "README.md").write_text(card, encoding="utf-8")
        list_files(partial)
    if note := describe_plain(model) if chosen == "native" else describe_gguf(model, chosen):
        print(log_line("note", note))
    code = "needs trust_remote_code=True" if chosen == "native" else "no remote code"
    print(log_line("ready", f"{escape_controls(str(out))}: {name}; {code}"))
    print(log_line("upload", shlex.join(["hf", "upload", f"ORGANISATION/{out.name}", str(out)])))


def describe_padding(model: ModelConfig, config: Any, size: int, added: int) -> str:
    """What of a folder is padding: of its configuration *config*, and of its *size* parameters *added*."""
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layers, parts = range(model.num_layers), []
    if any((model.heads[i], model.layer_kv_heads(i), model.layer_head_dim(i)) != heads for i in layers):
        parts.append(f"{heads[0]} heads ({heads[1]} key/value) of dim {heads[2]}")
    if set(model.ffn_widths) != {config.intermediate_size}:
        parts.append(f"FFNs of width {config.intermediate_size}")
    what = f"padded to {' and '.join(parts)} in every layer: " if parts else ""
    return f"{what}{size:,} parameters, {added:,} of them padding"


def describe_plain(model: ModelConfig) -> str:
    """The formats that need no remote code and hold the model, and their size; empty: none."""
    for plain in list_plain_formats(model):
        whole = padded_model(model, plain).num_parameters()
        return f"--format {plain} writes a model without remote code, of {whole:,} parameters"
    return ""


def describe_gguf(model: ModelConfig, chosen: Format) -> str:
    """What llama.cpp would leave out of a folder of a plain format, or compute otherwise, without a message;
    empty: nothing."""
    usual = BLOCKS.get(chosen, {}).get("activation", "silu")
    scaling, layers = model.rope_scaling, model.attention_layers
    rotated = [model.layer_base(layer) is not None for layer in layers]
    lost = {
        f"the activation {model.activation} (it computes {usual})": model.activation != usual,
        "the scaling of positions": isinstance(scaling, Llama3Scaling) and chosen in ("qwen2", "qwen3"),
        "attention windows": any(model.layer_window(layer) for layer in layers),
        # In its models/smollm3.cpp, gpt2.cpp and llama-context.cpp.
        "which layers have positions (it leaves out every fourth)": chosen == "smollm3"
        and rotated != [(layer + 1) % 4 != 0 for layer in layers],
        "attention_scale none (it divides by sqrt(d_h))": chosen == "gpt2"
        and model.attention_scale == "none",
        "YaRN's attention_factor and truncate": isinstance(scaling, YarnScaling)
        and (scaling.attention_factor is not None or not scaling.truncate),
    }
    return f"llama.cpp ignores {', '.join(name for name in lost if lost[name])}" if any(lost.values()) else ""


def describe_head(model: ModelConfig) -> str:
    """What programs that call the LM head themselves must do with its logits; empty: nothing."""
    scaled, cap = model.width_ratio != 1, model.logit_softcap
    steps = [f"multiplied by {1 / model.width_ratio:.6g} (logit_scale)"] if scaled else []
    steps += [f"capped at {cap:g} (final_logit_softcapping)"] if cap is not None else []
    if not steps:
        return ""
    note = f"logits are {', then '.join(steps)}: a server must do it as config.json says"
    if len(steps) == 2:
        note += "; vLLM caps first, and its logits differ: give --fold"
    return note


def list_parameters(network: Transformer) -> dict[str, Tensor]:
    """A network's parameters by name, without padded vocabulary rows."""
    rows = network.config.vocab_size
    return {
        # A copy: what is written must fill its memory.
        name: parameter.detach()[:rows].clone() if has_vocabulary_rows(name) else parameter.detach()
        for name, parameter in network.named_parameters()
    }


def write_weights(folder: Path, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write *weights* as safetensors, in files of at most 5 GB.

    Raises:
        UserError: a weight is not finite in *dtype*.
        OSError: the disk is full or cannot be written.
    """
    for name in weights:
        weights[name] = weights[name].to(dtype)
        if not torch.isfinite(weights[name]).all():
            raise UserError(
                f"weights: {name} is not finite in {dtype}; valid: --dtype float32, or an earlier --step if "
                "the run has diverged"
            )
    save_torch_state_dict(weights, folder)


def special_ids(end_of_document: int) -> dict[str, int]:
    """The ids of special tokens as transformers' configurations name them: the end of a document is all of
    them."""
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_of_document)


def write_description(folder: Path, config: Any) -> None:
    """Write config.json, generation_config.json and, for the native format, the architecture's code."""
    config.save_pretrained(folder)
    rope = getattr(config, "rope_parameters", None)
    if config.model_type != "head_schedule" and rope:
        # Where transformers before 5, and programs that follow it, look for the base; llama.cpp's converter
        # also for the length that a scaling extends.
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for name in ("rope_theta", "original_max_position_embeddings"):
            if name in rope:
                written[name] = rope[name]
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    if "ForSequenceClassification" not in config.architectures[0]:
        GenerationConfig(**special_ids(config.eos_token_id)).save_pretrained(folder)
    if config.model_type == "head_schedule":
        for name in CODE_FILES:
            shutil.copyfile(Path(__file__).with_name(name), folder / name)


def _texts() -> Iterator[str]:
    """A few real documents, on which the tokenizers are compared."""
    characters = 0
    for document in BuiltinCorpus().documents():
        yield document.text
        characters += len(document.text)
        if characters > 100_000:
            return
