"""Runs tasks by name through lm-eval's Python API, without changing the caller's random state."""

from __future__ import annotations

import functools
import logging
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import lm_eval.api.model
import lm_eval.api.task
import numpy as np
import torch
from lm_eval import evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from model.errors import UserError, quote
from pretrain.evaluation.checks import GROUPS, SUFFIXES, find_library_folders, is_group_file
from pretrain.evaluation.data_sets import use_data_sets
from pretrain.evaluation.language_model import read_answer_length

if TYPE_CHECKING:
    from lm_eval.tasks._index import Entry

SEED = 1234
OWN_FOLDER = Path(__file__).parent


@functools.cache
def task_manager(tasks: str, include_path: str | None = None) -> TaskManager:
    """Index what lm-eval needs to load *tasks*: the folders that name them. If these do not have everything,
    all 14,000 files of lm-eval, which take it seconds to read. Cached.

    Args:
        tasks: names, groups and YAMLs, as in the command.
        include_path: a folder with more task YAMLs, whose names come before lm-eval's own.

    Raises:
        UserError: a group names no task.
    """
    asked = (name.strip() for name in tasks.split(","))
    names = [task for name in asked for task in GROUPS.get(name, (name,))]
    more = [] if include_path is None else [include_path]
    folders: list[str] = []
    manager: TaskManager | None = None
    wanted, whole = set(names), False
    while True:
        found = sorted({*folders, *find_library_folders(wanted)})
        if manager is not None and found == folders:
            return manager if whole else TaskManager(include_path=more)
        folders = found
        # lm-eval keeps the first of equal names in a folder, and the last of several folders.
        manager = TaskManager(include_path=[*reversed(folders), *more], include_defaults=False)
        wanted, whole = _with_members(names, manager)


def _with_members(names: Sequence[str], manager: TaskManager) -> tuple[set[str], bool]:
    """Tasks and groups with what groups name, and whether the manager knows all of them."""
    found: set[str] = set()
    left, whole = list(names), True
    while left:
        name = left.pop()
        if name.endswith(SUFFIXES):
            whole &= Path(name).is_file() and not is_group_file(name)
        elif name not in found:
            found.add(name)
            entry = manager.task_index.get(name)
            whole &= entry is not None and name not in manager.all_tags  # whose tasks may be anywhere
            for member in _members(entry) if entry and name in manager.all_groups else []:
                if isinstance(member, str):
                    left.append(member)
                else:
                    whole = False
    return found, whole


def _members(group: Entry) -> list[Any]:
    members = (group.cfg or {}).get("task")
    if not members or not isinstance(members, (str, list)):
        raise UserError(
            f"tasks: the group {group.name!r} of {group.yaml_path} names none (task: {members}); give it a "
            "list, such as task: [piqa, arc_easy]"
        )
    return [members] if isinstance(members, str) else members


def quiet_lm_eval() -> None:
    """Errors only, and no progress bars: every rank would draw its own."""
    datasets.disable_progress_bars()
    for name in ("lm_eval", "lm-eval"):
        logging.getLogger(name).setLevel(logging.ERROR)
    modules: list[Any] = [lm_eval.api.model, lm_eval.api.task]
    for module in modules:
        module.tqdm = lambda items, **options: items


def load_tasks(tasks: Sequence[str], manager: TaskManager, data_dir: Path | None) -> Any:
    """Load tasks with their data sets, from *data_dir* or (None) the hub; lm-eval's TaskDict.

    Raises:
        UserError: a data set is missing, or a task runs code that the model writes, or shows images.
    """
    quiet_lm_eval()
    with _preserve_random_state(), use_data_sets(data_dir):
        _seed()
        loaded = _load(tasks, manager)
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise UserError(
                f"tasks: {name} runs code that the model writes, or shows images; valid: tasks that are "
                "scored by likelihood or by text, such as the group papers"
            )
    return loaded


