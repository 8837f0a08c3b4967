"""The settings of zero-shot evaluation while training."""

from __future__ import annotations

from dataclasses import field

from model.declared import Count, Positive, declared
from pretrain.config.section import Section


@declared("evaluation")
class EvaluationConfig:
    """Zero-shot scores while training, through lm-eval; the training numbers do not change."""

    every: Count = 0
    """Steps between evaluations; with any, the last step is evaluated too. 0: none, and lm-eval is not
    imported."""
    tasks: str = "papers"
    """lm-eval's task names, such as piqa,arc_easy, or the group papers (the Prism paper's six)."""
    include_path: str | None = None
    """Folder with more tasks as lm-eval's YAMLs; code that they name is run."""
    num_fewshot: Count | None = None
    """Solved items before each; as the task says, else none, when not given."""
    limit: Positive | None = None
    """At most this many items of each task; all when not given."""
    data_dir: str | None = None
    """Folder of the tasks' data sets (python -m pretrain.evaluation save); the Hugging Face hub when not
    given."""


@declared()
class EvaluationSettings(Section):
    """What evaluation adds to RunConfig."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
