"""Checks what is asked of an evaluation before lm-eval and torch are imported."""

from __future__ import annotations

import errno
import functools
import glob
import importlib.util
import os
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from pathlib import Path

from model.errors import UserError, quote, suggest
from pretrain.config.sections import EvaluationConfig
from pretrain.utils.env_check import check_installed, make_missing_error
from pretrain.utils.files import read_regular
from pretrain.utils.parsing import MOST_BYTES, check_nesting

# The six tasks of the Prism paper (arXiv 2606.27449).
GROUPS = {"papers": ("hellaswag", "piqa", "winogrande", "arc_easy", "blimp", "wikitext")}
_NAMES = re.compile(rb"^[ \t]*[\"']?(?:task|group|tag)[\"']?[ \t]*:(.*(?:\n[ \t]*-.*)*)", re.MULTILINE)
_WORDS = re.compile(rb"[^\s\"',\[\]]+")
SUFFIXES = (".yaml", ".yml")
MOST_FILES = 100_000
"""Files of a folder of tasks; lm-eval's own has some 15,000."""


def check_evaluation(settings: EvaluationConfig) -> None:
    """Reject an evaluation in training that would fail later.

    Raises:
        UserError: lm-eval is not installed; tasks, or a folder, that do not exist.
    """
    check_installed("lm_eval", "evaluation.every")
    try:
        check_tasks(settings.tasks, settings.include_path)
        check_data_dir(settings.data_dir)
    except UserError as error:
        raise UserError(f"evaluation.{error}") from None  # its fields are those of the command


def check_tasks(tasks: str, include_path: str | None) -> None:
    """Reject names that no task file has. Takes a second, where lm-eval takes ten to read its own files.

    Raises:
        UserError: lm-eval is not installed; as resolve_tasks; *include_path* is not a folder; a task file
            there, or among *tasks*, is no regular file, or no YAML.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(
            f"include_path: {quote(include_path)} is not a folder; give one that holds task YAMLs"
        )
    known = set(library_files())
    if include_path is not None:
        known |= _find_names(_task_files(include_path), "include_path").keys()
    files = [name for name in resolve_tasks(tasks.split(","), known) if name.endswith(SUFFIXES)]
    _find_names(files, "tasks")


@functools.cache  # some 15,000 files; a study asks for every variant
def library_files() -> dict[str, list[str]]:
    """Names that lm-eval's own task files may define, with the files.

    Raises:
        UserError: it is not installed.
    """
    root = _library_root()
    return _find_names(_task_files(root) if root else [])


def find_library_folders(names: Iterable[str]) -> list[str]:
    """Return the folders among lm-eval's own that may define tasks, sorted as it reads them."""
    root = Path(_library_root())
    files = (Path(path).relative_to(root) for name in names for path in library_files().get(name, ()))
    return sorted({f"{root / file.parts[0]}/" for file in files if len(file.parts) > 1})


def _library_root() -> str:
    found = importlib.util.find_spec("lm_eval")
    if found is None:
        raise make_missing_error("lm_eval")
    folders = found.submodule_search_locations or []
    return f"{folders[0]}/tasks" if folders else ""


def is_group_file(path: str) -> bool:
    """Whether a task's YAML may be a group, which names other tasks."""
    return b"group" in read_regular(path, MOST_BYTES)


def resolve_tasks(names: Sequence[str], known: Collection[str]) -> list[str]:
    """Replace our groups by their tasks. A name that ends in .yaml is the file of a task.

    Args:
        known: the other names that are valid.

    Raises:
        UserError: an unknown name (with the closest one), a file that is missing, or no name at all.
    """
    tasks: list[str] = []
    for name in (name.strip() for name in names):
        if name.endswith(SUFFIXES):
            if not Path(name).is_file():
                raise UserError(f"tasks: there is no file {name!r}; give a task's YAML or its name")
            tasks.append(str(Path(name).absolute()))
            continue
        if name and name not in GROUPS and name not in known:
            # Ours first: among lm-eval's thousands of names a typing error finds obscure ones.
            ours = [*GROUPS, *GROUPS["papers"]]
            hint = suggest(name, ours) or suggest(name, known) or "; give lm-eval's names"
            raise UserError(f"tasks: {quote(name)} is unknown{hint}")
        tasks += GROUPS.get(name, (name,) if name else ())
    if not tasks:
        raise UserError("tasks: none given; give names such as hellaswag,piqa or the group papers")
    return list(dict.fromkeys(tasks))


def check_data_dir(data_dir: str | None) -> Path | None:
    """*data_dir* as a path; None: the hub or its cache.

    Raises:
        UserError: it is not a folder.
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        raise UserError(
            f"data_dir: {quote(data_dir)} is not a folder; head-schedules evaluate save writes one"
        )
    return None if data_dir is None else Path(data_dir)


def _task_files(root: str) -> list[str]:
    """The files in a folder that lm-eval reads: tasks, and what they include, which has no suffix."""
    pattern = f"{glob.escape(root)}/**/*"
    found = list(islice(glob.iglob(pattern, recursive=True, include_hidden=True), MOST_FILES))  # noqa: PTH207
    if len(found) == MOST_FILES:
        raise UserError(
            f"include_path: {quote(root)} holds {MOST_FILES:,} files or more; give a folder of tasks"
        )
    return [path for path in found if path.endswith(".yaml") or "." not in path.rpartition("/")[2]]


def _find_names(files: Iterable[str], field: str | None = None) -> dict[str, list[str]]:
    """Names of tasks, groups and tags that files may define, and some other words besides, with the files.

    Args:
        field: what the files were given as, for messages; None for lm-eval's own, which are not checked.
    """
    words: dict[bytes, list[str]] = {}
    for path in files:
        try:
            data = read_regular(path, MOST_BYTES)
        except OSError as error:
            # lm-eval would wait for a pipe, and hold a long file; it passes over what cannot be read.
            unwanted = error.errno in (errno.EINVAL, errno.EFBIG)
            if field and unwanted and not os.path.isdir(path):  # noqa: PTH112
                raise UserError(f"{field}: {quote(path)} {error.strerror}") from None
            continue
        if field:
            check_nesting(data.decode("utf-8", "replace"), f"{field}: {quote(path, plain=True)}")
        for word in {word for written in _NAMES.findall(data) for word in _WORDS.findall(written)}:
            words.setdefault(word, []).append(path)
    return {word.decode("utf-8", "replace"): paths for word, paths in words.items()}
