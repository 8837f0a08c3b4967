"""What a study costs as planned: FLOPs, and hours at the speed of a pilot's runs or at an assumed one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.study.power.spread import Spread
from pretrain.study.scheduler import planned_flops
from pretrain.study.study_file import Study

UTILISATION = {"cuda": 0.4, "cpu": 0.06}
"""Assumed share of the device's peak, where no pilot says how fast runs are. On CPUs a guess: runs of a million
parameters, not compiled, reached 5 to 8 % of the peak of two cores; larger or compiled ones may reach more."""
SIZES_APART = 3.0
"""Runs whose FLOPs differ by more than this factor may spread otherwise, and be faster or slower."""


@dataclass(frozen=True)
class Costs:
    """FLOPs and hours of a whole study, as planned."""

    runs: int
    least: float
    """FLOPs of the run that takes fewest."""
    most: float
    total: float
    upper_bound: bool
    """Whether runs grow: their FLOPs are then those of the largest model that they may become."""
    rate: float
    """FLOP/s of one run."""
    rate_source: str
    at_a_time: int
    """Runs at a time, each at that rate."""
    hours: float
    """Of training, without validation, diagnostics and checkpoints."""
    budget: float | None
    """Hours; None if the study does not say."""
    machine: str
    """What the budget is for."""
    fitting: int | None
    """Seeds that fit into the budget here."""


def study_costs(study: Study, spreads: Sequence[Spread], parallel: int) -> Costs:
    """The costs of *study* with *parallel* runs at a time, at the speed of the first pilot that has one."""
    flops = [planned_flops(planned) for planned in study.runs]
    known = next((spread for spread in spreads if not math.isnan(spread.rate)), None)
    if known:
        rate, at_a_time = known.rate, parallel
        where = f" on {known.device}" if known.device else ""
        source = f"median of the runs in {known.folder}{where}"
    else:
        rate, source, shared = machine_rate()
        at_a_time = 1 if shared else parallel
    total = sum(flops)
    hours = total / rate / at_a_time / 3600
    return Costs(
        runs=len(flops),
        least=min(flops),
        most=max(flops),
        total=total,
        upper_bound=any(planned.run.growth.active for planned in study.runs),
        rate=rate,
        rate_source=source,
        at_a_time=at_a_time,
        hours=hours,
        budget=study.hours,
        machine=study.machine,
        fitting=None if study.hours is None else int(len(study.seeds) * study.hours / hours + 1e-9),
    )


def machine_rate() -> tuple[float, str, bool]:
    """FLOP/s of a run on this machine by assumption, where they are from, and whether runs at a time share them."""
    import torch

    from pretrain.runtime.hardware import detect_device, peak_flops, supports_bf16

    device = detect_device()
    peak, source = peak_flops(device, torch.bfloat16 if supports_bf16(device)[0] else torch.float32)
    share = UTILISATION.get(device.type, UTILISATION["cuda"])
    text = f"a guess, not measured: {share:.0%} of the peak of {peak:.2e} FLOP/s here ({source})"
    return share * peak, text, device.type == "cpu"


def carry_over_notes(study: Study, spread: Spread) -> list[str]:
    """Why a pilot's spread and speed may not be those of the study's runs, a sentence each, without its full stop."""
    notes = []
    if spread.flops:
        own = [planned_flops(planned) for planned in study.runs]
        if max(own) > SIZES_APART * spread.flops[1] or SIZES_APART * min(own) < spread.flops[0]:
            notes.append(
                f"its runs take {_range(*spread.flops)} FLOPs, those of {study.name} {_range(min(own), max(own))}: "
                "spread and speed may not carry over"
            )
    if spread.device:
        from pretrain.runtime.hardware import detect_device

        here = detect_device().type
        if spread.device != here:
            notes.append(
                f"its runs were on {spread.device}, and this machine has {here}: speed will not carry over"
            )
    return notes


def _range(least: float, most: float) -> str:
    return f"{least:.2e}" + (f" to {most:.2e}" if most > least else "")
