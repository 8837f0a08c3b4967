"""ds_configs as people and chance write them: those of the libraries' documentation, and hypothesis
strategies."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from pretrain.engine.ds_config_check import NOT_SUPPORTED, OWNED, check_ds_config, supported_keys

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]


def shipped(name: str = "zero2") -> dict[str, Any]:
    """A shipped ds_config."""
    config: dict[str, Any] = json.loads((ROOT / f"ds_configs/{name}.json").read_text())
    return config


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of *config* with *changes* written into it, blocks key by key."""
    result = copy.deepcopy(config)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


# https://huggingface.co/docs/transformers/deepspeed, ZeRO stage 3 (optimizer and scheduler left as there).
HUGGING_FACE = json.loads("""{
  "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
           "hysteresis": 2, "min_loss_scale": 1},
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "cpu", "pin_memory": true}, "overlap_comm": true,
    "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": true},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
}""")


@functools.cache
def setting_names() -> list[tuple[str, ...]]:
    """The paths of all settings that are known."""
    return [tuple(path.split(".")) for path in sorted([*supported_keys(), *NOT_SUPPORTED])]


VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, -1, 4, 7, 50, 1000, 10**6, 10**7, 10**9, 2**33, 10**20),
    *(5e8, 1e14, 0.5, 1.0, -0.5, 1e-320, float("nan"), float("inf")),
    *("auto", "", "true", "false", "cpu", "none", "nvme", "fp32", "bf16", "fp16", "int8", "sum", "mean"),
    *("info", "Warn", "5e8", "a\nb", "\0", "\ud800"),
    *([], ["a"], [1], [[]], {}, {"enabled": True}, {"a": {}}, {"device": "cpu"}),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def _placed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        block = config.get(name)
        if not isinstance(block, dict):
            block = config[name] = {}
        config = block
    config[path[-1]] = copy.deepcopy(value)


@st.composite
def ds_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A shipped ds_config with one to five edits: any value at a known key, an unknown key anywhere, a key
    dropped."""
    config = shipped(draw(st.sampled_from(SHIPPED)))
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.integers(0, 9))
        if kind < 6:
            _placed(config, draw(st.sampled_from(setting_names())), draw(st.sampled_from(VALUES) | JSON))
        elif kind < 8:
            path = draw(st.sampled_from(setting_names()))
            name = draw(st.sampled_from([path[-1], path[-1][:-2] + path[-1][-1:]]) | st.text(max_size=10))
            inside = draw(st.sampled_from(setting_names()))[:-1]
            _placed(config, (*inside, name), draw(st.sampled_from(VALUES) | JSON))
        elif config:
            config.pop(draw(st.sampled_from(sorted(config))), None)
    return config


# memory_breakdown collects the garbage dozens of times a step. Where the optimizer is, the shipped ds_config
# says.
LEFT_OUT = [
    *((name,) for name in OWNED),
    ("zero_optimization", "stage"),
    ("memory_breakdown",),
    ("zero_optimization", "offload_optimizer", "device"),
]


@functools.cache
def _taken() -> list[tuple[tuple[str, ...], list[Any]]]:
    """The values that are valid for each setting, in a ds_config of stage 3."""
    base = shipped("zero3")

    def is_taken(path: tuple[str, ...], value: Any) -> bool:
        config = copy.deepcopy(base)
        _placed(config, path, value)
        return not check_ds_config(config)

    def is_plain(value: Any) -> bool:
        allocated = not isinstance(value, int | float) or value <= 10**10
        return not isinstance(value, dict) and str(value).isprintable() and allocated

    plain = [value for value in VALUES if is_plain(value)]
    taken = [(path, [value for value in plain if is_taken(path, value)]) for path in setting_names()]
    return [(path, values) for path, values in taken if values and path not in LEFT_OUT]


@st.composite
def accepted_ds_configs(draw: st.DrawFn, offload: bool = False) -> dict[str, Any]:
    """A shipped ds_config with two to twelve edits that each are valid by themselves.

    offload: those with an offloaded optimizer too, which is compiled at its first use.
    """
    config = shipped(draw(st.sampled_from(SHIPPED if offload else ["zero1", "zero2", "zero3"])))
    for path, values in draw(st.lists(st.sampled_from(_taken()), min_size=2, max_size=12)):
        _placed(config, path, draw(st.sampled_from(values)))
    config.pop("tensorboard", None)  # its package is not installed
    if config["zero_optimization"]["stage"] < 3:
        config["zero_optimization"].pop("offload_param", None)
    if isinstance(config.get("bf16"), dict) and config["bf16"].get("enabled") is None:
        config["bf16"]["enabled"] = False
    return config
