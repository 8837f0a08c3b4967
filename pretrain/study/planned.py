"""What a study is made of: its file as it is written, variants, comparisons and planned runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from model.declared import NonNegativeInt, PositiveFloat, PositiveInt, declared
from model.errors import UserError, quote
from pretrain.config.growth import GrowthConfig
from pretrain.config.run_config import RunConfig
from pretrain.config.sources import make_run
from pretrain.study.contrasts import Contrast, Sides, Text, full_name
from pretrain.study.design.factors import Design, DesignFile
from pretrain.study.pilots.halving import Halving, RungResult
from pretrain.study.pilots.tuning import RATES, Tune, Tuned
from pretrain.study.settings import Settings

MOST_SEEDS = 1000
HIGHER_IS_BETTER = {"val_accuracy"}
"""Measures; of the others lower values are better."""
Rates = Annotated[list[PositiveFloat], Field(min_length=2, max_length=32)]


def _seeds(value: Any) -> Any:
    """Seeds 1 … N for a number."""
    if type(value) is int and 1 <= value <= MOST_SEEDS:
        return list(range(1, value + 1))
    if not isinstance(value, list) or not 0 < len(set(map(str, value))) == len(value) <= MOST_SEEDS:
        raise UserError(
            f"seeds: {quote(value)} is not valid; give a list such as [1, 2, 3], each once, or how many: 3 "
            f"(at most {MOST_SEEDS:,})"
        )
    return value


Variants = Annotated[dict[Text, Settings | None], Field(min_length=1)]


@declared()
class ComparisonFile:
    """One of a study file's comparisons; a study of one has these keys at its top."""

    variants: Variants | None = None
    """Settings by name, and ``against`` and ``seed_shift`` beside them (Variant)."""
    baseline: Text | None = None
    design: DesignFile | None = None
    """In place of variants and baseline."""
    recipe: Text | None = None
    settings: Settings | None = None


@declared()
class StudyFile:
    """A study file as it is written."""

    seeds: Annotated[list[NonNegativeInt], BeforeValidator(_seeds)]
    title: Text | None = None
    recipe: Text | None = None
    """None: the default recipe, as without ``--config``."""
    settings: Settings | None = None
    baseline: Text | None = None
    variants: Variants | None = None
    design: DesignFile | None = None
    comparisons: Annotated[dict[Text, ComparisonFile], Field(min_length=1)] | None = None
    contrasts: dict[Text, Sides] | None = None
    """What is compared beside the differences from baselines."""
    tune: Tune | None = None
    """A field of which every variant takes its own best value, and the values that are tried."""
    rates: Rates | None = None
    """The same of the learning rate: Muon's for variants with Muon."""
    halving: Halving | None = None
    """Short runs that drop variants first."""
    pilot_seeds: Annotated[list[NonNegativeInt], BeforeValidator(_seeds)] | None = None
    """What values are tried with and variants dropped by; the study's own seeds are not among them."""
    ds_config: Text = "ds_configs/zero2.json"
    measure: Literal["val_loss", "val_bpb", "val_accuracy", "train_loss"] = "val_loss"
    """What is compared: a key of metrics.jsonl."""
    last_validations: PositiveInt = 1
    """The result of a run is the mean of so many last values."""
    effect: PositiveFloat | None = None
    """Smallest difference of ``measure`` that the study is meant to see."""
    machine: Text = ""
    """What its size was chosen for, in words."""
    hours: PositiveFloat | None = None
    """The budget there."""


@declared()
class Variant:
    """One line of a comparison: settings that are run with every seed."""

    name: str
    """With the comparison's."""
    settings: Settings
    """By dotted name: the recipe's, with those of the study, the comparison and the variant in place."""
    seed_shift: NonNegativeInt = 0
    """Its runs take seed + so much. Their pairs have nothing in common, as a check on the intervals."""
    against: Text | None = None
    """The variant that it is compared with; None: the comparison's baseline."""
    rates: Rates | None = None
    """Values that pilots try, in place of the study's."""

    @cached_property
    def run(self) -> RunConfig:
        """Its settings and their model, checked as main.py checks them when this is first asked for."""
        try:
            run = make_run(self.settings)
            run.build_model_config()
        except UserError as error:
            raise UserError(f"study: variant {self.name}: {error}") from None
        return run


