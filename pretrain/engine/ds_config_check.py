"""Reads and checks a ds_config before torch or DeepSpeed are imported, and reports all its mistakes in one line.

The valid values of each key are in pretrain/engine/ds_config_keys.py. DeepSpeed itself ignores unknown names at the top
level, turns "false" into true, and crashes over most other mistakes after 10 to 20 seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from model.errors import UserError, closest
from pretrain.config.run_config import RunConfig
from pretrain.engine.ds_config_keys import ALIASES, KEYS, Key, Off, Section
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
LISTED = 25
"""The most mistakes that a message lists; further ones are only counted."""
HINT = "; ds_configs/ holds zero1, zero2, zero3, zero2_offload and zero3_offload"
# A parameter of DeepSpeed's optimizers and schedulers -> the run's flag for it.
_FLAGS = {
    "optimizer": {
        "lr": "--optimizer.learning_rate",
        "betas": "--optimizer.betas",
        "eps": "--optimizer.eps",
        "weight_decay": "--optimizer.weight_decay",
    },
    "scheduler": {
        "warmup_max_lr": "--optimizer.learning_rate",
        "warmup_num_steps": "--schedule.warmup",
        "total_num_steps": "--steps",
    },
}
_OWNERS = {"optimizer": "--optimizer.*", "scheduler": "--schedule.*"}


def read_ds_config(path: str, run: RunConfig | None = None) -> dict[str, Any]:
    """Read a ds_config and refuse what this stack does not support.

    Args:
        run: the run that the ds_config must not contradict, as far as can be checked before the ranks meet.

    Returns:
        The ds_config without keys that are off or "auto", except those that merge_ds_config fills in. A key that
        DeepSpeed knows by two names has the current one.

    Raises:
        UserError: the file cannot be read (read_json_object), or it has mistakes, which one message lists.
    """
    config = read_json_object(Path(path), "ds_config", HINT)
    problems = check_ds_config(config, run)
    if problems:
        where = path if path.isprintable() else repr(path)
        raise UserError(f"ds_config: {where}{_listed(problems)}")
    return simplified(config)


def _listed(problems: Problems) -> str:
    texts = problems.texts
    if len(texts) == 1:
        return f": {texts[0]}"
    remainder = f"; and {problems.count - len(texts):,} more" if problems.count > len(texts) else ""
    return (
        f" has {problems.count:,} mistakes: "
        + "; ".join(f"({number}) {text}" for number, text in enumerate(texts, 1))
        + remainder
    )


class Problems:
    """The mistakes in a ds_config; texts are made for the first LISTED only."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.count = 0

    def __bool__(self) -> bool:
        return bool(self.count)

    def add(self, text: str | Callable[[], str]) -> None:
        """Note one mistake; a function is called only if its text will be shown."""
        self.count += 1
        if len(self.texts) < LISTED:
            self.texts.append(text if isinstance(text, str) else text())


def check_ds_config(config: Mapping[str, Any], run: RunConfig | None = None) -> Problems:
    """Find everything in a ds_config that is unknown, out of range, contradictory or not supported."""
    problems = Problems()
    _check_section("", config, Section(KEYS), problems)
    zero = config.get("zero_optimization")
    if "zero_optimization" not in config or (isinstance(zero, dict) and "stage" not in zero):
        problems.add("zero_optimization.stage is missing; valid stages are 1, 2 and 3")
    if isinstance(zero, dict):
        _check_zero(zero, problems)
    for name in ("bf16", "bfloat16"):
        block = config.get(name)
        if isinstance(block, dict) and "enabled" not in block:
            problems.add(f'{name}.enabled is missing; valid are true, false and "auto"')
    if "bf16" in config and "bfloat16" in config:
        problems.add("bfloat16 is the old name of bf16, and both are there; leave bfloat16 out")
    tensorboard = config.get("tensorboard")
    if isinstance(tensorboard, dict) and tensorboard.get("enabled") is True and not find_spec("tensorboard"):
        problems.add(
            "tensorboard.enabled needs the package tensorboard, which is not installed; write false, or use "
            "csv_monitor or --logging.wandb"
        )
    comms = config.get("comms_logger")
    if isinstance(comms, dict) and comms.get("enabled") is True and comms.get("verbose") is not True:
        problems.add("comms_logger.verbose is not true, and its summary is printed nowhere; write true")
    if run is not None:
        _check_run(config, run, problems)
    return problems


