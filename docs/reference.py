"""Generates docs/reference/ from the code: settings, commands, metrics, hardware, and the library's page.

python docs/reference.py        # make docs calls it
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from pydantic import TypeAdapter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.hardware import hardware_page  # noqa: E402
from docs.metrics import metrics_page, metrics_schema  # noqa: E402
from model.config import ModelConfig  # noqa: E402
from model.schedules import LARGEST_SIZE  # noqa: E402
from pretrain import cli  # noqa: E402
from pretrain.config.command_line import GROUPS, default_of, documentation, yaml_text  # noqa: E402
from pretrain.config.flag_aliases import ABSENT, MEANT  # noqa: E402
from pretrain.config.lr_rules import LearningRateRule  # noqa: E402
from pretrain.config.run_config import RunConfig  # noqa: E402
from pretrain.study.file import schema  # noqa: E402

ARCHITECTURE = """The fields of a model. A field that a recipe leaves out keeps the preset's value; the
defaults below are those of a model file. `vocab_size`, `heads` and `classes` are fields of model files only:
a recipe has the settings `vocab_size`, `heads` and `task`."""
LIBRARY = """---
tocdepth: 3
---

# Library

```python
from model import ModelConfig, Transformer, generate, initialize, preset
from pretrain import Hook, HookResult, RunConfig, SavedRun, Session, TrainingState
from pretrain import read_metrics, recipe, train
from pretrain.study import Study
```

Programs that use it are among the [examples](../../examples/README.md). `[source]` leads to the code.

## Training

```{eval-rst}
.. autofunction:: pretrain.recipe
.. autofunction:: pretrain.train
.. autoclass:: pretrain.RunConfig(**settings)
   :no-members:
```

The fields of `RunConfig` are the [settings](settings.md).

```{eval-rst}
.. autofunction:: pretrain.read_metrics
.. autoexception:: model.errors.UserError
```

## Runs on disk

```{eval-rst}
.. autoclass:: pretrain.SavedRun()
   :members: open, load_model, corpora, last_metrics
```

## Hooks

```{eval-rst}
.. autoclass:: pretrain.Hook
   :members:
.. autoclass:: pretrain.HookResult(values={}, lines=[], model=None)
   :members:
.. autoclass:: pretrain.IntervalHook
   :members:
.. autofunction:: pretrain.prepare_measurement
.. autoclass:: pretrain.Session(**parts)
   :members:
.. autoclass:: pretrain.TrainingState(**fields)
   :members:
.. autoclass:: pretrain.Record(**fields)
   :members:
```

## The network

```{eval-rst}
.. autoclass:: model.ModelConfig(**fields)
   :members: replace, to_json, from_json, difference, num_layers, num_parameters, flops_per_token
```

