"""Learning rates that follow the spectra of the weights: LLR (arXiv 2605.22297).

A matrix whose singular values have a light tail counts as less trained and gets a higher rate. Every
``llr.every`` steps up to ``llr.until`` the tail exponent α of each matrix is estimated, and

    factor = low + (high - low) (α - least α) / (largest α - least α)

multiplies its learning rate, and with it AdamW's decay. The present factor moves to the new one linearly over
``llr.transition`` steps (the paper's code moves the rate itself so), and the last ones stay to the end of the
run. Embeddings and an untied head get the factor of the largest α of the others. Matrices of fewer than
``llr.least`` singular values, norms and biases keep the factor 1. Defaults are those of the scripts that the
authors released.

α of a random matrix depends on its aspect ratio alone, and head schedules change aspect ratios.
``llr.measure: excess`` takes α minus that of a random matrix of the same shape.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.config import ModelConfig
from model.declared import NonNegativeInt, PositiveFloat, declared, from_dict, to_dict
from model.parameters import ParameterSpec, parameter_specs
from pretrain.checkpoint.state import Record, TrainingState
from pretrain.config.sections import LLRConfig, length_in_steps
from pretrain.diagnostics.weights import OwnWeights
from pretrain.run.hooks import Hook, HookResult
from pretrain.run.session import Session
from pretrain.runtime.world import World
from pretrain.utils.format import log_line

NAME = "llr"
SETTINGS = ("apply", "measure", "low", "high", "least")
"""Fields of LLRConfig whose change is a reason to measure again."""
DRAWS = 8
"""Random matrices whose mean exponent stands for a shape."""


def tail_exponent(weight: Tensor) -> float:
    """α of a matrix's spectrum by Hill's estimate (PL_Alpha_Hill of the paper's code, in fp64).

    With λ_0 ≤ … ≤ λ_{N-1} the squared singular values, i = ⌊N / 2⌋ and n = N - i:
    α = 1 + n / (Σ_{j ≥ i} ln λ_j - n ln λ_i). It does not depend on the scale of the matrix. NaN where the
    upper half is not above zero or all equal.
    """
    values = torch.linalg.svdvals(weight.double()).flip(0).square()
    tail = values[len(values) // 2 :].log()
    excess = (tail - tail[0]).sum().item()
    return 1 + len(tail) / excess if math.isfinite(excess) and excess > 0 else math.nan


@functools.lru_cache(maxsize=1024)
def random_exponent(rows: int, cols: int) -> float:
    """The mean α of DRAWS matrices of independent normal entries, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    shape = (min(rows, cols), max(rows, cols))
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(DRAWS))
    return sum(map(tail_exponent, drawn)) / DRAWS


def map_exponents(exponents: Sequence[float], low: float, high: float) -> list[float]:
    """The factors of exponents, linearly from *low* for the least to *high* for the largest; *high* for all
    where they are equal, as in the paper's code."""
    least, largest = min(exponents), max(exponents)
    if least == largest:
        return [high] * len(exponents)
    return [low + (high - low) * (value - least) / (largest - least) for value in exponents]


def assign_factors(
    exponents: Mapping[str, float], follow: Sequence[str], config: LLRConfig, seed: int
) -> dict[str, float]:
    """The factor of every matrix that has one, as ``llr.apply`` says.

    Args:
        exponents: of the measured matrices, finite; empty if there are none, which changes no rate.
        follow: embeddings and an untied head.
        seed: of the order in which factors are shuffled.
    """
    if not exponents:
        return {}
    mapped = map_exponents([*exponents.values()], config.low, config.high)
    factors = dict(zip(exponents, mapped, strict=True)) | dict.fromkeys(follow, max(mapped))
    if config.apply == "shuffled":
        random.Random(seed).shuffle(mapped)  # the others keep theirs: a control that moves them is none
        return factors | dict(zip(exponents, mapped, strict=True))
    if config.apply == "mean":
        return dict.fromkeys(factors, sum(factors.values()) / len(factors))
    if config.apply == "embeddings":
        return {name: factors[name] for name in follow}
    return factors


