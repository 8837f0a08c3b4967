"""Reads a ds_config and checks it, and reports all its mistakes in one line.

DeepSpeed itself ignores unknown names at the top level, turns "false" into true, and crashes over other
mistakes after the ranks have met.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from model.declared import valid_in_words
from model.errors import UserError, closest, shown
from pretrain.engine.ds_config_schema import REFUSED, ds_config_class, setting_paths
from pretrain.engine.quiet import quiet_deepspeed
from pretrain.utils.parsing import read_json_object, shown_json

OWNED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
"""Keys whose value the run decides; "auto" stays in them until merge_ds_config fills in the run's value."""
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
"""Keys of zero_optimization in which "auto" stays until it is filled in from the model's shapes."""
AUTOMATIC = {*OWNED, "bf16.enabled", *(f"zero_optimization.{key}" for key in BUCKETS)}
LISTED = 25
"""The most mistakes that a message lists: hints at names take milliseconds each."""
HINT = "; by their names alone: zero1, zero2, zero3, zero2_offload and zero3_offload"


def read_ds_config(path: str) -> dict[str, Any]:
    """Read a ds_config and refuse what this stack does not support. Imports DeepSpeed.

    Returns:
        The ds_config without keys that are off or "auto", except those that merge_ds_config fills in.

    Raises:
        UserError: the file cannot be read (read_json_object), or it has mistakes, which one message lists.
    """
    config = read_json_object(Path(path), "ds_config", HINT)
    if mistakes := check_ds_config(config):
        raise UserError(f"ds_config: {shown(path, plain=True)}: {'; '.join(mistakes)}")
    return simplified(config)


def check_ds_config(config: Mapping[str, Any]) -> list[str]:
    """List what is unknown, out of range or not supported in a ds_config, LISTED mistakes at most."""
    quiet_deepspeed()
    kind = ds_config_class()
    given = _given(config, kept={"zero_optimization.stage", "bf16.enabled"})
    zero = given.setdefault("zero_optimization", {})
    mistakes = []
    try:
        # As JSON, in which a name may stand for the member of an enumeration.
        kind.model_validate_json(json.dumps(given))
    except ValidationError as error:
        paths = setting_paths(kind)
        mistakes = [_line(found, paths) for found in error.errors(include_url=False)[:LISTED]]
    offloaded = isinstance(zero, dict) and isinstance(zero.get("offload_param"), dict)
    if offloaded and zero["offload_param"].get("device") == "cpu" and zero.get("stage") in (1, 2):
        mistakes.append(
            f"zero_optimization.offload_param is for stage 3, and the stage is {zero['stage']}; leave it "
            "out, or use ds_configs/zero3_offload.json"
        )
    return mistakes


def _line(error: Any, paths: list[str]) -> str:
    path = ".".join(shown(part, plain=True) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        return f"{path or 'the file'} is {shown_json(error['input'])}; {valid_in_words(error)}"
    name = {"bfloat16": "bf16"}.get(path, error["loc"][-1])
    elsewhere = [known for known in paths if known.rpartition(".")[2] == name]
    hint = f"; did you mean {elsewhere[0]!r}?" if len(elsewhere) == 1 else closest(path, paths)
    return f"{path} is unknown{hint}"


def simplified(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what is off, null or "auto" from a checked ds_config, except what merge_ds_config fills in."""
    return _given(config, kept=AUTOMATIC, dropped=REFUSED)


def _given(
    block: Mapping[str, Any], kept: Container[str] = (), dropped: Container[str] = (), prefix: str = ""
) -> dict[str, Any]:
    """A block without null and "auto", which mean off or DeepSpeed's default.

    Args:
        kept: settings whose "auto" stays.
        dropped: settings to leave out. What REFUSED names stays as it is otherwise.
    """
    result = {}
    for key, value in block.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in REFUSED:
            value = _given(value, kept, dropped, f"{path}.")
        if value is not None and path not in dropped and (value != "auto" or path in kept):
            result[key] = value
    return result