The fields of `ModelConfig` are the settings of the section [architecture](settings.md#architecture).

```{eval-rst}
.. autofunction:: model.preset
.. autofunction:: model.preset_names
.. autoclass:: model.Transformer
   :members: forward
.. autofunction:: model.initialize
.. autofunction:: model.generate
.. autofunction:: model.heads.parse_heads
.. autofunction:: model.heads.format_heads
```

## Studies

```{eval-rst}
.. autoclass:: pretrain.study.Study()
   :members: load, plan, run, results
```
"""


STUDY_SCHEMA = """Its output is [the JSON schema of study files](study.schema.json). An editor with a YAML
language server checks a study file against it if the file begins with

```yaml
# yaml-language-server: $schema=study.schema.json
```"""


def write_reference(folder: Path) -> None:
    """Write the pages into *folder*; those that are up to date keep their time."""
    folder.mkdir(exist_ok=True)
    pages = {
        "settings": settings_page(),
        "commands": commands_page(),
        "flags": flags_page(),
        "library": LIBRARY,
        "metrics": metrics_page(),
        "hardware": hardware_page(),
    }
    texts = {f"{name}.md": text for name, text in pages.items()}
    texts["metrics.schema.json"] = json.dumps(metrics_schema(), indent=1)
    texts["study.schema.json"] = json.dumps(schema(), indent=1)
    for name, text in texts.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def settings_page() -> str:
    """Every field of RunConfig, of its sections, of a learning-rate rule and of a model."""
    helps = documentation(RunConfig)
    lines = [
        "# Settings",
        "",
        "A setting is a field of a recipe and a flag of `head-schedules train`:",
        "`optimizer: {learning_rate: 3e-4}` is `--optimizer.learning_rate 3e-4`. Defaults are those of a",
        "recipe that leaves the field out.",
        "`head-schedules train --print_config` prints what a run uses.",
    ]
    for title, names in GROUPS.items():
        lines += ["", f"## {title}", ""]
        for name in names.split():
            lines += _setting(name, RunConfig, name, helps[name])
    for section in dataclasses.fields(RunConfig):
        if dataclasses.is_dataclass(section.default_factory):
            lines += _section(section.name, section.default_factory)
    lines += _section("lr_rules", LearningRateRule, "lr_rules[]", "The fields of each rule of `lr_rules`.")
    lines += _section("architecture", ModelConfig, "architecture", ARCHITECTURE)
    lines += [
        "```{confval} architecture.num_layers",
        ":type: integer ≥ 1",
        ":default: the preset's",
        ":no-contents-entry:",
        "",
    ]
    lines += ["Another number of layers, with `heads` for each.", "```"]
    return "\n".join([*lines, ""])


def _section(name: str, kind: Any, prefix: str = "", text: str = "") -> list[str]:
    """A heading, what the section is for, and its fields."""
    helps = documentation(kind)
    text = text or " ".join((kind.__doc__ or "").split("\n\n")[0].split())
    lines = ["", f"## {name}", "", _to_markdown(text), ""]
    for item in dataclasses.fields(kind):
        lines += _setting(f"{prefix or name}.{item.name}", kind, item.name, helps.get(item.name, ""))
    return lines


def _setting(name: str, kind: Any, field: str, text: str) -> list[str]:
    """A setting with its anchor: type, default, meaning."""
    schema = _schema(kind)
    (item,) = (each for each in dataclasses.fields(kind) if each.name == field)
    return [
        f"```{{confval}} {name}",
        f":type: {describe_type(schema['properties'][field], schema.get('$defs', {}))}",
        f":default: {_default(item)}",
        ":no-contents-entry:",
        "",
        _to_markdown(text),
        "```",
        "",
    ]


@functools.cache  # of all settings at once
def _schema(kind: Any) -> dict[str, Any]:
    return TypeAdapter(kind).json_schema()


def describe_type(schema: Mapping[str, Any], kinds: Mapping[str, Any]) -> str:
    """What a JSON schema allows, in words: "integer ≥ 1", "number in [0, 1)".

    Args:
        kinds: the schemas that it refers to, by name.
    """
    if "$ref" in schema:
        fields = kinds[schema["$ref"].rpartition("/")[2]]["properties"]
        kind = fields.get("type", {}).get("const")
        return f"mapping `{{{', '.join([f'type: {kind}', *list(fields)[1:]])}}}`" if kind else "mapping"
    if "enum" in schema:
        *others, last = (f"`{yaml_text(value)}`" for value in schema["enum"])
        return f"{', '.join(others)} or {last}"
    if several := schema.get("anyOf") or schema.get("oneOf"):
        return ", or ".join(describe_type(each, kinds) for each in several)
    if schema["type"] == "array":
        items = schema.get("prefixItems") or [schema["items"]]
        count = f"{len(items)} " if "prefixItems" in schema else ""
        described = describe_type(items[0], kinds).replace(", or ", " or ")
        plural = re.sub(r"integer|number|string|mapping", r"\g<0>s", described)
        return f"list of {count}{plural}"
    words = {"boolean": "`true` or `false`", "null": "`null`", "object": "mapping"}
    return words.get(schema["type"], schema["type"]) + _describe_range(schema)


def _describe_range(schema: Mapping[str, Any]) -> str:
    """The bounds of a number; those that only keep it within 32 or 64 bits are left out."""
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    most, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if schema["type"] == "integer" and above is not None:
        least, above = above + 1, None
    if below is not None or (most is not None and most < LARGEST_SIZE):
        begin = f"[{least:g}" if above is None else f"({above:g}"
        return f" in {begin}, " + (f"{most:g}]" if below is None else f"{below:g})")
    return f" ≥ {least:g}" if least is not None else f" > {above:g}" if above is not None else ""


def _default(item: dataclasses.Field) -> str:
    """The default as YAML writes it."""
    default = default_of(item)
    return "required" if default is dataclasses.MISSING else f"`{yaml_text(default)}`"


def _to_markdown(text: str) -> str:
    """A docstring in Markdown: links to pages, code in single quotes, flags as code."""
    text = " ".join(text.replace("%%", "%").replace("``", "`").split())
    text = re.sub(r"(?<![`\w-])--[a-z_.]+[a-z]", r"`\g<0>`", text)
    return re.sub(r"docs/(\w+)\.md", r"[](../\1.md)", text)


def flags_page() -> str:
    """What other projects call a setting, and the flag here."""
    lines = [
        "# Flags of other projects",
        "",
        "What transformers, nanoGPT and Megatron-LM call a setting, and the flag of `head-schedules train`,",
        "which rejects the names on the left and prints the flag on the right.",
        "",
        "`--micro-batch-size 8 --global-batch-size 512 --seq-length 1024` of Megatron-LM is",
        "`--micro_batch 8 --global_batch_tokens 524288 --architecture.context_length 1024`. Gradient",
        "accumulation is not set: the micro-batches of a rank in a step are `global_batch_tokens` /",
        "(micro-batch × context length × data-parallel ranks). nanoGPT's `gradient_accumulation_steps`",
        "counts those of all ranks.",
        "",
        "| there | here |",
        "|---|---|",
    ]
    absent = [(names, f"{reason[0].upper()}{reason[1:]}.") for names, reason in ABSENT]
    for names, meant in (*MEANT, *absent):
        hyphens = [f"--{name.replace('_', '-')}" for name in names.split() if "_" in name]
        flags = ", ".join(f"`{name}`" for name in [*names.split(), *hyphens])
        here = re.sub(r"(--[a-z_.]*[a-z])", r"`\1`", meant)
        lines.append(f"| {flags} | {here} |")
    lines += [
        "| `--sequence-parallel` | `--sequence_parallel` |",
    ]
    return "\n".join([*lines, ""])


def commands_page() -> str:
    """What --help of each command and subcommand prints on a terminal of 100 columns."""
    lines = ["# Commands", ""]
    for name, text in {
        "train": cli.TRAIN,
        **{name: command[1] for name, command in cli.COMMANDS.items()},
    }.items():
        lines += [f"## {name}", "", f"{text[0].upper()}{text[1:]}.", ""]
        if name == "train":
            lines += [
                "Its flags are the [settings](settings.md), `--config`, `--ds_config`, `--print_config`,",
                "`--plot_lr` and `--verbose`.",
                "",
            ]
            continue
        with mock.patch.dict(os.environ, COLUMNS="100"):
            texts = cli.help_texts(name)
        for subcommand, printed in texts.items():
            title = [f"### {name} {subcommand}", ""] if subcommand else []
            lines += [*title, "```text", printed.rstrip(), "```", ""]
            if (name, subcommand) == ("study", "schema"):
                lines += [STUDY_SCHEMA, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    write_reference(ROOT / "docs" / "reference")
