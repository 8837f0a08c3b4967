"""Reads a ds_config and checks it, and reports all its mistakes in one line.

``read_ds_config`` says within a second what is wrong with its own settings and those that DeepSpeed has no
class for; ``check_with_deepspeed`` says the rest from DeepSpeed's classes, whose import takes seconds.
DeepSpeed itself ignores unknown names at the top level, turns "false" into true, and crashes over other
mistakes after the ranks have met.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from model.declared import valid_in_words
from model.errors import UserError, closest, shown
from pretrain.config.run_config import RunConfig
from pretrain.engine.ds_config_schema import DS_CONFIG, REFUSED, deepspeed_sections, setting_paths
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
_STAGE_3_NAMES = """
    allgather_sequential gather_16bit_weights_on_model_save max_live_parameters max_reuse_distance
    model_persistence_threshold module_granularity_threshold param_persistence_threshold prefetch_bucket_size
    use_all_reduce_for_fetch_params
"""
STAGE_3 = _STAGE_3_NAMES.split()
"""Settings of zero_optimization that DeepSpeed also accepts without their ``stage3_``."""
CURRENT_NAMES = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    **{f"zero_optimization.{name}": f"stage3_{name}" for name in STAGE_3},
}
LISTED = 25
"""The most mistakes that a message lists; further ones are only counted."""
HINT = "; ds_configs/ holds zero1, zero2, zero3, zero2_offload and zero3_offload"


def read_ds_config(path: str, run: RunConfig | None = None) -> dict[str, Any]:
    """Read a ds_config and refuse what this stack does not support. Nothing heavy is imported.

    Args:
        run: the run that the ds_config must not contradict, as far as can be checked before the ranks meet.

    Returns:
        The ds_config without keys that are off or "auto", except those that merge_ds_config fills in. A key
        that DeepSpeed knows by two names has the current one.

    Raises:
        UserError: the file cannot be read (read_json_object), or it has mistakes, which one message lists.
    """
    config = read_json_object(Path(path), "ds_config", HINT)
    _refuse(path, check_ds_config(config, run))
    return simplified(config)


def check_with_deepspeed(path: str, config: Mapping[str, Any]) -> None:
    """Check names, types and ranges in the blocks that DeepSpeed has classes for. Imports DeepSpeed.

    Args:
        path: the file, for messages.
        config: what read_ds_config returned.

    Raises:
        UserError: one message lists all mistakes.
    """
    _refuse(path, check_sections(config))


def _refuse(path: str, mistakes: list[str]) -> None:
    if not mistakes:
        return
    where = f"ds_config: {path if path.isprintable() else repr(path)}"
    if len(mistakes) == 1:
        raise UserError(f"{where}: {mistakes[0]}")
    listed = "; ".join(f"({number}) {text}" for number, text in enumerate(mistakes[:LISTED], 1))
    more = f"; and {len(mistakes) - LISTED:,} more" if len(mistakes) > LISTED else ""
    raise UserError(f"{where} has {len(mistakes):,} mistakes: {listed}{more}")


def check_ds_config(config: Mapping[str, Any], run: RunConfig | None = None) -> list[str]:
    """List everything in a ds_config that is unknown, out of range, contradictory or not supported.

    Of the blocks that DeepSpeed has classes for only what is stricter here; check_sections checks the rest.
    """
    mistakes = [
        f"{old} and {CURRENT_NAMES[old]} are the same; leave {old.rpartition('.')[2]} out"
        for old in CURRENT_NAMES
        if _value(config, old) is not None and _value(config, _current(old)) is not None
    ]
    config = _with_current_names(config)
    given = _given(config, kept={"zero_optimization.stage"})
    mistakes += _mistakes(DS_CONFIG, {"zero_optimization": {}} | given)
    if isinstance(given.get("bf16"), dict) and _value(config, "bf16.enabled") is None:
        mistakes.append('bf16.enabled is missing; give true, false or "auto"')
    zero = given.get("zero_optimization")
    stage = _value(given, "zero_optimization.stage")
    if stage in (1, 2) and _value(given, "zero_optimization.offload_param.device") == "cpu":
        mistakes.append(
            f"zero_optimization.offload_param is for stage 3, and the stage is {stage}; leave it out, or use "
            "ds_configs/zero3_offload.json"
        )
    if _value(given, "tensorboard.enabled") is True and not find_spec("tensorboard"):
        mistakes.append(
            "tensorboard.enabled needs the package tensorboard, which is not installed; write false, or use "
            "csv_monitor or --logging.wandb"
        )
    if _value(given, "comms_logger.enabled") is True and _value(given, "comms_logger.verbose") is not True:
        mistakes.append("comms_logger.verbose is not true, and its summary is printed nowhere; write true")
    return mistakes + (_contradictions(given, run) if run is not None and isinstance(zero, dict) else [])


def check_sections(config: Mapping[str, Any]) -> list[str]:
    """List the mistakes that DeepSpeed's classes find in what read_ds_config returned. Imports DeepSpeed."""
    sections = deepspeed_sections()
    given = _given(config)
    return _mistakes(sections, {name: given[name] for name in sections.model_fields if name in given})


