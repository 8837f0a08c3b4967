"""Section: the settings that an extension adds to RunConfig, and what follows from them before anything is
built."""

from __future__ import annotations

from typing import Any

from model.config import ModelConfig


class Section:
    """Base of an extension's settings, a ``declared`` class whose fields become fields of RunConfig.

    Its functions get the whole RunConfig, as *run*. Nothing heavy may be imported by its module.
    """

    @staticmethod
    def check(run: Any) -> None:
        """Refuse settings that contradict each other.

        Raises:
            UserError: it names the field, its value and what would be valid.
        """

    @staticmethod
    def first_model(run: Any, model: ModelConfig) -> ModelConfig:
        """The model of step 0, where *model* is what the other settings describe.

        Raises:
            UserError: the model is none that the extension can begin with.
        """
        return model

    @staticmethod
    def largest_model(run: Any, model: ModelConfig) -> ModelConfig:
        """The largest that *model* may become while the run trains. Memory, batch and buckets are planned for
        it."""
        return model

    @staticmethod
    def releases() -> tuple[str, ...]:
        """What may end a learning-rate rule, for its field ``release``: the extension writes when into the
        state."""
        return ()
