"""A text source whose validation text is a second source."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from model.errors import UserError
from pretrain.prepare.sources.plain_files import PlainFiles
from pretrain.prepare.sources.text_source import Document, TextSource, Unit


@dataclass
class WithValidation(TextSource):
    """Joins a *training* and a *validation* source: nothing of the first is held out.

    The units of *validation* come first. So a cap on tokens takes it whole, and of documents with equal text
    those of the training source are dropped as duplicates.
    """

    training: TextSource
    validation: TextSource

    def __post_init__(self) -> None:
        self.name = self.training.name

    def units(self) -> list[Unit]:
        settings = self.validation.settings()
        held_out = [
            Unit(f"validation {settings} {unit.key}", unit.size, ("validation", unit))
            for unit in self.validation.units()
        ]
        return held_out + [Unit(unit.key, unit.size, ("training", unit)) for unit in self.training.units()]

    def read(self, unit: Unit) -> Iterator[Document | str]:
        kind, inner = unit.place
        return (self.validation if kind == "validation" else self.training).read(inner)

    def check(self) -> None:
        """Check both; raise UserError for a file that is in both."""
        self.training.check()
        self.validation.check()
        if isinstance(self.training, PlainFiles) and isinstance(self.validation, PlainFiles):
            held_out = {os.path.realpath(path) for _, path in self.validation.files}
            for _, path in self.training.files:
                if os.path.realpath(path) in held_out:
                    raise UserError(
                        f"validation_text: {str(path)!r} is in --text too; valid: text that is not trained "
                        "on, such as a file in another folder"
                    )

    def documents(self) -> Iterator[Document]:
        return self.training.documents()

    def held_out_units(self) -> int:
        return len(self.validation.units())

    def settings(self) -> str:
        return self.training.settings()

    def fingerprint(self) -> str:
        fingerprints = f"{self.training.fingerprint()} validation {self.validation.fingerprint()}"
        return hashlib.sha256(fingerprints.encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        return {**self.training.describe(), "validation": self.validation.describe()}
