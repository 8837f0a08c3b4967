"""Recognizes the folders that commands make, so that none is taken for, or filled as, one of another kind."""

from __future__ import annotations

from pathlib import Path

from model.errors import UserError

KINDS = {
    "run": ("a run", ("checkpoints", "decisions.json")),
    "study": ("a study", ("study.yaml",)),
    "corpus": ("a corpus", ("meta.json",)),
    "model": (
        "a Hugging Face model or tokenizer",
        ("config.json", "tokenizer_config.json", "tokenizer.json"),
    ),
}
"""What each kind is called, and the files and folders of which one is in such a folder alone."""


def detect_kinds(folder: Path) -> set[str]:
    """The keys of KINDS whose files are in *folder*; none of an empty or unknown folder, or where there is
    none."""
    return {kind for kind, (_, names) in KINDS.items() if any((folder / name).exists() for name in names)}


def refuse_other_kind(folder: Path, kind: str, option: str) -> None:
    """Refuse a folder to write that is of another kind than *kind*.

    Args:
        option: the command's option that gives another folder, for the message.

    Raises:
        UserError: it names the folder's kind.
    """
    try:
        found = detect_kinds(folder)
    except OSError:  # reported where it is written
        return
    if found and kind not in found:
        what = " and ".join(KINDS[each][0] for each in KINDS if each in found)
        raise UserError(
            f"{option}: {str(folder)!r} is the folder of {what}, not of {KINDS[kind][0]}; give another "
            f"--{option}"
        )
