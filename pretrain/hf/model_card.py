"""Writes the README.md of an exported folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from model.heads import format_heads
from pretrain.data.blend import parse_blend
from pretrain.hf.comparison import Comparison
from pretrain.hf.formats import Export
from pretrain.run.saved import SavedRun

OWN_LICENSE = "apache-2.0"
# Oldest versions that exports were loaded and compared with. The native code fails in 5.13; 4.57 ignores the
# rope base of a Llama, which stands in rope_parameters, and takes 10,000.
LEAST_TRANSFORMERS = {"native": "5.14", "llama": "5.0", "gpt2": "4.57"}

_USAGE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}"{remote})
model = AutoModelForCausalLM.from_pretrained("{name}"{remote})
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```
"""

# A document of the training windows began at position 0 and saw nothing before it.
_DOCUMENT_MASK = (
    "kept apart by a mask: give the model one document a sequence, from position 0; what is put before a "
    "text is read as a part of it"
)


def model_card(
    source: SavedRun, export: Export, comparison: Comparison, name: str, license_name: str | None = None
) -> str:
    """Markdown with a YAML header: what the model is, what it was trained on and for how long, how it was
    checked.

    Args:
        license_name: None is OWN_LICENSE for a model that was trained here from the seed; for an imported one
            none is named, since it is not ours to give.
    """
    model, state, run = source.model, source.state, source.state.run
    layers = range(model.num_layers)
    native = export.format == "native"
    imported = state.imported or not state.run
    license_name = license_name or (None if imported else OWN_LICENSE)
    header: dict[str, Any] = {
        **({"license": license_name} if license_name else {}),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["pretraining", "head-schedule"] + (["custom_code"] if native else []),
    }
    rows = {
        "parameters": f"{model.num_parameters():,}",
        "layers": model.num_layers,
        "heads per layer": format_heads(model.heads),
        "key/value heads per layer": format_heads(model.layer_kv_heads(layer) for layer in layers),
        "head dim per layer": format_heads(model.layer_head_dim(layer) for layer in layers),
        "width": model.d_model,
        "feed-forward": f"{model.ffn}, {model.activation}, width {model.ffn_width}",
        "norm": model.norm + (" with bias" if model.norm_bias else ""),
        "positions": model.positions + (f", base {model.rope_base:g}" if model.positions == "rope" else ""),
        "context": f"{model.context_length:,} tokens",
        "vocabulary": f"{model.vocab_size:,} ({source.tokenizer.name})",
        "embeddings tied": "yes" if model.tie_embeddings else "no",
    }
    if model.local_window and any(model.local_window):
        rows["attention windows"] = ", ".join(str(window or "full") for window in model.local_window)
    metrics = source.last_metrics()
    training = {
        "weights at step 0": "imported from another model; what that was trained on is not known here"
        if imported
        else None,
        "license": None if license_name else "not named here; that of the imported model",
        "data": _data(run.get("data", "builtin"), state.data.data) if state.data.data else None,
        "steps": f"{state.step:,}" + (f" ({state.skipped} updates skipped)" if state.skipped else ""),
        "tokens": f"{state.tokens:,}",
        "documents": _DOCUMENT_MASK if run.get("document_mask") else None,
        "seed": run.get("seed"),
        "precision": state.world.dtype if state.world else None,
        "train loss": _number(metrics.get("train_loss"), "nats per token"),
        "validation loss": _number(metrics.get("val_loss"), "nats per token"),
        "validation bits per byte": _number(metrics.get("val_bpb"), ""),
    }
    scores = {
        key.removeprefix("evaluation/").replace("/", " "): _number(value, "")
        for key, value in metrics.items()
        if key.startswith("evaluation/")
    }
    if state.run:
        training["learning rate"] = json.dumps(run.get("optimizer", {}).get("learning_rate"))
    parts = [
        "---\n" + yaml.safe_dump(header, sort_keys=False) + "---\n",
        f"# {name}\n",
        f"A decoder language model, written as `{export.config.architectures[0]}`"
        + (" (code in this folder: `trust_remote_code=True`)" if native else "")
        + ".\n",
        _USAGE.format(name=name, remote=", trust_remote_code=True" if native else "")
        + f"\nNeeds transformers {LEAST_TRANSFORMERS[export.format]} or newer.\n",
        "## Architecture\n\n" + _table(rows),
        "## Training\n\n" + _table({key: value for key, value in training.items() if value is not None}),
        *(["## Zero-shot scores while training\n\n" + _table(scores)] if scores else []),
        "## Check\n\nLogits of this folder, loaded afresh, against the model that was trained, on real "
        f"tokens: {comparison}.\n",
    ]
    if export.notes:
        parts.append("## Padding\n\n```\n" + "\n".join(export.notes) + "\n```\n")
    return "\n".join(parts)


def _data(spec: str, contents: list[tuple[str, str]]) -> str:
    """Names (not paths) of the corpora with their shares, and what identifies their contents."""
    weighted_names = [("Python's standard library", 1)] if spec == "builtin" else parse_blend(spec)
    names = [
        Path(folder).name + (f" ({weight})" if len(weighted_names) > 1 else "")
        for folder, weight in weighted_names
    ]
    return f"{', '.join(names)}; content {', '.join(content[:12] for content, _ in contents)}"


def _table(rows: dict[str, Any]) -> str:
    return "| | |\n|---|---|\n" + "".join(f"| {key} | {value} |\n" for key, value in rows.items())


def _number(value: float | None, unit: str) -> str | None:
    return None if value is None else f"{value:.4f} {unit}".strip()