def _check_section(name: str, block: Mapping[str, Any], section: Section, problems: Problems) -> None:
    for key, value in block.items():
        known = section.keys.get(key)
        path = _joined(name, key)
        if known is None:
            problems.add(partial(_unknown, key, path, section.keys))
        elif isinstance(known, Key):
            _check_key(path, value, known, problems)
        elif isinstance(known, Off):
            _check_off(path, value, known, problems)
        elif isinstance(value, dict):
            _check_section(path, value, known, problems)
        elif not (value is None and known.null):
            problems.add(f"{path} is {shown_json(value)}; it must be a JSON object" + " or null" * known.null)


def _check_key(path: str, value: Any, key: Key, problems: Problems) -> None:
    if (value == "auto" and path != "zero_optimization.stage") or (value is None and key.null):
        return
    if not key.kind.accepts(value):
        if path == "zero_optimization.stage":
            problems.add(f"{path} is {shown_json(value)}; valid stages are {key.kind.valid}")
            return
        problems.add(
            f"{path} is {shown_json(value)}; valid is {key.kind.valid}" + " or null" * key.null + ' or "auto"'
        )
    elif key.only is not None and value not in key.only:
        problems.add(f"{path} is {shown_json(value)}; {key.instead}")


def _check_off(path: str, value: Any, off: Off, problems: Problems) -> None:
    if not isinstance(value, dict):
        if off.names in ("", "*"):  # not a block, now or in an earlier DeepSpeed
            if _switches_on(value):
                problems.add(f"{path} is {shown_json(value)}; {off.instead}")
            return
        if not (value is None and off.switch == "" and path.startswith("zero_optimization.")):
            problems.add(f"{path} is {shown_json(value)}; it must be a JSON object")
        return
    names = off.names.split()
    for key in value:
        if off.names != "*" and key not in names:
            problems.add(partial(_unknown, key, _joined(path, key), names))
    if path in _OWNERS:
        problems.add(_owned_block(path, value))
    elif off.switch in value or (off.switch and off.names != "*"):
        on = value.get(off.switch, False)
        if on is not False and on != "auto" and not (off.switch == "autotp_size" and on in (0, 1)):
            problems.add(
                f"enables {path}{'' if on is True else f' ({off.switch} is {shown_json(on)})'}; {off.instead}"
            )
    elif switched_on := [
        key for key in value if _switches_on(value[key]) and (off.names == "*" or key in names)
    ]:
        what = f"{_joined('', switched_on[0])} is {shown_json(value[switched_on[0]])}"
        problems.add(f"has a {path!r} block ({what}); {off.instead}")


def _switches_on(value: Any) -> bool:
    """Whether a value in an unsupported block switches something on."""
    return value != "auto" and bool(value)


def _owned_block(name: str, block: Mapping[str, Any]) -> str:
    """The message about an optimizer or scheduler block: the flags to write instead, with the block's values."""
    params = block.get("params")
    flags = _FLAGS[name]
    values = params if isinstance(params, dict) else {}
    written = [
        f"{flag} {_flag_value(values[key])}" for key, flag in flags.items() if _numeric(values.get(key))
    ]
    return (
        f"has a {name!r} block, but the run's {_OWNERS[name]} settings own that; leave it out and write "
        + (" ".join(written) if written else f"{_OWNERS[name]} flags or the recipe")
    )


