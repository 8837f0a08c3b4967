"""The settings of diagnostics: what is measured while training, and when the lower layers count as
settled."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any

from pydantic import Field

from model.declared import Count, FromZero, Positive, PositiveNumber, declared
from pretrain.config.section import Section
from pretrain.optim.schedule import step_of_run


@declared("diagnostics")
class DiagnosticsConfig:
    """What --diagnostics_every measures, and on what. See docs/diagnostics.md."""

    sequences: Positive = 8
    """Held-out windows that are read each time."""
    positions: Positive = 64
    """Positions of each window that are compared to see features drift."""
    release: FromZero | None = None
    """Step (or fraction of the run) whose W_Q and W_K are kept, to tell how far they move from there; when
    not given, the end of the first slow-down of W_Q or W_K by a rule, if one ends. For controls, that of the
    run that they are compared with."""


@declared("maturity")
class MaturityConfig:
    """When the lower half of the layers counts as settled, for rules with release: maturity.

    See pretrain/diagnostics/maturity.py. The rule of arXiv 2605.10504 is not public; this one, and every
    number here, is ours.
    """

    every: PositiveNumber = 0.005
    """Steps (or fraction of the run) between two probes."""
    settled: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Settled is a drift between two probes of at most this share of the largest one so far."""
    patience: Positive = 2
    """Probes in a row that must find it so."""
    sequences: Positive = 8
    """Held-out windows that a probe reads."""
    positions: Positive = 64
    """Positions of each that are compared."""


@declared()
class DiagnosticsSettings(Section):
    """What diagnostics add to RunConfig."""

    diagnostics_every: Count = 250
    """Steps between measurements of attention, residual writes and the movement of weights; 0 turns them
    off."""
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    maturity: MaturityConfig = field(default_factory=MaturityConfig)

    @staticmethod
    def check(run: Any) -> None:
        """Refuse a release that is no step of the run."""
        if run.diagnostics.release is not None:
            step_of_run("diagnostics.release", run.diagnostics.release, run.steps)

    @staticmethod
    def releases() -> tuple[str, ...]:
        """Rules may be released by maturity."""
        return ("maturity",)