def measure_exponents(
    engine: Any, names: Sequence[str], specs: dict[str, ParameterSpec], world: World, excess: bool
) -> dict[str, float]:
    """α of the named matrices of an engine, of its fp32 masters, by name; the ranks share the work.
    Collective."""
    found = torch.zeros(len(names), dtype=torch.float64, device=world.device)
    for index, (_, weight) in enumerate(OwnWeights(engine, names, specs).gather_full(world)):
        if index % world.size == world.rank:
            found[index] = tail_exponent(weight) - (random_exponent(*weight.shape) if excess else 0)
    if world.size > 1:
        dist.all_reduce(found)
    return dict(zip(names, found.tolist(), strict=True))


@declared(NAME)
class Factors:
    """The factors by matrix, whose group may change with the rules of a resumed run: the record ``llr``."""

    step: NonNegativeInt = 0
    """At which they were last measured."""
    before: dict[str, PositiveFloat] = field(default_factory=dict)
    """The factors of the step before it; 1 for a matrix that is not there."""
    after: dict[str, PositiveFloat] = field(default_factory=dict)
    """Those that are reached after the transition."""
    settings: dict[str, Any] | None = None
    """Of SETTINGS, by which they were found; None in older checkpoints."""

    def at(self, step: int, transition: int) -> dict[str, float]:
        """The factors of a step from the last measurement on."""
        share = min(1.0, (step - self.step + 1) / transition) if transition else 1.0
        return {
            name: self.before.get(name, 1.0) * (1 - share) + factor * share
            for name, factor in self.after.items()
        }


class SpectralRates(Hook):
    """Hook that measures the spectra, and sets the factors of ``GroupRates``.

    Raises:
        UserError: a length is neither a fraction nor a whole number of steps.
    """

    name = NAME

    def __init__(self, session: Session) -> None:
        run, self.session = session.run, session
        self.config: LLRConfig = run.llr
        self.settings = {name: getattr(run.llr, name) for name in SETTINGS}
        self._record: Factors | None = None
        self.every = max(1, length_in_steps("llr.every", run.llr.every, run.steps))
        self.last = length_in_steps("llr.until", run.llr.until, run.steps)
        self.transition = length_in_steps("llr.transition", run.llr.transition, run.steps)
        self.matrices = [group.parameters[0] for group in session.rates.groups.values() if group.separate]
        self.model_changed(session.model_config)

    def model_changed(self, model: ModelConfig) -> None:
        """Measure a model of other heads."""
        self.specs = parameter_specs(model)
        roles = {name: self.specs[name].role for name in self.matrices}
        self.follow = [name for name, role in roles.items() if role.layer is None]
        least = self.config.least
        self.measured = [n for n in roles if n not in self.follow and min(self.specs[n].shape) >= least]

    def announce(self, session: Session) -> list[str]:
        """A note where matrices are too small to be measured."""
        total = len(self.matrices) - len(self.follow)
        if len(self.measured) == total:
            return []
        small = f"{total - len(self.measured)} of {total} matrices have fewer than {self.config.least}"
        return [log_line("note", f"llr: {small} singular values (llr.least) and keep the base rate")]

    def before_step(self, engine: Any, state: TrainingState) -> HookResult:
        """Measure if a measurement is due, and set the factors of the step about to be attempted. Collective.

        Returns:
            ``llr/exponent/NAME`` and ``llr/factor/NAME`` of each measured matrix at a measurement.
        """
        if self._record is None:
            where = "checkpoint: records in state.json"
            self._record = from_dict(Factors, state.record(NAME), where, NAME)
        values: dict[str, float] = {}
        # Where it is turned on later, or changed, the first step of all is a measurement too.
        begins = NAME not in state.records or self._record.settings not in (None, self.settings)
        if begins or (state.step <= self.last and state.step % self.every == 0):
            excess = self.config.measure == "excess"
            exponents = measure_exponents(engine, self.measured, self.specs, self.session.world, excess)
            exponents = {name: value for name, value in exponents.items() if math.isfinite(value)}
            factors = assign_factors(exponents, self.follow, self.config, self.session.run.seed)
            present = self._record.at(max(0, state.step - 1), self.transition)
            reached = dict.fromkeys(present, 1.0) | factors
            self._record = Factors(state.step, present, reached, self.settings)
            state.records[NAME] = Record(to_dict(self._record))
            values = {f"llr/exponent/{name}": value for name, value in exponents.items()}
            values |= {f"llr/factor/{name}": value for name, value in factors.items()}
        self.session.rates.factors = self._record.at(state.step, self.transition)
        return HookResult(values)
