"""Writes the README.md of an exported folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from model.config import ModelConfig
from pretrain.checkpoint.state import WorldRecord
from pretrain.data.sequences import parse_blend
from pretrain.run.saved import SavedRun

# Oldest versions that exports were loaded and compared with, by model_type. The native code fails in 5.13;
# 4.57 ignores the rope base of a Llama or a Qwen3, which stands in rope_parameters, and takes 10,000. Caches
# read the window of each layer since 5.19.
LEAST_TRANSFORMERS = {"head_schedule": "5.15", "gpt2": "4.57"}
LEAST_TRANSFORMERS |= dict.fromkeys(("llama", "qwen3", "mistral", "qwen2", "smollm3"), "5.0")

LEAST_FOR_WINDOWS = "5.19"

_CARD = """\
---
{header}---

# {name}

{kind}, written as `{architecture}`{code}.

```python
{usage}
```

Needs transformers {transformers} or newer.

## Architecture

{model}
## Training

{training}
## Check

Logits of this folder, loaded afresh, against the model that was trained, on real tokens: {comparison}.

## Citation

```bibtex
{citation}
```
"""
_GENERATION = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}"{remote})
model = AutoModelForCausalLM.from_pretrained("{name}"{remote})
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))"""
_CLASSIFICATION = """\
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}"{remote})
model = AutoModelForSequenceClassification.from_pretrained("{name}"{remote})
inputs = tokenizer(["a text", "another text"], padding=True, return_tensors="pt")
print([model.config.id2label[int(label)] for label in model(**inputs).logits.argmax(-1)])"""
# Of the software, as CITATION.cff has it; the model's own authors are not ours to name.
_CITATION = """\
@software{head-schedules,
  title = {head-schedules},
  author = {{The head-schedules authors}},
  version = {0.1.0},
  note = {Pretrains decoder language models whose attention heads are allocated freely over depth and time}
}"""

# A document of the training windows began at position 0 and saw nothing before it.
_DOCUMENT_MASK = (
    "kept apart by a mask: give the model one document a sequence, from position 0; what is put before a "
    "text is read as a part of it"
)


def model_card(
    source: SavedRun,
    model: ModelConfig,
    config: Any,
    comparison: str,
    name: str,
    license_name: str | None = None,
) -> str:
    """Markdown with a YAML header: what the model is, what it was trained on and for how long, how it was
    checked.

    Args:
        model: of the folder; the run's, or that with a folded divisor.
        config: the transformers configuration of the folder.
        license_name: none is named when it is not given: it is not ours to choose.
    """
    state, run = source.state, source.state.run
    native = config.model_type == "head_schedule"
    imported = state.imported or not run
    header = {
        **({"license": license_name} if license_name else {}),
        "library_name": "transformers",
        "pipeline_tag": "text-classification" if model.classes else "text-generation",
        "tags": ["pretraining", "head-schedule"] + (["custom_code"] if native else []),
    }
    training = {
        "weights at step 0": _origin(state.origin) if imported else None,
        "data": _data(run.get("data", "builtin"), state.data.data) if state.data.data else None,
        "tokenizer": source.tokenizer.name,
        "steps": state.step,
        "updates skipped": state.skipped or None,
        "tokens": state.tokens,
        "documents": _DOCUMENT_MASK if run.get("document_mask") else None,
        "seed": run.get("seed"),
        "trained as": _parametrization(source.model) if model.parametrization == "standard" else None,
        **_optimization(run),
        "hardware": _hardware(state.world) if state.world and state.world.hardware else None,
        "training time": f"{state.seconds / 3600:,.2f} hours" if state.seconds else None,
        "precision": state.world.dtype if state.world else None,
        **source.last_metrics(),
    }
    remote = ", trust_remote_code=True" if native else ""
    usage = _CLASSIFICATION if model.classes else _GENERATION
    return _CARD.format(
        header=yaml.safe_dump(header, sort_keys=False),
        name=name,
        architecture=config.architectures[0],
        code=" (code in this folder: `trust_remote_code=True`)" if native else "",
        kind="A sequence classifier" if model.classes else "A decoder language model",
        usage=usage.format(name=name, remote=remote),
        citation=_CITATION,
        transformers=_least_transformers(model, config.model_type),
        model=_table({"parameters": model.num_parameters(), **model.to_json()}),
        training=_table(training),
        comparison=comparison,
    )


