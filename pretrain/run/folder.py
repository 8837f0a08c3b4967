"""What a run's folder holds before the first step: configuration, merged ds_config, tokenizer."""

from __future__ import annotations

import json
from typing import Any

from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.run.data import RunData
from pretrain.runtime.world import World
from pretrain.utils.files import atomic_folder, remove_leftovers, write_atomically

# Half-written files of killed sessions, under the names that were once used.
LEFT_BY_OLDER_VERSIONS = ("latest.new", "metrics.jsonl.partial")


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
            remove_leftovers(run.folder)
            for name in LEFT_BY_OLDER_VERSIONS:
                (run.folder / name).unlink(missing_ok=True)
            write_atomically(run.folder / "config.yaml", run.to_yaml())
            write_atomically(run.folder / "ds_config.json", json.dumps(ds_config, indent=2) + "\n")
            if not (run.folder / "tokenizer").exists():
                with atomic_folder(run.folder / "tokenizer") as partial:
                    data.tokenizer.save(partial)
        except OSError as error:
            problem = f"cannot write {error.filename} ({error.strerror})"
    problem = world.agree(problem)
    if problem:
        raise UserError(f"runs_dir: {problem}; give a folder that can be written with --runs_dir")
