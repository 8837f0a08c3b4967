"""A ds_config is read and checked here, before torch or DeepSpeed are imported: everything wrong, in one line.

What a key may hold stands in pretrain/engine/ds_config_keys.py. DeepSpeed itself ignores names that it does not know at
the top level, turns "false" into true, and crashes over much of the rest after 10 to 20 seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from model.errors import UserError, closest
from model.parsing import read_json_object, shown_json
from pretrain.config.run_config import RunConfig
from pretrain.engine.ds_config_keys import ALIASES, KEYS, Key, Off, Section

OWNED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
"""What the run says; "auto" stays there until merge_ds_config puts the run's value in."""
LISTED = 25
"""Mistakes that are listed; the rest is counted."""
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
    """Read a ds_config and refuse what this stack cannot honour.

    Args:
        run: what the ds_config must not contradict, as far as that can be told before the ranks meet.

    Returns:
        The ds_config without what is off or "auto" there, except what merge_ds_config fills in; with the present name
        of a key that DeepSpeed knows by two.

    Raises:
        UserError: the file cannot be read (read_json_object), or the one list of all that is wrong in it.
    """
    config = read_json_object(Path(path), "ds_config", HINT)
    problems = check_ds_config(config, run)
    if problems:
        where = path if path.isprintable() else repr(path)
        raise UserError(f"ds_config: {where}{_listed(problems)}")
    return simplified(config)


def _listed(problems: Problems) -> str:
    found = problems.texts
    if len(found) == 1:
        return f": {found[0]}"
    rest = f"; and {problems.count - len(found):,} more" if problems.count > len(found) else ""
    return (
        f" has {problems.count:,} mistakes: "
        + "; ".join(f"({number}) {text}" for number, text in enumerate(found, 1))
        + rest
    )


class Problems:
    """What is wrong with a ds_config; texts are made for the first LISTED only."""

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
    """Find everything in a ds_config that is unknown, out of range, contradictory or not honoured."""
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
        if off.names in ("", "*"):  # it was, or is, no block
            if _asks(value):
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
    elif asking := [key for key in value if _asks(value[key]) and (off.names == "*" or key in names)]:
        what = f"{_joined('', asking[0])} is {shown_json(value[asking[0]])}"
        problems.add(f"has a {path!r} block ({what}); {off.instead}")


def _asks(value: Any) -> bool:
    """Whether a value in a block that is not honoured asks for something."""
    return value != "auto" and bool(value)


def _owned_block(name: str, block: Mapping[str, Any]) -> str:
    """What to write instead of an optimizer or scheduler block, with its own values."""
    params = block.get("params")
    flags = _FLAGS[name]
    given = params if isinstance(params, dict) else {}
    written = [f"{flag} {_flag_value(given[key])}" for key, flag in flags.items() if _numeric(given.get(key))]
    return (
        f"has a {name!r} block, but the run's {_OWNERS[name]} settings own that; leave it out and write "
        + (" ".join(written) if written else f"{_OWNERS[name]} flags or the recipe")
    )


def _numeric(value: Any) -> bool:
    """Whether a value can stand in a command as it is: a number or a list of two."""
    if isinstance(value, list):
        return len(value) == 2 and all(_numeric(item) and not isinstance(item, list) for item in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flag_value(value: Any) -> str:
    return shown_json(value).replace(" ", "")


def _unknown(key: str, path: str, names: Any) -> str:
    homes = [f"{where}.{key}" if where else key for where, keys in _homes().items() if key in keys]
    near = closest(key, names)
    if homes:
        near = f"; did you mean {homes[0]!r}?"
    return f"{path} is unknown to DeepSpeed{near}"


def _homes() -> dict[str, dict[str, Any]]:
    """Blocks whose keys are found one level too high or too low."""
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
    """What can be compared with the run before the number of ranks and the micro-batch are known."""
    known = {"gradient_clipping": (run.optimizer.gradient_clipping, "optimizer.gradient_clipping")}
    if run.micro_batch is not None:
        known["train_micro_batch_size_per_gpu"] = (run.micro_batch, "micro_batch")
    for key, (value, owner) in known.items():
        found = config.get(key, "auto")
        if _valid(key, found) and found not in ("auto", value):
            problems.add(contradiction(key, found, value, owner))
    for name in ("bf16", "bfloat16"):
        block = config.get(name)
        enabled = block.get("enabled") if isinstance(block, dict) else None
        if isinstance(enabled, bool) and run.precision != "auto" and enabled != (run.precision == "bf16"):
            problems.add(
                f'{name}.enabled is {shown_json(enabled)}, but the run\'s precision is {run.precision}; write "auto"'
            )
    zero = config.get("zero_optimization")
    if run.compile and isinstance(zero, dict) and zero.get("stage") == 3:
        problems.add("zero_optimization.stage is 3, where compile: true is not valid; use stage 1 or 2")


def _valid(name: str, value: Any) -> bool:
    key = KEYS[name]
    return isinstance(key, Key) and key.kind.accepts(value)


def contradiction(key: str, found: Any, value: Any, owner: str) -> str:
    """The text for a value that the run owns and that the ds_config says otherwise."""
    return f'{key} is {shown_json(found)}, but the run\'s {owner} makes it {value}; write "auto"'


def simplified(config: Mapping[str, Any]) -> dict[str, Any]:
    """A checked ds_config without what is off, null or "auto", except what merge_ds_config fills in."""
    renamed = {"bf16" if key == "bfloat16" else key: value for key, value in config.items()}
    return _simplified(renamed, Section(KEYS), "")


def _simplified(block: Mapping[str, Any], section: Section, path: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in block.items():
        known = section.keys[key]
        if path == "zero_optimization" and key.startswith("cpu_offload"):
            continue  # false, but beside offload_optimizer DeepSpeed refuses even that
        if isinstance(known, Section) and value is not None:
            kept[key] = _simplified(value, known, key)
        elif isinstance(known, Key) and (
            (value is not None and value != "auto") or key in OWNED or (path, key) == ("bf16", "enabled")
        ):
            kept[ALIASES.get(key, key) if path == "zero_optimization" else key] = value
    return kept
