"""Builds the hooks that a run's settings ask for, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from model.errors import UserError, quote
from pretrain.classification.hook import AccuracyHook
from pretrain.diagnostics.in_loop import Diagnostics
from pretrain.diagnostics.maturity import Maturity
from pretrain.growth.hook import Growth
from pretrain.growth.record import NAME as GROWTH
from pretrain.profiling.hook import FOLDER, Profiler
from pretrain.run.hooks import Hook
from pretrain.run.resume import check_records
from pretrain.run.session import Session
from pretrain.validation.hook import ValidationHook


def build_hooks(session: Session, own: Iterable[Callable[[Session], Hook]] = ()) -> list[Hook]:
    """The hooks of a session. Collective.

    Args:
        own: the user's; each is called with the session and gives a hook.

    Raises:
        UserError: settings that a hook cannot act by, or a record of the checkpoint that no hook reads.
    """
    run, world = session.run, session.world
    hooks: list[Hook] = []
    if run.validation.every:
        hooks.append((AccuracyHook if run.task == "classification" else ValidationHook)(session))
    if run.evaluation.every:
        from pretrain.evaluation.in_loop import EvaluationHook  # lm-eval takes seconds to import

        hooks.append(EvaluationHook(session))
    # Maturity first: the step at which it releases a rule is one whose weights diagnostics keep.
    hooks += [Maturity(session), Diagnostics(session)]
    grows = run.growth.active or bool(session.state.record(GROWTH))
    if steps := run.profiled_steps():
        hooks.append(Profiler(*steps, run.folder / FOLDER, world.rank, world.device))
    hooks += [make(session) for make in own]
    if grows:  # last, since the others measure the model that the step has trained
        hooks.append(Growth(session))
    names = [hook.name for hook in hooks]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"hooks: two are called {quote(name)}; give each its own name")
    check_records(session.state, hooks)
    return hooks
