"""Compares a plan with the run that it names, which training would continue."""

from __future__ import annotations

from model.config import ModelConfig
from pretrain.checkpoint.finder import checkpoint_path, checkpoint_steps
from pretrain.checkpoint.state import read_state
from pretrain.config.run_config import RunConfig
from pretrain.run.resume import check_resume


def check_continues(run: RunConfig) -> None:
    """Reject settings with which the run that ``name`` names cannot continue, as training does.

    Data and tokenizer are not looked at. A plan without a name is not compared with anything: the folder that
    training would choose may hold a run that is only similar. Runs with records of hooks, such as those whose
    heads have grown, are left to training.

    Raises:
        UserError: see check_resume; a checkpoint whose state cannot be read.
    """
    steps = checkpoint_steps(run.folder) if run.name else []
    saved = read_state(checkpoint_path(run.folder, steps[-1])) if steps else None
    if saved is None or saved.records or run.growth.active:
        return
    stored = ModelConfig.from_json(saved.model)
    classes = {"classes": stored.classes} if run.task == "classification" else {}
    check_resume(saved, saved, run, run.build_model_config(stored.vocab_size, **classes))
