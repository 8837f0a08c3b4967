"""Imports a Llama, GPT-2 or native Hugging Face folder as a run to continue pretraining from.

The run holds one checkpoint, of step 0, unsharded: weights without optimizer state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import yaml
from torch import Tensor

from model.config import ModelConfig, block
from model.errors import UserError, shown
from model.heads import MOST_LAYERS
from model.parameters import has_vocabulary_rows
from pretrain.checkpoint.state import DataIdentity, TrainingState
from pretrain.checkpoint.unsharded_folder import UnshardedParameter, write_unsharded
from pretrain.data.sentencepiece_bpe import byte_fallback_bpe
from pretrain.data.sources.files import BuiltinCorpus
from pretrain.data.tokenizer import SentencePieceTokenizer, Tokenizer, tokenizer_hash
from pretrain.hf.comparison import MAX_LENGTH, WINDOWS, Comparison, compare, model_logits, our_logits
from pretrain.hf.exported_model import SUPPORTED, exported_tokenizer, load_exported, read_config
from pretrain.hf.formats import ACTIVATIONS, gpt2_sources, llama_name, parameter_shapes
from pretrain.hf.new_folder import new_folder
from pretrain.run.saved import SavedRun
from pretrain.utils.files import write_atomically
from pretrain.utils.parsing import read_json_object

# transformers' names of the three activations; gelu_new and gelu_pytorch_tanh are one formula.
_ACTIVATIONS = {their_name: our_name for our_name, their_name in ACTIVATIONS.items()} | {
    "gelu_new": "gelu_tanh",
    "swish": "silu",
}
_BUFFERS = re.compile(r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    folder: Path
    model: ModelConfig
    comparison: Comparison
    notes: list[str]


def import_folder(folder: Path, run_folder: Path) -> Imported:
    """Make a run from *folder* and compare its logits with the folder's.

    Raises:
        UserError: an architecture or a setting that we do not have, weights that do not fit, a run folder that exists.
            No run is left then.
    """
    config = read_config(folder)
    if config["model_type"] not in SUPPORTED:
        raise UserError(
            f"from_hf: {str(folder)!r} holds {config['model_type']!r}, which is not supported; "
            f"valid: {', '.join(SUPPORTED)}"
        )
    model, notes = model_config(folder, config["model_type"])
    tokenizer = exported_tokenizer(folder)
    if isinstance(tokenizer, SentencePieceTokenizer):
        byte_fallback_bpe(tokenizer)  # refused now, and not when the run is to be exported
    rows = model.vocab_size
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"tokenizer: {tokenizer.name} has {tokenizer.vocab_size:,} entries, the model only {rows:,}; put the "
            f"model's own tokenizer into {str(folder)!r}"
        )
    if tokenizer.vocab_size < rows:
        notes.append(f"{rows - tokenizer.vocab_size} vocabulary rows that no token uses are left out")
        model = model.replace(vocab_size=tokenizer.vocab_size)
    tensors = FolderTensors(folder)
    with new_folder(run_folder, 4 * model.num_parameters(), overwrite=None) as created:
        (created / "checkpoints").mkdir()
        tokenizer.save(created / "tokenizer")
        state = TrainingState(model=model.to_json(), data=DataIdentity(tokenizer_hash(tokenizer)))
        parameters = (
            UnshardedParameter(name, _padded(name, tensor, model))
            for name, tensor in _parameters(model, config["model_type"], tensors)
        )
        write_unsharded(created / "checkpoints" / "step_000000", state, [], parameters, created / "tokenizer")
        write_atomically(created / "latest", "step_000000\n")
        write_atomically(created / "model.json", json.dumps(model.to_json(), indent=1) + "\n")
        recipe = {
            "model": str(run_folder / "model.json"),
            "name": run_folder.name,
            "runs_dir": str(run_folder.parent),
            "recipe": "imported",
        }
        write_atomically(created / "config.yaml", yaml.safe_dump(recipe, sort_keys=False))
        comparison = _compare(folder, created, tokenizer, model)
        if comparison.problem:
            raise UserError(f"from_hf: {comparison.problem}; nothing was written to {run_folder}")
    return Imported(run_folder, model, comparison, notes)


def _compare(folder: Path, run_folder: Path, tokenizer: Tokenizer, model: ModelConfig) -> Comparison:
    """Compare logits of the folder with those of the run, both loaded afresh, one after the other."""
    length = min(model.context_length, MAX_LENGTH)
    ids: list[int] = []
    for document in BuiltinCorpus().documents():
        ids += tokenizer.encode(document.text[: 8 * WINDOWS * length])
        if len(ids) >= WINDOWS * length:
            break
    tokens = np.array(ids[: WINDOWS * length], np.int64).reshape(WINDOWS, length)
    network = SavedRun.open(run_folder).load_model()
    reference = our_logits(network, tokens)
    del network
    window_logits = model_logits(load_exported(folder, torch.float32, safetensors_only=False), tokens)
    return compare(reference, lambda window: window_logits(window)[:, : model.vocab_size], torch.float32)


# ---------------------------------------------------------------------- configurations


def model_config(folder: Path, model_type: str) -> tuple[ModelConfig, list[str]]:
    """Our configuration of a folder's model, and notes to print.

    Raises:
        UserError: a setting that our network does not have.
    """
    from transformers import GPT2Config, LlamaConfig

    from pretrain.hf.configuration_head_schedule import HeadScheduleConfig

    kinds: dict[str, tuple[Any, Callable[[Any], tuple[ModelConfig, list[str]]]]] = {
        "llama": (LlamaConfig, _from_llama),
        "gpt2": (GPT2Config, _from_gpt2),
        "head_schedule": (HeadScheduleConfig, _from_native),
    }
    kind, convert = kinds[model_type]
    written = read_config(folder)
    for name in ("num_hidden_layers", "n_layer"):  # before a list with an entry for each is made
        layers = written.get(name, 1)
        if type(layers) is not int or not 1 <= layers <= MOST_LAYERS:
            raise UserError(
                f"from_hf: {name} {shown(layers)} in {folder}/config.json is not valid; give 1 to {MOST_LAYERS:,}"
            )
    try:
        config = kind.from_pretrained(folder)
    except Exception as error:  # validators raise errors of their own
        raise UserError(
            f"from_hf: {folder}/config.json is not valid ({' '.join(str(error).split()):.200})"
        ) from error
    model, notes = convert(config)
    _check_positions(model)
    return model, notes


def _check_positions(model: ModelConfig) -> None:
    """Refuse a context for which this machine cannot hold the table of rotary angles, which covers all of it."""
    if model.positions != "rope":
        return
    dims = {model.layer_head_dim(layer) for layer in range(model.num_layers)}
    # Cosines and sines in fp32, half a head each, and the angles while they are made.
    needed = model.context_length * (4 * sum(dims) + 2 * max(dims))
    available_bytes = psutil.virtual_memory().available
    if needed > available_bytes:
        raise UserError(
            f"from_hf: max_position_embeddings {model.context_length:,} needs {needed / 1e9:,.0f} GB for a table of "
            f"rotary angles, {available_bytes / 1e9:,.0f} GB are free; write the length that you will use into "
            "config.json"
        )


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise UserError(f"from_hf: activation {name!r} is not supported; valid: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _refuse(settings: Mapping[str, Any]) -> None:
    """Refuse unsupported settings that change what the model computes: name -> (value, valid value)."""
    for name, (value, valid) in settings.items():
        if value != valid:
            raise UserError(f"from_hf: {name} {value!r} is not supported; valid: {valid!r}")


def _schedules(model: Mapping[str, Any]) -> dict[str, Any]:
    """Schedules in their shortest form: None where they equal the default."""
    heads, d_model = model["heads"], model["d_model"]
    shortest = dict(model)
    if model["kv_heads"] == heads:
        shortest["kv_heads"] = None
    if all(count * dim == d_model for count, dim in zip(heads, model["head_dim"], strict=True)):
        shortest["head_dim"] = None
    if "local_window" in model and not any(model["local_window"]):
        shortest["local_window"] = None
    return shortest


def _from_llama(config: Any) -> tuple[ModelConfig, list[str]]:
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        raise UserError(
            f"from_hf: RoPE scaling {rope['rope_type']!r} is not supported; valid: models without it"
        )
    _refuse({"partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0)})
    notes = [f"attention_dropout {config.attention_dropout} is left out"] if config.attention_dropout else []
    layers = config.num_hidden_layers
    values = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "d_model": config.hidden_size,
        "ffn_width": config.intermediate_size,
        "heads": (config.num_attention_heads,) * layers,
        "kv_heads": (config.num_key_value_heads,) * layers,
        "head_dim": (config.head_dim,) * layers,
        "activation": _activation(config.hidden_act),
        "norm_eps": config.rms_norm_eps,
        "attention_bias": "all" if config.attention_bias else "none",
        "ffn_bias": config.mlp_bias,
        "rope_base": float(rope.get("rope_theta", 10000.0)),
        "tie_embeddings": config.tie_word_embeddings,
        "init_std": config.initializer_range,
    }
    return block("llama", **_schedules(values)), notes


def _from_gpt2(config: Any) -> tuple[ModelConfig, list[str]]:
    _refuse(
        {
            "scale_attn_by_inverse_layer_idx": (config.scale_attn_by_inverse_layer_idx, False),
            "add_cross_attention": (getattr(config, "add_cross_attention", False), False),
        }
    )
    dropouts = {name: getattr(config, name) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    notes = [f"{name} {value} is left out" for name, value in dropouts.items() if value]
    values = {
        "vocab_size": config.vocab_size,
        "context_length": config.n_positions,
        "d_model": config.n_embd,
        "ffn_width": config.n_inner or 4 * config.n_embd,
        "heads": (config.n_head,) * config.n_layer,
        "activation": _activation(config.activation_function),
        "norm_eps": config.layer_norm_epsilon,
        "attention_scale": "sqrt_head_dim" if config.scale_attn_weights else "none",
        "tie_embeddings": config.tie_word_embeddings,
        "init_std": config.initializer_range,
    }
    return block("gpt2", **values), notes


def _from_native(config: Any) -> tuple[ModelConfig, list[str]]:
    layers = list(config.per_layer_config)
    values = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "d_model": config.hidden_size,
        "ffn_width": config.intermediate_size,
        "heads": tuple(layer.num_attention_heads for layer in layers),
        "kv_heads": tuple(layer.num_key_value_heads for layer in layers),
        "head_dim": tuple(layer.head_dim for layer in layers),
        "local_window": tuple(
            layer.sliding_window if kind == "sliding_attention" else None
            for layer, kind in zip(layers, config.layer_types, strict=True)
        ),
        "ffn": config.feed_forward,
        "activation": _activation(config.hidden_act),
        "norm": config.norm,
        "norm_eps": config.norm_eps,
        "norm_bias": config.norm_bias,
        "attention_bias": config.attention_bias,
        "ffn_bias": config.mlp_bias,
        "positions": config.positions,
        "rope_base": config.rope_theta,
        "attention_scale": config.attention_scale,
        "tie_embeddings": config.tie_word_embeddings,
        "init_std": config.initializer_range,
    }
    return ModelConfig.from_json(_schedules(values)), []


# ---------------------------------------------------------------------- tensors


class FolderTensors:
    """Reads the tensors of a folder by name, one at a time: safetensors, or pickles read with an allow-list.

    Raises:
        UserError: no weights, or files that are missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, str] = {}
        for index, single in (
            ("model.safetensors.index.json", "model.safetensors"),
            ("pytorch_model.bin.index.json", "pytorch_model.bin"),
        ):
            if (folder / index).is_file():
                places = read_json_object(folder / index, "from_hf").get("weight_map")
                if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
                    raise UserError(
                        f"from_hf: {folder / index} has no weight_map from names of tensors to names of files; "
                        "fetch it again"
                    )
                files = sorted(set(places.values()))
            elif (folder / single).is_file():
                files = [single]
            else:
                continue
            for file in files:
                if Path(file).name != file or not (folder / file).is_file():
                    raise UserError(f"from_hf: {file}, which {index} names, is missing in {str(folder)!r}")
                self._places.update(dict.fromkeys(self._names(file), file))
            break
        else:
            raise UserError(f"from_hf: {str(folder)!r} holds no model.safetensors (nor pytorch_model.bin)")

    def names(self) -> set[str]:
        """Names of all tensors but computed buffers."""
        return {name for name in self._places if not _BUFFERS.match(name)}

    def read(self, name: str) -> Tensor:
        """One tensor, in fp32."""
        from safetensors import safe_open

        file = self._places[name]
        if file.endswith(".bin"):
            return self._pickled(file)[name].float()
        with safe_open(self.folder / file, framework="pt") as opened:
            return opened.get_tensor(name).float()

    def _names(self, file: str) -> list[str]:
        from safetensors import SafetensorError, safe_open

        if file.endswith(".bin"):
            return list(self._pickled(file))
        try:
            with safe_open(self.folder / file, framework="pt") as opened:
                return list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise UserError(f"from_hf: {self.folder / file} is damaged ({error})") from error

    def _pickled(self, file: str) -> dict[str, Tensor]:
        try:
            # weights_only: nothing but tensors comes out of a file that may come from anywhere
            return torch.load(self.folder / file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise UserError(
                f"from_hf: {self.folder / file} cannot be read ({type(error).__name__})"
            ) from error


def _parameters(model: ModelConfig, model_type: str, tensors: FolderTensors) -> Iterator[tuple[str, Tensor]]:
    """Our parameters, from the folder's tensors.

    Raises:
        UserError: tensors are missing, unknown or of the wrong shape.
    """
    shapes = parameter_shapes(model)
    if model_type == "gpt2":
        sources = gpt2_sources(model)
    else:
        sources = {llama_name(name): (name,) for name in shapes}
    # Folders written from the bare decoder (as OpenAI's GPT-2) lack the prefix.
    folder_names = tensors.names()
    base = "transformer." if model_type == "gpt2" else "model."
    stored = {name: name if name in folder_names else name.removeprefix(base) for name in sources}
    missing = [name for name, stored_name in stored.items() if stored_name not in folder_names]
    unknown = folder_names - set(stored.values()) - ({"lm_head.weight"} if model.tie_embeddings else set())
    if missing or unknown:
        problem = f"lacks {missing[0]}" if missing else f"has {min(unknown)}, which its architecture has not"
        raise UserError(f"from_hf: {str(tensors.folder)!r} {problem}")
    for name, our_names in sources.items():
        tensor = tensors.read(stored[name])
        conv = model_type == "gpt2" and tensor.ndim == 2 and "transformer.h." in name
        pieces = (tensor.t() if conv else tensor).chunk(len(our_names))
        for our_name, piece in zip(our_names, pieces, strict=True):
            shape = shapes[our_name]
            value = piece[: shape[0]] if has_vocabulary_rows(our_name) else piece
            if tuple(value.shape) != shape:
                raise UserError(
                    f"from_hf: {name} has shape {list(tensor.shape)}, config.json wants {our_name} {list(shape)}"
                )
            yield our_name, value.contiguous()


def _padded(name: str, tensor: Tensor, model: ModelConfig) -> Tensor:
    if not has_vocabulary_rows(name):
        return tensor
    padded = tensor.new_zeros(model.padded_vocab_size(), *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    return padded
