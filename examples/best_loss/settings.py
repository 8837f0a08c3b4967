"""The settings of best_loss: light, since they are read before torch is imported."""

from __future__ import annotations

from model.declared import FromZero, declared
from pretrain.config.section import Section


@declared()
class BestLossSettings(Section):
    """What best_loss adds to RunConfig, and so to recipes and to the command line."""

    best_loss: bool = False
    """Remember the best validation loss, and say when it improves."""
    best_loss_margin: FromZero = 0.0
    """By how many nats a loss must be better to count."""
