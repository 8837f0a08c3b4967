"""Checks threads, paths and batch, before heavy imports and before the ranks connect."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from model.context_plan import check_context_parallel
from model.errors import UserError, suggest
from model.parallel_plan import check_tensor_parallel, check_world
from pretrain.checkpoint.finder import checkpoint_steps, is_run, require_steps
from pretrain.config.model_file import SOURCES, split_step
from pretrain.config.run_config import RunConfig
from pretrain.data.corpus import is_prefix
from pretrain.data.sequences import parse_blend
from pretrain.engine.batch import share_batch
from pretrain.optim.schedule import LearningRateSchedule
from pretrain.runtime.environment import check_threads, read_environment
from pretrain.utils.env_check import (
    check_installed,
    check_variables,
)
from pretrain.utils.files import nearest_existing, refuse_other_kind


def check_start(run: RunConfig) -> None:
    """Reject a run that could not begin on this machine, in this launch.

    Raises:
        UserError: see read_environment and check_threads; a corpus that does not exist, to train or to
            validate on, a data_root that cannot be written, a batch that the ranks cannot share, a run
            folder of another kind, weights to begin with that are not there, tasks of an evaluation that do
            not exist.
    """
    launch = read_environment()
    refuse_other_kind(run.folder, "run", "name")
    check_threads(run.threads)
    check_source(run)
    if run.logging.wandb != "disabled":
        check_variables("wandb")
    if run.logging.wandb in ("online", "offline"):
        check_installed("wandb", "logging.wandb")
    if run.logging.tensorboard:
        check_installed("tensorboard", "logging.tensorboard")
    if run.checkpoint.mirror is not None:
        from pretrain.mirror.object_store import check_mirror

        check_mirror(run.checkpoint.mirror)
    if run.data == "builtin":
        _check_data_root(Path(run.data_root))
    else:
        for folder, _ in parse_blend(run.data):
            _check_corpus(folder, "data")
    for folder, _ in parse_blend(run.validation.data) if run.validation.data is not None else ():
        _check_corpus(folder, "validation.data", f" --tokenizer {_tokenizer_of(run)}")
    check_world(launch.size, run.tensor_parallel, run.context_parallel)
    copy = run.tensor_parallel * run.context_parallel
    share_batch(
        run.global_batch_tokens,
        run.micro_batch,
        run.build_model_config().context_length,
        launch.size // copy,
        run.context_parallel if run.task == "language" else None,
        copy,
        run.tensor_parallel if run.sequence_parallel else 1,
    )
    if run.evaluation.every and launch.rank == 0:  # it reads lm-eval's files for all
        from pretrain.evaluation.checks import check_evaluation

        check_evaluation(run.evaluation)


def check_source(run: RunConfig) -> None:
    """Reject ``init_from`` of a run that has not begun where there are no weights to begin with.

    Raises:
        UserError: no such folder, a run without that checkpoint, the run itself.
    """
    if run.init_from is None or run.checkpoint.mirror is not None or checkpoint_steps(run.folder):
        return
    name, step = split_step(run.init_from)
    folder = Path(name)
    if os.path.realpath(folder) == os.path.realpath(run.folder):
        raise UserError(
            f"init_from: {run.folder} is this run itself, and holds no checkpoint; give {SOURCES} that has "
            "the weights"
        )
    try:
        if is_run(folder):
            require_steps(folder, step)
        elif step is not None or not (folder / "config.json").exists():
            raise UserError(f"{name!r} holds no weights; give {SOURCES}")
    except UserError as error:
        raise UserError(f"init_from: {error}") from None


def check_settings(run: RunConfig) -> None:
    """Reject settings that do not fit each other; data, ranks and machine are not looked at.

    Raises:
        UserError: see RunConfig.build_model_config, check_tensor_parallel, check_context_parallel and
            share_batch; rules, or a release, that do not fit the model or the run.
    """
    model = run.build_model_config()
    degrees = run.tensor_parallel, run.context_parallel
    check_tensor_parallel(model, degrees[0], sequence_parallel=run.sequence_parallel)
    check_context_parallel(model, degrees[1], degrees[0], sequence_parallel=run.sequence_parallel)
    share_batch(run.global_batch_tokens, run.micro_batch, model.context_length, 1)
    if not run.lr_rules:  # every parameter follows the base schedule, whatever the model is
        LearningRateSchedule(run.schedule, run.steps)
        return
    from pretrain.optim.groups import GroupRates, run_groups  # imports torch

    GroupRates(run_groups(run, model), run)


def _tokenizer_of(run: RunConfig) -> str:
    """What a corpus of the same tokenizer as the run's is prepared with."""
    folder = parse_blend(run.data)[0][0] if run.data != "builtin" else "data/CORPUS"
    return shlex.quote(run.tokenizer or f"{folder}/tokenizer")


def _check_corpus(folder: str, field: str, more: str = "") -> None:
    path = Path(folder)
    if path.suffix in (".bin", ".idx") and path.is_file():
        raise UserError(
            f"{field}: {folder!r} is one file of a .bin/.idx pair; give the prefix, "
            f"{folder.removesuffix(path.suffix)!r}, and --tokenizer"
        )
    if path.is_dir() or is_prefix(path):
        return
    if path.is_file():
        # A text file would be one document, of which nothing can be held out.
        lines = " --format lines" if path.suffix in ("", ".txt", ".md") else ""
        out = f"data/{shlex.quote(path.name.split('.')[0] or 'mine')}"
        raise UserError(
            f"{field}: {folder!r} is a file; make a corpus of it: head-schedules prepare "
            f"--text {shlex.quote(folder)}{lines}{more} --out {out}"
        )
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    builtin = "builtin, " if field == "data" else ""
    here = "" if path.is_absolute() else f" in {Path.cwd()}"
    raise UserError(
        f"{field}: {folder!r} is not a folder{here}; valid: {builtin}one written by head-schedules prepare, "
        f"or the prefix of a .bin/.idx pair{suggest(path.name, siblings)}"
    )


def _check_data_root(root: Path) -> None:
    """Reject a folder into which a built-in corpus cannot be written, unless it already holds one."""
    if root.is_dir() and any(root.glob("*-*/meta.json")):
        return
    existing = nearest_existing(root)
    if not existing.is_dir():
        raise UserError(f"data_root: {str(existing)!r} is a file; give a folder for the built-in corpus")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"data_root: {str(existing)!r} cannot be written; give another folder for the built-in corpus"
        )
