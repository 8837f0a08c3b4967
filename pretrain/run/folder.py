"""A run's data and folder: what is opened before a model is built."""

from __future__ import annotations

import json
import os
from typing import Any

from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.run.data import RunData
from pretrain.runtime.world import World
from pretrain.utils.files import write_synced


def prepare_run_folder(run: RunConfig, data: RunData, ds_config: dict[str, Any], world: World) -> None:
    """Write the run's configuration, merged ds_config and tokenizer into its folder. Collective.

    Raises:
        UserError: on every rank, when the folder cannot be written.
    """
    problem = None
    if world.is_main:
        try:
            for name in ("checkpoints", "plots"):
                (run.folder / name).mkdir(parents=True, exist_ok=True)
            write_synced(run.folder / "config.yaml", run.to_yaml())
            write_synced(run.folder / "ds_config.json", json.dumps(ds_config, indent=2) + "\n")
            if not (run.folder / "tokenizer").exists():
                partial = run.folder / f".tokenizer.{os.getpid()}"
                data.tokenizer.save(partial)
                partial.rename(run.folder / "tokenizer")
        except OSError as error:
            problem = f"cannot write {error.filename} ({error.strerror})"
    problem = world.agree(problem)
    if problem:
        raise UserError(f"runs_dir: {problem}; give a folder that can be written with --runs_dir")
