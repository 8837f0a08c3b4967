"""Builds the hooks that a run's settings ask for, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from model.errors import UserError, quote
from pretrain.diagnostics.in_loop import Diagnostics
from pretrain.diagnostics.maturity import Maturity
from pretrain.diagnostics.spectral_rates import NAME as LLR
from pretrain.diagnostics.spectral_rates import SpectralRates
from pretrain.growth.record import NAME as GROWTH
from pretrain.run.hooks import Hook
from pretrain.run.resume import check_records
from pretrain.run.session import Session
from pretrain.validation.hook import ValidationHook


def build_hooks(session: Session, own: Iterable[Callable[[Session], Hook]] = ()) -> list[Hook]:
    """The hooks of a session, whose modules are imported where they are asked for. Collective.

    Args:
        own: the user's hook classes or functions; each is called with the session and returns a hook.

    Raises:
        UserError: settings that a hook cannot act by, or a record of the checkpoint that no hook reads.
    """
    run, world = session.run, session.world
    hooks: list[Hook] = []
    if run.validation.every and run.task == "classification":
        from pretrain.classification.hook import AccuracyHook

        hooks.append(AccuracyHook(session))
    elif run.validation.every:
        hooks.append(ValidationHook(session))
    if run.evaluation.every:
        from pretrain.evaluation.in_loop import EvaluationHook

        hooks.append(EvaluationHook(session))
    # Maturity first: the step at which it releases a rule is one whose weights diagnostics keep.
    hooks += [Maturity(session), Diagnostics(session)]
    if run.llr.active:
        hooks.append(SpectralRates(session))
    else:
        session.state.records.pop(LLR, None)  # turned on again, it begins with a measurement
    if steps := run.profiled_steps():
        from pretrain.profiling.hook import FOLDER, Profiler

        hooks.append(Profiler(*steps, run.folder / FOLDER, world.rank, world.device))
    if run.checkpoint.mirror:
        from pretrain.mirror.hook import MirrorHook

        hooks.append(MirrorHook(session))
    hooks += [make(session) for make in own]
    if run.growth.active or session.state.record(GROWTH):
        from pretrain.growth.hook import Growth

        hooks.append(Growth(session))  # last: the others measure the model that the step has trained
    for hook in hooks:
        if not isinstance(getattr(hook, "name", None), str):
            raise UserError(f"hooks: {type(hook).__name__} has no name; give the class a text called name")
    names = [hook.name for hook in hooks]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"hooks: two are called {quote(name)}; give each its own name")
    check_records(session.state, hooks)
    return hooks