def check_answers(loaded: Any, max_length: int) -> None:
    """Reject tasks whose answers leave no room for the text in a context of *max_length*.

    Raises:
        UserError: it names the task.
    """
    for name, task in loaded["tasks"].items():
        if getattr(task, "OUTPUT_TYPE", None) == "generate_until":
            read_answer_length(f"{name}: an", task.get_config("generation_kwargs") or {}, max_length)


def score(
    lm: LM, loaded: Any, limit: int | None = None, bootstrap: int = 1000, shots: int | None = None
) -> dict[str, Any]:
    """Score *lm* on what load_tasks returned, which can be used again. Collective.

    Args:
        shots: solved items before each; None keeps the task's own number, or 0 if it has none. As in lm-eval,
            a task with 0 keeps it.
        limit: at most this many items of each task.
        bootstrap: samples for the standard errors that need them; 0 leaves these out.

    Returns:
        lm-eval's results, the same on every rank.

    Raises:
        UserError: lm-eval cannot make questions or answers of an item.
    """
    with _preserve_random_state():
        _seed()
        for task in loaded["tasks"].values():
            task_shots = task.get_config("num_fewshot")
            if shots is not None and task_shots != 0:
                task.set_config(key="num_fewshot", value=shots)
            elif task_shots is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=SEED)
        # Not simple_evaluate: it returns nothing where LOCAL_RANK > 0, and describes the machine for seconds.
        try:
            results = evaluate(lm, loaded, limit=limit, bootstrap_iters=bootstrap, log_samples=False)
        except Exception as error:
            _, *frames = traceback.extract_tb(error.__traceback__)
            if any(Path(frame.filename).parent == OWN_FOLDER for frame in frames):
                raise  # of the model
            raise UserError(
                f"tasks: an item of {','.join(loaded['tasks']):.200} cannot be scored "
                f"({type(error).__name__}: {quote(error, 120, plain=True)}); check the data set"
            ) from error
        for task in loaded["tasks"].values():
            task._instances = None  # every request and answer
    return results or {}


def _seed() -> None:
    """The seeds that lm-eval's own command sets."""
    random.seed(0)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def save_data_sets(tasks: Sequence[str], manager: TaskManager, data_dir: Path) -> None:
    """Fetch and save everything that *tasks* read.

    Raises:
        UserError: something cannot be fetched or written.
    """
    with use_data_sets(data_dir, save=True):
        _load(tasks, manager)


def _load(tasks: Sequence[str], manager: TaskManager) -> Any:
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)  # what they log of an error comes with the exception
        return manager.load(list(tasks))
    except UserError:
        raise
    except Exception as error:  # no network, a damaged file, a task's code that needs another library
        reason = " ".join(str(error).split())
        valid = "leave out a task that is also in a group"
        if "Duplicate" not in reason:
            valid = "without internet: head-schedules evaluate save --tasks … --data_dir DIR elsewhere, then "
            valid += "--data_dir"
        raise UserError(
            f"tasks: {','.join(tasks)} cannot be loaded ({type(error).__name__}: {reason:.200}); {valid}"
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def drop_subtasks(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """lm-eval's scores by task, with groups instead of their many subtasks. Groups without a score, whose
    YAML has no aggregate_metric_list, are left out, and their subtasks stay."""
    scored = {name: each for name, each in results["results"].items() if any("," in key for key in each)}
    groups = results.get("group_subtasks", {}).items()
    subtasks = {name for group, names in groups if group in scored for name in names}
    return {name: each for name, each in scored.items() if name not in subtasks}


def headline(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores as ``task/metric`` -> value; a metric that a task has of several filters, as
    ``task/metric,filter``."""
    scores = {}
    for task, values in drop_subtasks(results).items():
        known = [
            (key.partition(",")[0], key, value)
            for key, value in values.items()
            if "," in key and isinstance(value, int | float)
        ]
        filters = Counter(metric for metric, _, _ in known)
        for metric, key, value in known:
            if not metric.endswith("_stderr"):
                scores[f"{task}/{metric if filters[metric] == 1 else key}"] = float(value)
    return scores


@contextmanager
def _preserve_random_state() -> Iterator[None]:
    """Restore Python's, numpy's and torch's random states, which lm-eval seeds and training must keep."""
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
