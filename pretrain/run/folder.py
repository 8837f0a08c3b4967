"""Prepares a run's folder before the first step: configuration, merged ds_config, tokenizer."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash
from pretrain.run.data import RunData
from pretrain.run.decisions import Decisions
from pretrain.runtime.world import World
from pretrain.utils.files import atomic_folder, remove_leftovers, write_atomically


def prepare_run_folder(run: RunConfig, data: RunData, decisions: Decisions, world: World) -> None:
    """Write the run's configuration, decisions, merged ds_config and tokenizer into its folder. Collective.

    Raises:
        UserError: on every rank, when the folder cannot be written.
    """

    def prepare() -> None:
        try:
            for name in ("checkpoints", "plots"):
                (run.folder / name).mkdir(parents=True, exist_ok=True)
            remove_leftovers(run.folder)
            write_atomically(run.folder / "config.yaml", run.to_yaml())
            for name, content in (
                ("decisions", decisions.to_dict()),
                ("ds_config", decisions.ds_config.value),
            ):
                write_atomically(run.folder / f"{name}.json", json.dumps(content, indent=2) + "\n")
            _write_tokenizer(run.folder / "tokenizer", data.tokenizer)
        except OSError as error:
            raise UserError(
                f"runs_dir: cannot write {error.filename} ({error.strerror}); give a folder that can be "
                "written with --runs_dir"
            ) from None

    world.on_rank_zero(prepare)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the data's tokenizer, unless the folder holds it: checkpoints refer to it by its hash.

    An imported model may have another one that gives the same ids (see check_resume); its checkpoint keeps
    that one.
    """
    with contextlib.suppress(UserError):
        if folder.exists() and tokenizer_hash(load_tokenizer(folder)) == tokenizer_hash(tokenizer):
            return
    with atomic_folder(folder) as partial:
        tokenizer.save(partial)
