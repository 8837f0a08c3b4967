"""What pilots read and write: study files made from the study's, and records of what was chosen."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from model.declared import from_dict
from pretrain.study.contrasts import full_name
from pretrain.study.settings import OF_A_VARIANT, Settings
from pretrain.utils.files import write_atomically
from pretrain.utils.parsing import format_yaml, read_json

T = TypeVar("T")
NOT_OF_PILOTS = {"tune", "rates", "halving", "pilot_seeds", "contrasts", "hours"}
"""What a study file says of its own runs alone."""


def pilot_file(
    file: Mapping[str, Any],
    seeds: Sequence[int],
    title: str,
    variants_of: Callable[[str, str, Settings], dict[str, Settings]],
) -> str:
    """The study file of pilots.

    Args:
        file: the study's file, in plain values; its comparisons are changed.
        seeds: the pilots'.
        variants_of: the pilots' variants in place of one of the study's, from its full name, its own name and
            its settings. Where none of them is the baseline, the first of a comparison is.
    """
    for name, own in (file["comparisons"] or {"": file}).items():
        variants: dict[str, Settings] = {}
        for variant, given in own["variants"].items():
            settings = {key: value for key, value in (given or {}).items() if key not in OF_A_VARIANT}
            variants |= variants_of(full_name((name, variant)), variant, settings)
        own["variants"] = variants
        if own["baseline"] not in variants:
            own["baseline"] = next(iter(variants))
    kept = {key: value for key, value in file.items() if value is not None and key not in NOT_OF_PILOTS}
    return format_yaml(kept | {"seeds": list(seeds), "title": title})


def read_record(path: Path, kind: type[T], empty: T) -> T:
    """What was written at *path*, of any type that pydantic knows; *empty* if there is no file.

    Raises:
        UserError: the file is not one of these.
    """
    return from_dict(kind, read_json(path, "study"), f"study: {path}") if path.exists() else empty


def write_record(path: Path, plain: Any) -> None:
    """Write plain values as JSON, whole or not at all."""
    write_atomically(path, json.dumps(plain, indent=1) + "\n")