@dataclass(frozen=True)
class Comparison:
    """Variants that are compared with one baseline."""

    name: str
    """Empty in a study of one comparison."""
    variants: dict[str, Variant]
    baseline: str | None
    """The name of one of the variants; None with a design."""
    design: Design | None = None
    """What made the variants, if not the file."""

    def baseline_of(self, variant: str) -> str:
        """The name of the variant that *variant* is compared with; its own if with none."""
        if self.baseline in (None, variant):
            return variant
        return self.variants[variant].against or self.baseline or variant


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    comparison: str
    variant: str
    seed: int
    """The study's seed, which pairs it with the other variants' runs; ``run.seed`` is what it trains with."""
    definition: Variant
    runs_dir: Path
    """The study's folder."""

    @cached_property
    def run(self) -> RunConfig:
        """What is trained; UserError as for Variant.run."""
        seed = self.seed + self.definition.seed_shift
        return dataclasses.replace(
            self.definition.run, seed=seed, name=self.name, runs_dir=str(self.runs_dir)
        )

    @property
    def folder(self) -> Path:
        """Where the run's files are."""
        return self.runs_dir / self.name

    @cached_property
    def name(self) -> str:
        """Name of the run's folder, in the study's folder."""
        return "-".join(filter(None, (self.comparison, self.variant, f"s{self.seed}")))

    @property
    def full_name(self) -> str:
        """Name of its variant, with the comparison's."""
        return full_name((self.comparison, self.variant))

    @property
    def grows(self) -> bool:
        """Whether heads are added or removed while it trains."""
        growth: GrowthConfig = self.run.growth
        return growth.active

    @cached_property
    def flops(self) -> float:
        """Training FLOPs of the whole run, 6 N_matmul + 12 Σ min(T, window) A per token; with growth the most
        it may take."""
        model = self.run.largest_model_config(self.run.build_model_config())
        return float(model.flops_per_token() * self.run.steps * self.run.global_batch_tokens)


@dataclass(frozen=True)
class Study:
    """What a study file asks for."""

    name: str
    folder: Path
    """Of its runs."""
    file: StudyFile
    comparisons: tuple[Comparison, ...]
    runs: tuple[PlannedRun, ...]
    """Seed by seed: after an interruption whole pairs are there."""
    contrasts: tuple[Contrast, ...]
    """What is compared beside the differences from baselines."""
    text: str
    """The file's contents."""
    tuned: Mapping[str, Tuned] = field(default_factory=dict)
    """What pilots chose, by the variant's full name."""

    rungs: Sequence[RungResult] = ()
    """What halving has found so far."""

    @property
    def next_rung(self) -> int | None:
        """The rung that is not finished, from 1; None without halving, or after its last rung."""
        done = max((each.rung for each in self.rungs), default=0)
        return done + 1 if self.file.halving and done < len(self.file.halving.rungs) else None

    @cached_property
    def tried(self) -> dict[str, tuple[str, list[Any]]]:
        """Field and values to be tried of every variant, by full name; none without tune and rates."""
        variants = [variant for comparison in self.comparisons for variant in comparison.variants.values()]
        if self.file.rates:
            tried = {variant.name: variant.rates or self.file.rates for variant in variants}
            kinds = {variant.name: variant.settings.get("optimizer.kind") for variant in variants}
            return {name: (RATES[kind or "adamw"], list(tried[name])) for name, kind in kinds.items()}
        return {variant.name: next(iter(self.file.tune.items())) for variant in variants if self.file.tune}

    @property
    def untuned(self) -> list[str]:
        """Full names of the variants for which nothing is chosen yet."""
        return [name for name in self.tried if name not in self.tuned]

    @property
    def title(self) -> str:
        """The file's title, or the study's name."""
        return self.file.title or self.name

    @property
    def of_first_seed(self) -> list[PlannedRun]:
        """A run of each variant."""
        return [planned for planned in self.runs if planned.seed == self.file.seeds[0]]
