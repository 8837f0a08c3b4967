"""Lengths of a run that users give as a fraction of it (below 1) or in steps."""

from __future__ import annotations

from model.errors import UserError


def length_in_steps(name: str, value: float, steps: int) -> int:
    """Turn a length given as a fraction of the run (below 1) or in steps into steps.

    Raises:
        UserError: a length in steps that is not a whole number.
    """
    if value < 1:
        return round(value * steps)
    if value != int(value):
        raise UserError(f"{name}: {value} is neither a fraction below 1 nor a whole number of steps")
    return int(value)


def step_of_run(name: str, value: float, steps: int) -> int:
    """The step of a run that is so long after its beginning, as length_in_steps reads it.

    Raises:
        UserError: as length_in_steps, and a step beyond the run.
    """
    step = length_in_steps(name, value, steps)
    if step > steps:
        raise UserError(f"{name}: step {step} is beyond the run of {steps} steps")
    return step


def phase_in_steps(name: str, value: float, steps: int) -> int:
    """length_in_steps for a phase that may last the whole run.

    Raises:
        UserError: exactly 1, which is one step by that rule, but may be meant as a fraction: the whole run.
    """
    if value == 1 and steps > 1:
        raise UserError(
            f"{name}: {value} may mean one step or the whole run; write {1 / steps:.3g} for one step of the "
            f"run's {steps}, {steps} for all of them"
        )
    return length_in_steps(name, value, steps)
