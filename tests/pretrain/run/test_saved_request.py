"""A request that was saved equals the one that was asked: no setting of a continued run is called changed
that was not, and each that was is named."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from pathlib import Path

import pytest

from model.config import ModelConfig
from pretrain.checkpoint.state import TrainingState, read_state
from pretrain.config.command_line import parse_command_line
from pretrain.config.run_config import NUM_LAYERS, RunConfig
from pretrain.config.sources import SETTINGS, diff_settings, flatten, make_run
from pretrain.run.resume import SILENT, check_resume, describe_rate_change

ROPE = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0}
RULES = [
    "upper_qk",
    {"name": "a", "parameters": ["q", "k"], "layers": [0, "2-3"], "scale": 0.25, "hold": 0.04, "ramp": 3},
    {"name": "b", "parameters": ["v"], "scale": 2, "release": "maturity", "latest": 20},
]
MUON = {"optimizer.kind": "muon"}
# Settings whose other value does not follow from their type, with what else they need.
OTHERS: dict[str, dict[str, typing.Any]] = {
    "heads": {"heads": [8, 8, 4, 2]},
    "optimizer.betas": {"optimizer.betas": [0, 0.5]},
    **{f"muon.{name}": MUON for name in ("heads", "scale", "momentum", "nesterov", "learning_rate")},
    "muon.learning_rate": MUON | {"muon.learning_rate": 1},
    "growth.criterion": {"growth.criterion": "random"},
    "growth.schedule": {
        "growth.criterion": "schedule",
        "growth.start": 2,
        "growth.schedule": {"020": [2, 2, 4, 4], 40: "4x4", 1e2: "8x4"},
    },
    "lr_rules": {"lr_rules": RULES},
    "hooks": {"hooks": "a:B, c.d:E"},
    "profile": {"profile": "10:12"},
}
ARCHITECTURE: dict[str, typing.Any] = {
    "context_length": 128,
    "d_model": 64,
    "ffn_width": [64, 0, 128, 64],
    "block_width": "32x2,64,128",
    "kv_heads": "1x4",
    "head_dim": [16, 16, 8, 8],
    "ffn": "mlp",
    "activation": "gelu",
    "norm": "layernorm",
    "norm_eps": 1,
    "norm_bias": True,
    "attention_bias": "output",
    "ffn_bias": True,
    "positions": "learned",
    "rope_base": [100, None, 1e4, 500],
    "rotary_share": [1, 0.5, 1.0, 0.25],
    "rope_scaling": ROPE | {"original_context_length": 64},
    "qk_norm": "weighted",
    "attention_scale": "none",
    "attention_scale_base": 16,
    "attention_gate": "head",
    "logit_softcap": 30,
    "z_loss": 1e-4,
    "local_window": "null,8,null,64",
    "tie_embeddings": False,
    "init_std": 1,
    "parametrization": "mup",
    "base_width": 32,
    NUM_LAYERS: 6,
}
FROM_DATA = {"vocab_size", "classes", "heads"}


def other_value(kind: typing.Any, default: typing.Any) -> typing.Any:
    """A value of a setting that is not its default."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return next(option for option in options if option != default)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return other_value(options[0], default)
    if kind in (bool, str):
        return "x" if kind is str else not default
    return (default or 0) + 1 if kind is int else (default or 1) / 2


def cases() -> dict[str, dict[str, typing.Any]]:
    """Every setting, and each field of architecture: what asks for a value other than the default."""
    found = {}
    for name, item in SETTINGS.items():
        section, _, field = name.rpartition(".")
        of_class = SETTINGS_OF[section]
        needed = OTHERS.get(name, {})
        kind = typing.get_type_hints(of_class)[field]
        if name == "architecture" or name in needed:
            found[name] = needed
        else:
            found[name] = needed | {name: other_value(kind, item.default)}
    del found["architecture"]
    for name, value in ARCHITECTURE.items():
        found[f"architecture.{name}"] = {f"architecture.{name}": value}
    return found


SETTINGS_OF = {"": RunConfig} | {
    item.name: item.default_factory
    for item in dataclasses.fields(RunConfig)
    if dataclasses.is_dataclass(item.default_factory)
}
CASES = cases()


def saved_and_read(folder: Path, run: RunConfig) -> TrainingState:
    """The state of a checkpoint of *run*, as the next session reads it."""
    model = make_run({}).build_model_config().to_json()  # of another test: test_config.py
    (folder / "state.json").write_text(TrainingState(step=3, model=model, run=run.to_dict()).to_json())
    return read_state(folder)


def test_every_field_of_the_model_is_here():
    fields = {item.name for item in dataclasses.fields(ModelConfig)}
    assert set(ARCHITECTURE) == fields - FROM_DATA | {NUM_LAYERS}


@pytest.mark.parametrize("name", CASES)
def test_a_saved_setting_equals_the_one_that_was_asked(tmp_path, name):
    run, default = make_run(flatten(CASES[name])), make_run({})
    saved = saved_and_read(tmp_path, run)
    model = default.build_model_config()
    state = TrainingState(model=saved.model, run=run.to_dict())
    assert not [note for note in check_resume(saved, state, run, model) if " changed: " in note]
    assert {*diff_settings(run, default)} == {*flatten(CASES[name])} >= {name}
    if name.split(".")[0] not in SILENT and name not in ("document_mask", "optimizer.decay_embeddings"):
        changed = dataclasses.replace(default, optimizer=dataclasses.replace(default.optimizer, reset=True))
        notes = check_resume(saved, state, changed, model)
        assert [note for note in notes if note.startswith(f"{name} changed: ")] or name == "optimizer.reset"


def test_a_longer_run_names_the_change_of_its_learning_rate():
    """A cosine to a tenth of its peak, of twice as many steps: about 0.1 + 0.9 / 2 of the peak."""
    flags = "--config micro --schedule.warmup 0 --schedule.minimum 0.1 --optimizer.learning_rate 1e-3"
    short, long = (parse_command_line([*flags.split(), "--steps", steps]).run for steps in ("1000", "2000"))
    (line,) = describe_rate_change(short, long, 1000)
    assert re.fullmatch(r"learning rate: 1\.00e-04 at step 1,000, 5\.49e-04 at step 1,001 .*", line)
    assert describe_rate_change(short, short, 500) == [] == describe_rate_change(short, long, 0)
    constant = f"{flags} --steps 2000 --schedule.minimum 1 --optimizer.learning_rate 1e-4"
    constant = parse_command_line(constant.split()).run
    assert describe_rate_change(short, constant, 1000) == []
