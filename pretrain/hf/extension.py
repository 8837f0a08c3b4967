"""Hugging Face as an extension of a run: the command that exports it."""

from __future__ import annotations

from pretrain.run.extension import Extension
from pretrain.run.session import Session


class HuggingFace(Extension):
    """What the exports bring to a run."""

    name = "hf"

    def next_commands(self, session: Session) -> dict[str, list[str]]:
        """How to export the finished run."""
        if not session.data.is_text:
            return {}
        return {
            "convert": ["pretrain.convert", str(session.run.folder), "--out", f"hf/{session.run.run_name}"]
        }