def _mistakes(kind: type[BaseModel], given: Mapping[str, Any]) -> list[str]:
    try:
        # As JSON, in which a name may stand for the member of an enumeration.
        kind.model_validate_json(json.dumps(given))
    except ValidationError as error:
        paths = [*setting_paths(kind), *(setting_paths(DS_CONFIG) if kind is not DS_CONFIG else ())]
        # Hints take milliseconds each, and only the first mistakes are listed.
        return [
            _line(found, paths if index < LISTED else [])
            for index, found in enumerate(error.errors(include_url=False))
        ]
    return []


def _line(error: Any, paths: list[str]) -> str:
    path = ".".join(shown(part, plain=True) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        return f"{path or 'the file'} is {shown_json(error['input'])}; {valid_in_words(error)}"
    elsewhere = [known for known in paths if known.rpartition(".")[2] == error["loc"][-1]]
    return f"{path} is unknown to DeepSpeed{closest(path, elsewhere or paths)}"


def _contradictions(given: Mapping[str, Any], run: RunConfig) -> list[str]:
    """What can be compared with the run before the number of ranks and the micro-batch are known."""
    mistakes = []
    known = {"gradient_clipping": (run.optimizer.gradient_clipping, "optimizer.gradient_clipping")}
    if run.micro_batch is not None:
        known["train_micro_batch_size_per_gpu"] = (run.micro_batch, "micro_batch")
    for key, (value, owner) in known.items():
        if type(given.get(key)) in (int, float) and given[key] != value:
            mistakes.append(contradiction(key, given[key], value, owner))
    enabled = _value(given, "bf16.enabled")
    if isinstance(enabled, bool) and run.precision != "auto" and enabled != (run.precision == "bf16"):
        mistakes.append(
            f"bf16.enabled is {shown_json(enabled)}, but the run's precision is {run.precision}; "
            'write "auto"'
        )
    if _value(given, "zero_optimization.stage") == 3:
        mistakes += [f"zero_optimization.stage is 3: {text}" for text in not_at_stage_3(run)]
    return mistakes


def not_at_stage_3(run: RunConfig) -> list[str]:
    """What a run asks for that ZeRO stage 3 cannot do: its hooks split a compiled block into dozens of
    frames, and it gathers weights layer by layer."""
    asked = {
        "compile: true is not valid at ZeRO stage 3; use stage 1 or 2, or leave it out": run.compile is True,
        "fused: all is not valid at ZeRO stage 3; give --fused loss or none": run.fused == "all",
    }
    return [text for text, given in asked.items() if given]


def contradiction(key: str, found: Any, value: Any, owner: str) -> str:
    """The message about a ds_config value *found* that differs from the run's *value*."""
    return f'{key} is {shown_json(found)}, but the run\'s {owner} makes it {value}; write "auto"'


def simplified(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what is off, null or "auto" from a checked ds_config, except what merge_ds_config fills in."""
    return _given(_with_current_names(config), kept=AUTOMATIC, dropped=REFUSED)


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


def _with_current_names(config: Mapping[str, Any]) -> dict[str, Any]:
    result = _renamed(config, "")
    if isinstance(zero := result.get("zero_optimization"), dict):
        result["zero_optimization"] = _renamed(zero, "zero_optimization.")
    return result


def _renamed(block: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {CURRENT_NAMES.get(f"{prefix}{key}", key): value for key, value in block.items()}


def _current(path: str) -> str:
    block = path.rpartition(".")[0]
    return f"{block}.{CURRENT_NAMES[path]}" if block else CURRENT_NAMES[path]


def _value(config: Mapping[str, Any], path: str) -> Any:
    """The value at a path such as zero_optimization.stage; None where there is none."""
    value: Any = config
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
