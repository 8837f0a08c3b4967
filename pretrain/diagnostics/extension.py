"""Diagnostics as an extension of a run: measurements by layer, and the release of rules by maturity."""

from __future__ import annotations

from pretrain.diagnostics.in_loop import Diagnostics
from pretrain.diagnostics.maturity import Maturity
from pretrain.run.extension import Extension
from pretrain.run.hooks import Hook
from pretrain.run.session import Session


class Diagnosing(Extension):
    """What diagnostics bring to a run."""

    name = "diagnostics"

    def hooks(self, session: Session) -> list[Hook]:
        """Maturity first: the step at which it releases a rule is one whose weights diagnostics keep."""
        diagnostics = Diagnostics(session)
        session.notes += diagnostics.notes
        return [Maturity(session), diagnostics]
