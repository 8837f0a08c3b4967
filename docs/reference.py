"""Generates docs/reference/: every setting and every command, from the code, and the library's pages.

python docs/reference.py        # make docs calls it
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from model.config import ModelConfig  # noqa: E402
from pretrain import cli  # noqa: E402
from pretrain.config.command_line import documentation  # noqa: E402
from pretrain.config.flag_aliases import MEANT  # noqa: E402
from pretrain.config.run_config import RunConfig  # noqa: E402
from pretrain.config.sources import SETTINGS  # noqa: E402

LIBRARY = """# Library

    from model import ModelConfig, Transformer, generate, initialize, preset
    from pretrain import Hook, HookResult, RunConfig, SavedRun, read_metrics, recipe, train

Programs that use it are in [examples/](../../examples/README.md).

## Training

```{eval-rst}
.. autofunction:: pretrain.recipe
.. autofunction:: pretrain.train
.. autoclass:: pretrain.Hook
   :members:
.. autoclass:: pretrain.HookResult
   :members:
.. autoclass:: pretrain.SavedRun
   :members: open, load_model, corpora, last_metrics
.. autofunction:: pretrain.read_metrics
.. autoexception:: model.errors.UserError
```

## The network

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
"""


def write_reference(folder: Path) -> None:
    """Write the pages into *folder*; those that are up to date keep their time."""
    folder.mkdir(exist_ok=True)
    pages = {
        "settings": settings_page(),
        "commands": commands_page(),
        "flags": flags_page(),
        "library": LIBRARY,
    }
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def settings_page() -> str:
    """Every field of RunConfig and of its sections, then those of a model."""
    sections = {item.name: item for item in dataclasses.fields(RunConfig)}
    helps = documentation(RunConfig)
    lines = [
        "# Settings",
        "",
        "Fields of recipes, and flags of `head-schedules train`: `optimizer: {learning_rate: 3e-4}` is",
        "`--optimizer.learning_rate 3e-4`. The defaults are those of a recipe that leaves the field out.",
        "",
        "## Of the run",
        "",
        *_table((name, helps[name], _default(item)) for name, item in SETTINGS.items() if "." not in name),
    ]
    for name, section in sections.items():
        if dataclasses.is_dataclass(section.default_factory):
            texts = documentation(section.default_factory)
            fields = {item.name: item for item in dataclasses.fields(section.default_factory)}
            rows = [(f"{name}.{field}", texts[field], _default(item)) for field, item in fields.items()]
            lines += ["", f"## {name}", "", *_table(rows)]
    texts = documentation(ModelConfig)
    rows = [
        (f"architecture.{item.name}", texts.get(item.name, ""), _default(item))
        for item in dataclasses.fields(ModelConfig)
    ]
    return "\n".join([*lines, "", "## architecture", "", *_table(rows), ""])


def flags_page() -> str:
    """What other projects call a setting, and the flag here."""
    lines = [
        "# Flags of other projects",
        "",
        "What transformers, nanoGPT and Megatron-LM call a setting, and the flag of `head-schedules train`.",
        "Other names are rejected with the same advice.",
        "",
        "| there | here |",
        "|---|---|",
    ]
    for names, meant in MEANT:
        flags = ", ".join(f"`{name}`" for name in names.split())
        here = re.sub(r"(--[a-z_.]+)", r"`\1`", meant)
        lines.append(f"| {flags} | {here} |")
    return "\n".join([*lines, "| `dropout` | There is no dropout. |", ""])


def _default(item: dataclasses.Field) -> str:
    if item.default is not dataclasses.MISSING:
        return f"`{item.default}`"
    made = item.default_factory
    return "" if made is dataclasses.MISSING else f"`{made()}`"


def _table(rows) -> list[str]:
    lines = ["| field | meaning | default |", "|---|---|---|"]
    for name, text, default in rows:
        shown = " ".join(text.replace("%%", "%").split()).replace("|", "\\|").replace("``", "`")
        lines.append(f"| `{name}` | {shown} | {default} |")
    return lines


def commands_page() -> str:
    """What --help of each command and subcommand prints."""
    os.environ["COLUMNS"] = "100"
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
        for subcommand, printed in cli.help_texts(name).items():
            title = [f"### {name} {subcommand}", ""] if subcommand else []
            lines += [*title, "```text", printed.rstrip(), "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    write_reference(ROOT / "docs" / "reference")
