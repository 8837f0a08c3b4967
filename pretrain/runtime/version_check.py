"""Checks that all ranks run the same code with the same packages; nodes that differ fail in obscure ways."""

from __future__ import annotations

import hashlib
import platform
import socket
from importlib import metadata
from pathlib import Path

from model.errors import UserError
from pretrain.runtime.world import World

ROOT = Path(__file__).resolve().parents[2]
NOT_IN_RUNS = ("presets.py", "study")
PACKAGES = ("torch", "deepspeed", "megatron-core", "numpy", "sentencepiece", "transformers")


def check_agreement(world: World, configuration: str) -> None:
    """Compare code, packages and configuration of all ranks. Collective.

    Args:
        configuration: the run's configuration as text; nodes that read different files have different ones.

    Raises:
        UserError: on every rank, naming what differs and the hosts that differ from rank 0's.
    """
    own_entry = {
        "host": socket.gethostname(),
        **fingerprint(),
        "the run's configuration": _hash(configuration.encode()),
    }
    entries = world.gather(own_entry)
    for what, value in entries[0].items():
        others = {entry["host"]: entry[what] for entry in entries if entry[what] != value}
        if others and what != "host":
            listed = ", ".join(f"{other} on {host}" for host, other in sorted(others.items())[:5])
            raise UserError(
                f"nodes: {what} differs: {value} on {entries[0]['host']}, {listed}; "
                "all nodes need the same code and packages"
            )


def fingerprint() -> dict[str, str]:
    """What must be equal on all ranks: versions, and a hash of this program's code."""
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "missing"
    return versions | {"the code of model/ and pretrain/": code_hash()}


def code_hash() -> str:
    """A short hash of the Python files of model/ and pretrain/, without those that take no part in runs."""
    apart = [ROOT / "pretrain" / name for name in NOT_IN_RUNS]
    files = [
        path
        for folder in ("model", "pretrain")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(path.is_relative_to(other) for other in apart)
    ]
    return _hash(b"".join(path.relative_to(ROOT).as_posix().encode() + path.read_bytes() for path in files))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
