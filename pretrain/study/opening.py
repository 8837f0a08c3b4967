"""Opens a study by its name, file, folder or record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.config.run_config import is_folder_name
from pretrain.study.file import find_study
from pretrain.study.planned import Study
from pretrain.study.planning import read_study
from pretrain.study.results import load_study


def open_study(
    name: str, out: Path | None = None, settings: Mapping[str, Any] | None = None, check_runs: bool = True
) -> Study:
    """The study of a name, a file, an archive (a file that ends with .json) or a folder.

    Args:
        out: the folder of its runs; of a name or a file ``runs/NAME`` by default.
        settings: replace those of the file.
        check_runs: as for parse_study.

    Raises:
        UserError: bad input.
    """
    path = Path(name)
    if path.suffix == ".json":
        from pretrain.study.archive import read_archive

        return read_archive(path, out, settings)
    if path.is_dir():
        if out is not None and os.path.realpath(out) != os.path.realpath(path):
            raise UserError(
                f"out: {str(out)!r} and the folder {name!r}: give one, or the study's file with another --out"
            )
        return load_study(path, check_runs, settings)
    file = find_study(name)
    folder = out or Path("runs") / file.stem
    if not is_folder_name(Path(os.path.realpath(folder)).name):
        raise UserError(
            f"out: {str(folder)!r} is not valid; give a folder whose name does not begin with a dot"
        )
    return read_study(file, folder, source=name, settings=settings, check_runs=check_runs)
