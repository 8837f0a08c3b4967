"""Writes the README.md of an exported folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from model.config import ModelConfig
from pretrain.data.sequences import parse_blend
from pretrain.run.saved import SavedRun

# Oldest versions that exports were loaded and compared with, by model_type. The native code fails in 5.13;
# 4.57 ignores the rope base of a Llama or a Qwen3, which stands in rope_parameters, and takes 10,000.
LEAST_TRANSFORMERS = {"head_schedule": "5.14", "llama": "5.0", "qwen3": "5.0", "gpt2": "4.57"}

_CARD = """\
---
{header}---

# {name}

A decoder language model, written as `{architecture}`{code}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}"{remote})
model = AutoModelForCausalLM.from_pretrained("{name}"{remote})
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```

Needs transformers {transformers} or newer.

## Architecture

{model}
## Training

{training}
## Check

Logits of this folder, loaded afresh, against the model that was trained, on real tokens: {comparison}.
"""

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
        "pipeline_tag": "text-generation",
        "tags": ["pretraining", "head-schedule"] + (["custom_code"] if native else []),
    }
    training = {
        "weights at step 0": "imported from another model; what that was trained on is not known here"
        if imported
        else None,
        "data": _data(run.get("data", "builtin"), state.data.data) if state.data.data else None,
        "tokenizer": source.tokenizer.name,
        "steps": state.step,
        "updates skipped": state.skipped or None,
        "tokens": state.tokens,
        "documents": _DOCUMENT_MASK if run.get("document_mask") else None,
        "seed": run.get("seed"),
        "learning rate": run.get("optimizer", {}).get("learning_rate"),
        "precision": state.world.dtype if state.world else None,
        **source.last_metrics(),
    }
    return _CARD.format(
        header=yaml.safe_dump(header, sort_keys=False),
        name=name,
        architecture=config.architectures[0],
        code=" (code in this folder: `trust_remote_code=True`)" if native else "",
        remote=", trust_remote_code=True" if native else "",
        transformers=LEAST_TRANSFORMERS[config.model_type],
        model=_table({"parameters": model.num_parameters(), **model.to_json()}),
        training=_table(training),
        comparison=comparison,
    )


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
