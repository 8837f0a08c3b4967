"""The settings that test_combinations.py combines, and which of their levels the program rejects together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model.presets import preset
from pretrain.config.run_config import RunConfig
from pretrain.engine.ds_config_check import read_ds_config
from tests.helpers.covering import Configuration
from tests.helpers.training import ROOT, nano_run

STEPS, SEQUENCES, CONTEXT = 8, 8, 32
HEADS = (3, 4)  # two layers: every further one is another graph to compile
SLOW = "--lr_rules '[{name: slow, parameters: [q, k], layers: upper_half, scale: 0.25, %s}]'"

# Level -> flags, of each setting. The first level goes with everything; what takes long comes last.
SETTINGS: dict[str, dict[str, str]] = {
    "optimizer": {"muon": "--optimizer.kind muon", "adamw": "--optimizer.kind adamw"},
    "muon.heads": {"whole": "", "each": "--muon.heads each", "2": "--muon.heads 2"},
    "growth": {
        "none": "",
        "schedule": """--growth.criterion schedule --growth.schedule '{4: "1,3"}'""",
        "gradient": "--growth.criterion gradient --growth.interval 4 --growth.calibration 1 --growth.until 4",
    },
    "parametrization": {
        "standard": "",
        "mup": "--architecture.parametrization mup --architecture.base_width 24 "
        "--architecture.attention_scale head_dim --architecture.attention_scale_base 16",
    },
    "qk_norm": {name: f"--architecture.qk_norm {name}" for name in ("none", "plain", "weighted")},
    "softcap": {"none": "", "5": "--architecture.logit_softcap 5"},
    "z_loss": {"0": "", "0.01": "--architecture.z_loss 0.01"},
    "kv_heads": {"heads": "", "grouped": "--architecture.kv_heads 1,2"},
    "head_dim": {"d/h": "", "own": "--architecture.head_dim 8,16"},
    "ffn_width": {
        "uniform": "",
        "tapered": "--architecture.ffn_width 'tapered(96, multiple=16)'",
        "one layer": "--architecture.ffn_width 0,128",
    },
    "block_width": {"d": "", "by layer": "--architecture.block_width 72,32"},
    "attention_gate": {name: f"--architecture.attention_gate {name}" for name in ("none", "head", "element")},
    "local_window": {"none": "", "one layer": "--architecture.local_window '[null, 9]'"},
    "document_mask": {"false": "", "true": "--document_mask true"},
    "classification": {"false": "", "true": "--task classification"},
    "blend": {"false": "", "true": ""},
    "validation.data": {"own": "", "other": "--validation.data OTHER"},
    "lr_rules": {
        "none": "",
        "hold": SLOW % "hold: 3, ramp: 2",
        "maturity": SLOW % "release: maturity, ramp: 1, latest: 6"
        + " --maturity.every 1 --maturity.patience 1 --maturity.sequences 2 --maturity.positions 16",
    },
    "schedule": {kind: f"--schedule.kind {kind}" for kind in ("cosine", "linear", "wsd")},
    "skip_spikes": {"0": "", "3": "--skip_spikes 3"},
    "accumulation": {"1": "", "several": ""},
    "activation_checkpointing": {"false": "", "true": "--activation_checkpointing true"},
    "fused": {name: f"--fused {name}" for name in ("loss", "none", "all")},
    "attention": {name: f"--attention {name}" for name in ("torch", "blocks")},
    "precision": {name: f"--precision {name}" for name in ("fp32", "bf16")},
    "norm": {name: f"--architecture.norm {name}" for name in ("rmsnorm", "layernorm")},
    "ffn": {
        "swiglu": "",
        "mlp": "--architecture.ffn mlp --architecture.activation gelu_tanh",
        "relu2": "--architecture.ffn mlp --architecture.activation relu2",
    },
    "positions": {name: f"--architecture.positions {name}" for name in ("rope", "learned")},
    "rope_base": {"one": "", "by layer": "--architecture.rope_base '[100, null]'"},
    "rotary_share": {"1": "", "half": "--architecture.rotary_share 0.5"},
    "tie_embeddings": {name: f"--architecture.tie_embeddings {name}" for name in ("true", "false")},
    "bias": {
        "none": "",
        "output": "--architecture.attention_bias output",
        "all": "--architecture.attention_bias all --architecture.ffn_bias true --architecture.norm_bias true",
    },
    "checkpoint.background": {name: f"--checkpoint.background {name}" for name in ("false", "true")},
    "diagnostics": {"0": "--diagnostics_every 0", "3": "--diagnostics_every 3"},
    "tensorboard": {name: f"--logging.tensorboard {name}" for name in ("false", "true")},
    "stage": {"2": "", "1": "", "3": ""},
    "offload": {"false": "", "true": ""},
    "sequence_parallel": {"false": "", "true": "--sequence_parallel true"},
    "ranks": {"1": "", "2": "", "t=2": "--tensor_parallel 2", "c=2": "--context_parallel 2"},
    "compile": {"false": "--compile false", "true": "--compile true"},
}

# What the program rejects, with the message that it gives (a regular expression).
INFEASIBLE: list[tuple[Configuration, str]] = [
    ({"optimizer": "adamw", "muon.heads": "each"}, "^muon: given with optimizer.kind: adamw"),
    ({"optimizer": "adamw", "muon.heads": "2"}, "^muon: given with optimizer.kind: adamw"),
    ({"growth": "schedule", "kv_heads": "grouped"}, "^growth.criterion: schedule is not for grouped queries"),
    ({"growth": "gradient", "kv_heads": "grouped"}, "^growth.criterion: gradient is not for grouped queries"),
    ({"growth": "gradient", "activation_checkpointing": "true"}, "^growth.criterion: gradient needs activa"),
    ({"classification": "true", "blend": "true"}, "^data: a blend of 2 corpora cannot be classified"),
    ({"classification": "true", "softcap": "5"}, "^logit_softcap: is for language models"),
    ({"classification": "true", "z_loss": "0.01"}, "^z_loss: is for language models"),
    ({"classification": "true", "document_mask": "true"}, "^document_mask: True does not go with --task"),
    ({"classification": "true", "sequence_parallel": "true"}, "^sequence_parallel: True does not go with"),
    ({"classification": "true", "ranks": "c=2"}, "^context_parallel: 2 does not go with --task"),
    ({"classification": "true", "validation.data": "other"}, "^validation.data: .* does not go with --task"),
    ({"stage": "3", "compile": "true"}, "^compile: true is not valid at ZeRO stage 3"),
    ({"stage": "3", "fused": "all"}, "^fused: all is not valid at ZeRO stage 3"),
    ({"attention": "blocks", "document_mask": "true"}, "^attention: blocks does not go with document_mask"),
]


def ranks_of(configuration: Configuration) -> int:
    """How many ranks a configuration needs."""
    return 1 if configuration["ranks"] == "1" else 2


def run_of(configuration: Configuration, folders: dict[str, Path], runs: Path, name: str) -> RunConfig:
    """The run of a configuration, STEPS steps of SEQUENCES sequences.

    Args:
        folders: ``text`` and ``other``, two corpora of one tokenizer, and ``labelled``.
        runs: where its folder is made.

    Raises:
        UserError: the program rejects the combination.
    """
    names = ("labelled", "labelled") if configuration["classification"] == "true" else ("text", "other")
    first, second = (folders[name] for name in names)
    data = f"{first}:0.6,{second}:0.4" if configuration["blend"] == "true" else str(first)
    model = runs / "two_layers.json"
    model.write_text(json.dumps(preset("prism-nano").replace(heads=HEADS).to_json()))
    data_parallel = 2 if configuration["ranks"] == "2" else 1
    micro_batch = 2 if configuration["accumulation"] == "several" else SEQUENCES // data_parallel
    flags = [
        f"--name {name} --data {data} --steps {STEPS} --global_batch_tokens {SEQUENCES * CONTEXT}",
        f"--micro_batch {micro_batch} --architecture.context_length {CONTEXT} --model {model}",
        "--validation.every 3 --validation.sequences 6 --checkpoint.every 3 --logging.every 2",
        "--optimizer.learning_rate 3e-3",
        *filter(None, (SETTINGS[name][level] for name, level in configuration.items())),
    ]
    return nano_run(first, runs, *(flag.replace("OTHER", str(folders["other"])) for flag in flags))


def ds_config_of(configuration: Configuration) -> dict[str, Any]:
    """The ds_config of its stage, with the optimizer state on the host if it is to be offloaded; at stage 3
    also the parameters."""
    ds_config = read_ds_config(str(ROOT / f"ds_configs/zero{configuration['stage']}.json"))
    if configuration["offload"] == "true":
        zero = ds_config["zero_optimization"]
        zero["offload_optimizer"] = {"device": "cpu"}
        if configuration["stage"] == "3":
            zero["offload_param"] = {"device": "cpu"}
    return ds_config
