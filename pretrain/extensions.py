"""The extensions of the core: the one file that names them. Nothing heavy is imported here.

The core trains, saves and resumes without any of them: take a line away, and its files, and the rest works.
pretrain/run/extension.py and pretrain/config/section.py say what an extension can bring to a run,
docs/architecture.md how to write one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretrain.config.section import Section
    from pretrain.run.extension import Extension


@dataclass(frozen=True)
class Listed:
    """An extension: its files, and what it brings to a run."""

    name: str
    files: tuple[str, ...] = ()
    """Packages and modules in pretrain/ that make it up; the package of its name when not given."""
    settings: str | None = None
    """``module:class`` of the fields that it adds to RunConfig, a Section."""
    in_run: str | None = None
    """``module:class`` of what it does in a run, an Extension."""
    builds_on: Mapping[str, str] = field(default_factory=dict)
    """Extensions that it imports, each with the reason."""
    launcher: str | None = None
    """The module whose process starts runs and ends with them, if it has one."""
    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Module with a ``main`` and description of each command, by its name under ``head-schedules``."""


EXTENSIONS = (
    # In the order in which their hooks are called: growth comes last, since the others measure the model that
    # the step has trained.
    Listed(
        "classification",
        settings="pretrain.classification.settings:ClassificationSettings",
        in_run="pretrain.classification.extension:Classification",
    ),
    Listed(
        "hf",
        files=("hf", "convert.py"),
        in_run="pretrain.hf.extension:HuggingFace",
        commands={"convert": ("pretrain.convert", "checkpoints to Hugging Face format, and back")},
    ),
    Listed(
        "evaluation",
        settings="pretrain.evaluation.settings:EvaluationSettings",
        in_run="pretrain.evaluation.extension:Evaluation",
        builds_on={"hf": "scores exported models, too"},
        commands={"evaluate": ("pretrain.evaluation.command", "zero-shot scores, with lm-eval")},
    ),
    Listed(
        "diagnostics",
        settings="pretrain.diagnostics.settings:DiagnosticsSettings",
        in_run="pretrain.diagnostics.extension:Diagnosing",
        commands={"diagnose": ("pretrain.diagnostics.command", "attention and more of runs, by layer")},
    ),
    Listed(
        "growth",
        settings="pretrain.growth.settings:GrowthSettings",
        in_run="pretrain.growth.extension:Growing",
        builds_on={
            "diagnostics": "measures q and k as they do",
            "classification": "the worth of a classifier's heads is read from its examples",
        },
        commands={"growth": ("pretrain.growth.__main__", "what grew, and what each head is worth")},
    ),
    Listed(
        "profiling",
        settings="pretrain.profiling.settings:ProfilingSettings",
        in_run="pretrain.profiling.extension:Profiling",
    ),
    Listed(
        "plots",
        in_run="pretrain.plots.extension:Plotting",
        commands={"plot": ("pretrain.plots.command", "curves of runs, side by side")},
    ),
    Listed(
        "presets",
        files=("presets.py",),
        commands={"presets": ("pretrain.presets", "the models that there are, and pictures of them")},
    ),
    Listed(
        "prepare",
        builds_on={"classification": "its command labelled prepares examples of classes"},
        commands={"prepare": ("pretrain.prepare.command", "a corpus from your text, or from the hub")},
    ),
    Listed(
        "plan",
        commands={"plan": ("pretrain.plan.command", "memory, communication and time of a run")},
    ),
    Listed(
        "generate",
        files=("generate.py",),
        builds_on={"hf": "continues text with exported models, too"},
        commands={"generate": ("pretrain.generate", "continue a text with a trained model")},
    ),
    Listed(
        "study",
        launcher="pretrain.study",
        builds_on={
            "diagnostics": "their figures by layer",
            "growth": "with it a run's heads, costs and parameters are those of its end",
        },
        commands={"study": ("pretrain.study.command", "variants over seeds: run, report, how many")},
    ),
)


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def sections() -> tuple[type[Section], ...]:
    """The settings of all extensions."""
    return tuple(_load(listed.settings) for listed in EXTENSIONS if listed.settings)


@functools.cache
def extensions() -> tuple[Extension, ...]:
    """What takes part in runs, in the order of the list. Imports what they need, torch among it."""
    return tuple(_load(listed.in_run)() for listed in EXTENSIONS if listed.in_run)
