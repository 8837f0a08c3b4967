"""Checks threads, paths and batch, before heavy imports and before the ranks connect."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from model.errors import UserError, closest
from model.process_grid import check_world
from pretrain.checkpoint.object_store import check_mirror
from pretrain.config.run_config import RunConfig
from pretrain.data.blend import parse_blend
from pretrain.data.megatron import is_prefix
from pretrain.engine.batch import share_batch
from pretrain.runtime.environment import check_threads, environment_rank, read_environment
from pretrain.utils.extras import check_installed
from pretrain.utils.folders import refuse_other_kind
from pretrain.utils.variables import check_variables


def check_start(run: RunConfig) -> None:
    """Refuse a run that could not begin on this machine, in this launch.

    Raises:
        UserError: see read_environment and check_threads; a corpus that does not exist, to train or to
            validate on, a data_root that cannot be written, a batch that the ranks cannot share, a run
            folder of another kind, tasks that lm-eval does not know.
    """
    launch = read_environment()
    refuse_other_kind(run.folder, "run", "name")
    check_threads(run.threads)
    if run.logging.wandb != "disabled":
        check_variables("wandb")
    if run.logging.wandb in ("online", "offline"):
        check_installed("wandb", "logging.wandb")
    if run.logging.tensorboard:
        check_installed("tensorboard", "logging.tensorboard")
    if run.checkpoint.mirror is not None:
        check_mirror(run.checkpoint.mirror)
    if run.data == "builtin":
        _check_data_root(Path(run.data_root))
    else:
        for folder, _ in parse_blend(run.data):
            _check_corpus(folder, "data")
    for folder, _ in parse_blend(run.validation.data) if run.validation.data is not None else ():
        _check_corpus(folder, "validation.data")
    check_world(launch.size, run.tensor_parallel)
    share_batch(
        run.global_batch_tokens,
        run.micro_batch,
        run.build_model_config().context_length,
        launch.size // run.tensor_parallel,
    )
    if run.evaluation.every:
        _check_evaluation(run)


def _check_evaluation(run: RunConfig) -> None:
    """Refuse unknown tasks and folders that are missing. The first rank reads lm-eval's files for all."""
    if environment_rank():
        return
    from pretrain.evaluation.checks import check_tasks, existing_data_dir

    check_installed("lm_eval", "evaluation.every")
    try:
        check_tasks(run.evaluation.tasks, run.evaluation.include_path)
        existing_data_dir(run.evaluation.data_dir)
    except UserError as error:
        raise UserError(f"evaluation.{error}") from None  # its fields are those of the command


def check_settings(run: RunConfig) -> None:
    """Refuse settings that do not fit each other; data, ranks and machine are not looked at.

    Raises:
        UserError: see RunConfig.build_model_config, check_tensor_parallel and share_batch; rules, or a
            release, that do not fit the model or the run.
    """
    from model.parallel_plan import check_tensor_parallel
    from pretrain.optim.groups import GroupRates, run_groups  # imports torch

    model = run.build_model_config()
    check_tensor_parallel(model, run.tensor_parallel, sequence_parallel=run.sequence_parallel)
    share_batch(run.global_batch_tokens, run.micro_batch, model.context_length, 1)
    # Without rules every parameter follows the base schedule, whatever the model is.
    GroupRates(run_groups(run, model) if run.lr_rules else [], run)


def _check_corpus(folder: str, field: str) -> None:
    path = Path(folder)
    if path.suffix in (".bin", ".idx") and path.is_file():
        raise UserError(
            f"{field}: {folder!r} is one file of a .bin/.idx pair; give the prefix, "
            f"{folder.removesuffix(path.suffix)!r}, and --tokenizer"
        )
    if path.is_dir() or is_prefix(path):
        return
    if path.is_file():
        raise UserError(
            f"{field}: {folder!r} is a file; make a corpus of it: python -m pretrain.prepare "
            f"--text {shlex.quote(folder)} --out data/{shlex.quote(path.name.split('.')[0] or 'mine')}"
        )
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    builtin = "builtin, " * (field == "data")
    raise UserError(
        f"{field}: {folder!r} is not a folder; valid: {builtin}one written by python -m pretrain.prepare, or "
        f"the prefix of a .bin/.idx pair{closest(path.name, siblings)}"
    )


def _check_data_root(root: Path) -> None:
    """Refuse a folder into which a built-in corpus cannot be written, unless it already holds one."""
    if root.is_dir() and any(root.glob("*-*/meta.json")):
        return
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"data_root: {str(existing)!r} is a file; give a folder for the built-in corpus")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"data_root: {str(existing)!r} cannot be written; give another folder for the built-in corpus"
        )
