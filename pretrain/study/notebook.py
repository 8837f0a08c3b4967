"""Studies from a program or a notebook, with results as pandas tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from pretrain.study import planned
from pretrain.study.command import open_study
from pretrain.study.planning import reread
from pretrain.study.results import load_results
from pretrain.study.running.run import run_study
from pretrain.study.summaries import build_view


@dataclass(frozen=True)
class Study(planned.Study):
    """What a study file asks for: ``Study.load(NAME)``, then ``plan``, ``run``, ``results``."""

    @classmethod
    def load(cls, study: str | Path, out: str | Path | None = None, **settings: Any) -> Study:
        """The study of a name, a file or a folder that has been run.

        Args:
            out: the folder of its runs; ``runs/NAME`` by default.
            settings: replace those of the file, as ``steps=100`` or ``optimizer={"learning_rate": 1e-3}``.

        Raises:
            UserError: bad input.
        """
        found = open_study(str(study), Path(out) if out else None, settings)
        return cls(**{each.name: getattr(found, each.name) for each in fields(found)})

    def __repr__(self) -> str:
        return f"Study {self.name!r}: {len(self.runs)} runs, in {self.folder}"

    def plan(self) -> pd.DataFrame:
        """A row for each run: variant, its level of each factor, seed, steps and FLOPs."""
        rows = [
            {"run": each.name, "variant": ""}
            | dict(zip(self.levels, each.definition.levels, strict=True))
            | {"variant": each.variant, "seed": each.seed, "steps": each.run.steps, "flops": each.flops}
            for each in self.runs
        ]
        return pd.DataFrame(rows).set_index("run")

    def run(self, parallel: int = 1) -> int:
        """Train what is missing, *parallel* runs at a time; the exit code of ``study run``."""
        return run_study(reread(self), parallel)

    def results(self) -> pd.DataFrame:
        """``plan`` with the state of each run, its result by the study's measure (NaN if it is not finished)
        and the difference from the run of the same seed that it is compared with."""
        study = reread(self)
        view, rows = build_view(study, load_results(study)), dict[str, tuple[Any, ...]]()
        for summary in view.summaries:
            for seed, run in summary.runs.items():
                results = summary.values.get(seed, math.nan), summary.differences.get(seed, math.nan)
                rows[run.planned.name] = run.state, *results
        columns = ["state", view.measure, "difference"]
        found = pd.DataFrame.from_dict(rows, "index", columns=columns)
        return self.plan().drop(columns=columns, errors="ignore").join(found)