def _numeric(value: Any) -> bool:
    """Whether a value can be written in a command unchanged: a number or a list of two."""
    if isinstance(value, list):
        return len(value) == 2 and all(_numeric(item) and not isinstance(item, list) for item in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flag_value(value: Any) -> str:
    return shown_json(value).replace(" ", "")


def _unknown(key: str, path: str, names: Any) -> str:
    valid_paths = [
        f"{block_path}.{key}" if block_path else key
        for block_path, keys in _blocks_by_path().items()
        if key in keys
    ]
    hint = closest(key, names)
    if valid_paths:
        hint = f"; did you mean {valid_paths[0]!r}?"
    return f"{path} is unknown to DeepSpeed{hint}"


def _blocks_by_path() -> dict[str, dict[str, Any]]:
    """Blocks whose keys users write one level too high or too low, by path."""
    zero = KEYS["zero_optimization"]
    assert isinstance(zero, Section)
    return {"": KEYS, "zero_optimization": zero.keys}


def _joined(path: str, key: str) -> str:
    key = key if key.isidentifier() and key.isascii() and len(key) <= 80 else shown_json(key)
    return f"{path}.{key}" if path else key


def _check_zero(zero: Mapping[str, Any], problems: Problems) -> None:
    stage = zero.get("stage")
    offload = zero.get("offload_param")
    if stage in (1, 2) and isinstance(offload, dict) and offload.get("device") == "cpu":
        problems.add(
            f"zero_optimization.offload_param is for stage 3, and the stage is {stage}; leave it out, or use "
            "ds_configs/zero3_offload.json"
        )
    for other, name in ALIASES.items():
        if other in zero and name in zero:
            problems.add(f"zero_optimization.{other} and {name} are the same; leave {other} out")


def _check_run(config: Mapping[str, Any], run: RunConfig, problems: Problems) -> None:
    """Check what can be compared with the run before the number of ranks and the micro-batch are known."""
    known = {"gradient_clipping": (run.optimizer.gradient_clipping, "optimizer.gradient_clipping")}
    if run.micro_batch is not None:
        known["train_micro_batch_size_per_gpu"] = (run.micro_batch, "micro_batch")
    for key, (value, owner) in known.items():
        configured = config.get(key, "auto")
        if _valid(key, configured) and configured not in ("auto", value):
            problems.add(contradiction(key, configured, value, owner))
    for name in ("bf16", "bfloat16"):
        block = config.get(name)
        enabled = block.get("enabled") if isinstance(block, dict) else None
        if isinstance(enabled, bool) and run.precision != "auto" and enabled != (run.precision == "bf16"):
            problems.add(
                f'{name}.enabled is {shown_json(enabled)}, but the run\'s precision is {run.precision}; write "auto"'
            )
    zero = config.get("zero_optimization")
    if run.compile is True and isinstance(zero, dict) and zero.get("stage") == 3:
        problems.add("zero_optimization.stage is 3, where compile: true is not valid; use stage 1 or 2")
    if run.fused == "all" and isinstance(zero, dict) and zero.get("stage") == 3:
        problems.add("zero_optimization.stage is 3, where fused: all is not valid; give --fused loss or none")


def _valid(name: str, value: Any) -> bool:
    key = KEYS[name]
    return isinstance(key, Key) and key.kind.accepts(value)


def contradiction(key: str, found: Any, value: Any, owner: str) -> str:
    """The message about a ds_config value *found* that differs from the run's *value*."""
    return f'{key} is {shown_json(found)}, but the run\'s {owner} makes it {value}; write "auto"'


def simplified(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what is off, null or "auto" from a checked ds_config, except what merge_ds_config fills in."""
    renamed = {"bf16" if key == "bfloat16" else key: value for key, value in config.items()}
    return _simplified(renamed, Section(KEYS), "")


def _simplified(block: Mapping[str, Any], section: Section, path: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in block.items():
        known = section.keys[key]
        name = ALIASES.get(key, key) if path == "zero_optimization" else key
        if path == "zero_optimization" and key.startswith("cpu_offload"):
            continue  # false, but beside offload_optimizer DeepSpeed refuses even that
        if isinstance(known, Section) and value is not None:
            result[key] = _simplified(value, known, key)
        elif isinstance(known, Key) and (
            (value is not None and value != "auto")
            or key in OWNED
            or (path, key) == ("bf16", "enabled")
            or (path == "zero_optimization" and value == "auto" and name in BUCKETS)
        ):
            result[name] = value
    return result
