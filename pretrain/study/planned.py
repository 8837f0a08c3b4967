"""What a study is made of: factors and their levels, variants, and planned runs."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.config.sources import make_run
from pretrain.study.file import LevelFile, StudyFile
from pretrain.study.formulas import Contrast
from pretrain.study.settings import Settings, read_settings
from pretrain.study.tuning import PILOT, Tuned
from pretrain.utils.files import read_text_or_nothing

STUDY_FILE = "study.yaml"
Element = tuple[str, int]
"""A setting that has a value for each layer, and a layer."""


@dataclass(frozen=True)
class Level:
    """What a level of a factor sets."""

    settings: Settings = field(default_factory=dict)
    """By dotted name."""
    elements: Mapping[Element, Any] = field(default_factory=dict)
    """Values of single layers."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of LevelFile."""


@dataclass(frozen=True)
class Variant:
    """Settings that are run with every seed: a level of each factor."""

    levels: tuple[str, ...]
    """Labels, in the order of the study's factors."""
    given: Settings
    """The study's settings that replace the recipe's, by dotted name."""
    settings: Settings
    """The recipe's with these in place."""
    parts: Mapping[str, Level]
    """What its run must have: levels by ``FACTOR: LABEL``, flags, and what pilots chose."""
    options: LevelFile
    """Those of its levels together."""
    control: str | None = None
    """The full name of the variant that it is compared with."""

    @property
    def name(self) -> str:
        """Its full name: labels joined by dots."""
        return ".".join(self.levels)

    @property
    def folder(self) -> str:
        """The beginning of its runs' names."""
        return "-".join(self.levels)

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
class Design:
    """The combinations of a study without a baseline, whose effects are estimated together."""

    levels: Mapping[str, tuple[str, ...]]
    """The labels of each factor's levels."""
    rows: Mapping[str, tuple[int, ...]]
    """The level of each factor, from 0, by variant."""
    strength: int
    """Any so many factors have every combination of levels equally often (at most 4 are looked at); 4 where
    all factors together do, however few they are."""
    predict: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Schedules by name: the level of each factor that is stated."""

    @property
    def described(self) -> str:
        """Its size and what it can estimate."""
        sizes = Counter(map(len, self.levels.values()))
        counts = " x ".join(f"{size}^{number}" if number > 1 else str(size) for size, number in sizes.items())
        return f"{len(self.rows)} of {counts} combinations; {SEEN[self.strength]}"


SEEN = {
    1: "main effects may be confounded with each other",
    2: "main effects are balanced, and each is confounded with interactions of two other factors",
    3: "interactions of two factors are confounded with each other, but not with main effects",
    4: "main effects and interactions of two factors can be estimated",
}
"""What can be estimated, by strength."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    definition: Variant
    seed: int
    """The study's seed, which pairs it with the other variants' runs; ``run.seed`` is what it trains with."""
    runs_dir: Path
    """The study's folder."""

    @cached_property
    def run(self) -> RunConfig:
        """What is trained; UserError as for Variant.run. Its mirror has a folder for each study."""
        run, seed = self.definition.run, self.seed + self.definition.options.seed_shift
        checkpoint = run.checkpoint
        if checkpoint.mirror is not None:
            folder = Path(os.path.realpath(self.runs_dir))
            pilots = folder.name == PILOT
            place = f"{folder.parent.name}/{PILOT}" if pilots else folder.name
            checkpoint = dataclasses.replace(checkpoint, mirror=f"{checkpoint.mirror.rstrip('/')}/{place}")
        runs_dir = str(self.runs_dir)
        return dataclasses.replace(run, seed=seed, name=self.name, runs_dir=runs_dir, checkpoint=checkpoint)

    @property
    def variant(self) -> str:
        """The full name of its variant."""
        return self.definition.name

    @property
    def folder(self) -> Path:
        """Where the run's files are."""
        return self.runs_dir / self.name

    @cached_property
    def name(self) -> str:
        """Name of the run's folder, in the study's folder."""
        return f"{self.definition.folder}-s{self.seed}"

    @cached_property
    def flops(self) -> float:
        """Training FLOPs of the whole run, 6 N_matmul + 12 Σ min(T, window) A per token; with growth the most
        it may take."""
        from pretrain.plan.corpora import build_model  # the data determine the vocabulary

        model = self.run.largest_model_config(build_model(self.run))
        return float(model.flops_per_token() * self.run.steps * self.run.global_batch_tokens)


@dataclass(frozen=True)
class Study:
    """What a study file asks for."""

    name: str
    folder: Path
    """Of its runs."""
    file: StudyFile
    variants: Mapping[str, Variant]
    """By full name."""
    runs: tuple[PlannedRun, ...]
    """Seed by seed: after an interruption whole pairs are there."""
    levels: Mapping[str, tuple[str, ...]]
    """The labels of each factor's levels."""
    contrasts: tuple[Contrast, ...]
    text: str
    """The whole file, what it extends included."""
    design: Design | None = None
    """None in a study with a baseline."""
    tuned: Mapping[str, Tuned] = field(default_factory=dict)
    """What pilots chose among the values that the file has now, by the variant's full name."""
    source: str = ""
    """The name or the file that it was read from, to be copied into commands."""
    pilots: bool = False
    """Whether its runs are pilots, of which several may be equal."""
    recorded: Any = None
    """What the archive that it was read from has of it (archive.Recorded)."""
    pilots_of: Study | None = None
    """The study whose pilots these are."""

    @cached_property
    def tried(self) -> dict[str, tuple[str, list[Any]]]:
        """Setting and values to be tried of every variant, by full name; none without tune."""
        found = {name: read_tune(self.file, each.options) for name, each in self.variants.items()}
        return {name: each for name, each in found.items() if each}

    @property
    def untuned(self) -> list[str]:
        """Full names of the variants for which nothing is chosen yet, or among other values."""
        return [name for name in self.tried if name not in self.tuned]

    @property
    def title(self) -> str:
        """The file's title, or the study's name."""
        return self.file.title or self.name

    def command(self, name: str, *options: str) -> str:
        """A command line about this study, to be copied: its archive, else its folder, which holds what flags
        have set, else its file, also when that has changed since. Pilots have those of their study."""
        if self.pilots_of is not None:
            return self.pilots_of.command(name, *options)
        written = read_text_or_nothing(self.folder / STUDY_FILE)
        opened = bool(self.source) and Path(self.source) == self.folder
        made = self.recorded is None and bool(written) and (opened or written == self.text.strip())
        elsewhere = [] if made or self.folder == Path("runs") / self.name else ["--out", str(self.folder)]
        study = str(self.folder) if made or not self.source else self.source
        return shlex.join(["head-schedules", "study", name, study, *elsewhere, *options])


def read_tune(file: StudyFile, options: LevelFile) -> tuple[str, list[Any]] | None:
    """The setting, by its dotted name, and the values that pilots try of a variant with these options."""
    for setting, values in (options.tune or file.tune or {}).items():
        return next(iter(read_settings({setting: values}, "tune"))), list(values)
    return None