def _least_transformers(model: ModelConfig, model_type: str) -> str:
    windows = {model.layer_window(layer) for layer in range(model.num_layers)} - {None}
    if model_type == "head_schedule" and len(windows) > 1:
        return LEAST_FOR_WINDOWS
    return LEAST_TRANSFORMERS[model_type]


def _origin(origin: str) -> str:
    """Where the weights of step 0 come from; a folder by its name, not its path."""
    if not origin:
        return "imported from another model; what that was trained on is not known here"
    folder, _, step = origin.partition(" at step ")
    return f"those of {Path(folder).name}" + (
        f" at step {step}" if step else "; its training is not known here"
    )


def _parametrization(trained: ModelConfig) -> str | None:
    """Where the folder's model is a standard one that computes the same: the one that was trained."""
    if trained.parametrization == "standard":
        return None
    return f"{trained.parametrization}, base width {trained.base_width}, which this folder has in its weights"


def _optimization(run: Mapping[str, Any]) -> dict[str, Any]:
    """The rows about the optimizer, the batch and the schedule, as far as the run's settings say them."""
    optimizer, muon, schedule, llr = (run.get(name, {}) for name in ("optimizer", "muon", "schedule", "llr"))
    rate = optimizer.get("learning_rate")
    uses_muon = optimizer.get("kind") == "muon"
    names = {"adamw": "AdamW", "muon": "Muon for the blocks' matrices, AdamW for everything else"}
    phases = [f"{name} {schedule[name]:g}" for name in ("warmup", "decay", "minimum") if name in schedule]
    if schedule.get("kind") != "wsd":
        phases = [phase for phase in phases if not phase.startswith("decay")]
    return {
        "optimizer": names.get(optimizer.get("kind", "")),
        "learning rate" + (" of AdamW" if uses_muon else ""): rate,
        "learning rate of Muon": (muon.get("learning_rate") or rate) if uses_muon else None,
        "unit of Muon": muon.get("heads") if uses_muon else None,
        "scale of Muon": muon.get("scale") if uses_muon else None,
        "schedule": f"{schedule['kind']} ({', '.join(phases)})" if "kind" in schedule else None,
        "rules of learning rates": ", ".join(rule["name"] for rule in run.get("lr_rules", ())) or None,
        "rates that follow spectra": _spectral_rates(llr) if llr.get("apply", "none") != "none" else None,
        "weight decay": optimizer.get("weight_decay"),
        "gradient clipping": optimizer.get("gradient_clipping"),
        "batch": f"{batch:,} tokens" if (batch := run.get("global_batch_tokens")) else None,
    }


def _spectral_rates(llr: Mapping[str, Any]) -> str:
    names = ("measure", "low", "high", "every", "until", "transition", "least")
    settings = ", ".join(f"{name} {llr[name]}" for name in names if name in llr)
    return f"{llr['apply']} ({settings})"


def _hardware(world: WorldRecord) -> str:
    return f"{world.ranks} x {world.hardware}; torch {world.versions.get('torch', '?')}"


def _data(spec: str, contents: list[tuple[str, str]]) -> str:
    """Names (not paths) of the corpora with their shares, and what identifies their contents."""
    weighted_names = [("Python's standard library", 1)] if spec == "builtin" else parse_blend(spec)
    names = [
        Path(folder).name + (f" ({weight})" if len(weighted_names) > 1 else "")
        for folder, weight in weighted_names
    ]
    return f"{', '.join(names)}; content {', '.join(content[:12] for content, _ in contents)}"


def _table(rows: Mapping[str, Any]) -> str:
    """The rows that have a value."""
    shown = {
        key: f"{value:,}" if type(value) is int else f"{value:.5g}" if type(value) is float else str(value)
        for key, value in rows.items()
        if value is not None
    }
    return "| | |\n|---|---|\n" + "".join(f"| {key} | {value} |\n" for key, value in shown.items())
