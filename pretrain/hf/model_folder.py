"""Opens a model's folder, a run's or an exported one: what it says is checked before torch is imported, and
its weights are compared with that before they are read."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from model.declared import from_dict
from model.errors import UserError, quote
from pretrain.checkpoint.finder import checkpoint_path, is_run, require_steps
from pretrain.config.hf_config_file import FolderModel, read_model
from pretrain.utils.files import open_regular
from pretrain.utils.parsing import read_json_object

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("model.safetensors", "pytorch_model.bin")
# Buffers that older versions of transformers have stored with the weights.
_BUFFERS = re.compile(r".*\b(attn\.(masked_)?bias|rotary_emb\.inv_freq)")
_FLOATS = ("float32", "float16", "bfloat16", "float64")


def check_model(folder: str | Path, step: int | None) -> None:
    """Reject what is neither a run with a checkpoint (of *step*, if one is given) nor an exported folder;
    and a classifier's run.

    Raises:
        UserError: as require_steps and check_folder; a step of an exported folder.
    """
    if is_run(folder):
        newest = require_steps(folder, step)[-1]
        state: dict[str, Any] = {}
        with suppress(UserError):  # a damaged checkpoint is passed over where it is opened
            state = read_json_object(checkpoint_path(Path(folder), newest) / "state.json", "run")
        model = state.get("model")
        if isinstance(model, dict) and model.get("classes") is not None:
            raise UserError(
                f"run: {str(folder)!r} holds a classifier of {quote(model['classes'])} classes, which cannot "
                "be sampled from or scored; give a run of --task language"
            )
        return
    check_folder(folder)
    if step is not None:
        raise UserError(f"step: {step} was given, but {str(folder)!r} is not a run's folder; leave it out")


def check_folder(folder: str | Path) -> FolderModel:
    """What config.json describes, if the weights can be those of such a model. Imports no torch.

    Raises:
        UserError: as read_model and weight_files; far more parameters or layers than the weights have.
    """
    described = read_model(folder)
    tensors, numbers = 0, 0  # at most; an element has one byte at least
    for path in weight_files(folder):
        with _explain_damage(path):
            numbers += (size := path.stat().st_size)
            tensors += len(safe_open(path, "np").keys()) if path.suffix == ".safetensors" else size
    model = described.model
    if model.num_parameters() > numbers or model.num_layers > tensors:
        raise UserError(
            f"model: {Path(folder) / 'config.json'} describes {model.num_parameters():,} parameters in "
            f"{model.num_layers:,} layers, the folder's weights have {numbers:,} bytes; put the model's own "
            "configuration there"
        )
    return described


def weight_files(folder: str | Path) -> list[Path]:
    """The files of weights in *folder*: safetensors, else what torch.save wrote.

    Raises:
        UserError: there are none, or an index names a file elsewhere.
    """
    for kind in KINDS:
        if (whole := Path(folder, kind)).exists():
            return [whole]
        if (path := Path(folder, f"{kind}.index.json")).exists():
            where = f"model: {path}: weight_map"
            index = from_dict(dict[str, str], read_json_object(path, "model").get("weight_map"), where)
            for name in index.values():
                if Path(name).name != name or Path(name).suffix != whole.suffix:
                    raise UserError(
                        f"{where} names {quote(name)}, which is no file of weights in that folder"
                    )
            if index:
                return [Path(folder, name) for name in sorted(set(index.values()))]
    raise UserError(
        f"model: {str(folder)!r} holds no weights; valid: {' or '.join(KINDS)}, whole or in parts"
    )


def read_weights(folder: str | Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of a folder by name, mapped from its files as far as possible.

    Args:
        expected: the shape of each, by name.

    Raises:
        UserError: tensors that are missing, unknown, of another shape or not of floats; as weight_files.
    """
    import torch

    prefix = f"{next(iter(expected)).split('.')[0]}."  # which the model without its LM head does not write
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        for name, tensor in _tensors(path).items():
            full = prefix + name if name not in expected and prefix + name in expected else name
            if not _BUFFERS.fullmatch(name):
                tensors[full] = tensor
    head = None if "lm_head.weight" in expected else tensors.pop("lm_head.weight", None)
    if head is not None:  # tied
        embedding = tensors.get(next(iter(expected)))
        if embedding is None or embedding.shape != head.shape or not torch.equal(embedding, head):
            raise UserError(
                f"model: lm_head.weight in {str(folder)!r} is not the embedding, config.json has "
                "tie_word_embeddings true; write false there"
            )
    for name, shape in expected.items():
        if name not in tensors:
            raise UserError(f"model: {str(folder)!r} lacks {name}")
        tensor = tensors[name]
        dense = tensor.layout is torch.strided and not tensor.is_meta
        dtype = str(tensor.dtype).removeprefix("torch.") if dense else "no dense tensor"
        if tensor.shape != shape or dtype not in _FLOATS:
            raise UserError(
                f"model: {name} in {str(folder)!r} has shape {list(tensor.shape)} ({dtype}), config.json "
                f"wants {list(shape)} ({' or '.join(_FLOATS)})"
            )
    if unknown := tensors.keys() - expected.keys():
        raise UserError(f"model: {str(folder)!r} has {min(unknown)}, which its architecture has not")
    return tensors


def _tensors(path: Path) -> dict[str, Tensor]:
    import torch
    from safetensors.torch import load_file

    with _explain_damage(path):
        if path.suffix == ".safetensors":
            return load_file(path)
        # weights_only: nothing in the file is run.
        found: Any = torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    pairs: Any = found.items() if isinstance(found, dict) else [(None, found)]
    if not all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in pairs):
        raise UserError(f"model: {path} does not hold tensors by name; put the model's own weights there")
    return {name: value.detach() for name, value in pairs}


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Read a file of weights inside: what a library raises for a damaged one is a UserError."""
    try:
        open_regular(path).close()
        yield
    except Exception as error:  # the libraries raise any kind
        reason = (
            getattr(error, "strerror", None) or f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        )
        raise UserError(
            f"model: {path} cannot be loaded ({reason}); put the model's own weights there"
        ) from error
