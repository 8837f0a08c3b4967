"""Packages that a bare install lacks, and the line that says what to install."""

from __future__ import annotations

import importlib.util

from model.errors import UserError

EXTRAS = {
    "accelerate": "eval",
    "datasets": "data",
    "gcsfs": "gcs",
    "jinja2": "study",
    "lm_eval": "eval",
    "pandas": "study",
    "patsy": "study",
    "s3fs": "s3",
    "statsmodels": "study",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""Packages that a bare install lacks, each with the extra of this project that brings it."""


def make_missing_error(package: str) -> UserError:
    """What to install to have a package of EXTRAS."""
    return UserError(f"{package}: not installed; pip install 'head-schedules[{EXTRAS[package]}]'")


def check_installed(package: str, setting: str) -> None:
    """Refuse a setting that needs a package of EXTRAS.

    Raises:
        UserError: the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{setting}: {make_missing_error(package)}, or leave it out")


def explain_missing(error: BaseException) -> UserError | None:
    """What to install, if *error* is the failed import of a package in EXTRAS."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return make_missing_error(package) if package in EXTRAS else None
