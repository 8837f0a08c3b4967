"""Opens an exported folder: reads safetensors unless told otherwise, and never runs its code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from model.errors import UserError
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.hf.tokenizer_files import ORIGINAL_FOLDER
from pretrain.utils.parsing import read_json_object

SUPPORTED = ("head_schedule", "llama", "gpt2")


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read config.json of an exported folder.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        problem = "has no config.json" if Path(folder).is_dir() else "does not exist"
        raise UserError(
            f"model: {str(folder)!r} {problem}; give an exported folder or a run's folder, such as runs/NAME"
        )
    config = read_json_object(path, "model")
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"model: {path} does not say its model_type; it is not a model of transformers")
    return config


def load_exported(
    folder: str | Path, dtype: torch.dtype | str = "auto", *, safetensors_only: bool = True
) -> Any:
    """Load the transformers model in *folder*, in evaluation mode on the CPU.

    Without *safetensors_only* it may also be a pytorch_model.bin, of which torch reads nothing but tensors.

    Folders of the native format run this package's own architecture, not the copy that lies in them: what is in a
    folder may come from anywhere.

    Raises:
        UserError: no model, an architecture that needs code from the folder, weights that are not safetensors.
    """
    config = read_config(folder)
    safetensors = True if safetensors_only else None  # None takes either kind of file
    network: Any
    try:
        if config["model_type"] == "head_schedule":
            from pretrain.hf.modeling_head_schedule import HeadScheduleForCausalLM

            network = HeadScheduleForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=safetensors
            )
        elif "auto_map" in config:
            raise UserError(
                f"model: {str(folder)!r} needs code of its own ({config['model_type']}), which is not run; valid: "
                "folders written by pretrain.convert, and architectures that transformers has"
            )
        else:
            from transformers import AutoModelForCausalLM

            network = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=safetensors, trust_remote_code=False
            )
    except UserError:
        raise
    except Exception as error:  # the library raises any kind for a damaged folder
        reason = " ".join(str(error).split())
        raise UserError(
            f"model: {str(folder)!r} cannot be loaded ({type(error).__name__}: {reason:.200})"
        ) from error
    return network.eval()


def exported_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of an exported folder: the run's own files if they are there, else tokenizer.json.

    Raises:
        UserError: there is none, or it is damaged.
    """
    original = Path(folder) / ORIGINAL_FOLDER
    return load_tokenizer(original if original.is_dir() else Path(folder))
