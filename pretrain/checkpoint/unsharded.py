"""Reads a checkpoint that any world wrote as unsharded tensors: full-shape fp32, by parameter name.

    checkpoint = UnshardedCheckpoint.open(Path("runs/NAME/checkpoints/step_000500"))
    for name in checkpoint.names():
        weight = checkpoint.parameter(name)          # fp32 master weight, full shape
        moments = checkpoint.optimizer_state(name)   # exp_avg, exp_avg_sq (full shape), step

Resharding and conversion to other formats both use it. It needs no process group, no GPU and no model in
memory, and holds about one parameter at a time. It reads ``deepspeed/`` folders of any ZeRO stage, dtype,
data-parallel and tensor-parallel size (deepspeed_files.py), and ``canonical/`` folders of weights alone
(unsharded_folder.py, which writes them, too).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError
from model.parameters import ParameterSpec, parameter_specs
from pretrain.checkpoint.deepspeed_files import MASTERS, ShardedSource
from pretrain.checkpoint.source import Source
from pretrain.checkpoint.state import ENGINE_FOLDER, TrainingState, WorldRecord, read_state, understood
from pretrain.checkpoint.unsharded_folder import CANONICAL_FOLDER, FolderSource
from pretrain.optim.muon import MOMENTS


class UnshardedCheckpoint:
    """A checkpoint of any shape, read as if one rank had written it.

    Attributes:
        folder: the checkpoint's folder.
        state: everything but tensors.
        specs: what the model in ``state`` expects of each parameter.
        groups: the optimizer's groups by name.
    """

    def __init__(
        self, folder: Path, state: TrainingState, source: Source, specs: dict[str, ParameterSpec]
    ) -> None:
        self.folder, self.state, self.specs = folder, state, specs
        self.groups = source.groups
        self._source = source

    @classmethod
    def open(cls, folder: Path) -> UnshardedCheckpoint:
        """Open a checkpoint: ``checkpoints/step_000500``.

        Sizes and hashes are not checked here; pretrain.checkpoint.manifest.verify does that.

        Raises:
            UserError: the folder is no checkpoint, files are missing or damaged, or do not fit their model.
        """
        folder = Path(folder)
        state = read_state(folder)
        with understood(folder):
            specs = parameter_specs(ModelConfig.from_json(state.model))
            source = _source(folder, specs, state.world)
        _check_names(folder, set(source.names()), set(specs))
        return cls(folder, state, source, specs)

    def names(self) -> list[str]:
        """Parameters in the model's order."""
        return list(self.specs)

    def shape(self, name: str) -> tuple[int, ...]:
        """A parameter's full shape."""
        return self.specs[name].shape

    def parameter(self, name: str) -> Tensor:
        """The fp32 master weight, full shape; a copy that the caller may modify."""
        return self.tensor(name, MASTERS)

    def optimizer_state(self, name: str) -> dict[str, Any]:
        """Adam's moments (fp32, full shape, zero before the first update) and how many updates it applied.

        Of a matrix that Muon steps the momentum is exp_avg, and exp_avg_sq is zero.
        """
        exp_avg, exp_avg_sq = (self.tensor(name, key) for key in MOMENTS)
        return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": self.step(name)}

    def step(self, name: str) -> int:
        """Updates that Adam has applied to a parameter."""
        with understood(self.folder):
            return self._source.step(name)

    def tensor(self, name: str, key: str) -> Tensor:
        """One tensor of a parameter: ``fp32`` (its weight), ``exp_avg`` or ``exp_avg_sq``."""
        with understood(self.folder):
            return self._source.tensor(name, key)

    def check(self, part: int = 0, parts: int = 1) -> None:
        """See Source.check."""
        with understood(self.folder):
            self._source.check(part, parts)

    def release(self) -> None:
        """Unmap the files read so far, which are counted as this process's memory until then."""
        self._source.release()


def _source(folder: Path, specs: dict[str, ParameterSpec], world: WorldRecord | None) -> Source:
    if (folder / ENGINE_FOLDER).is_dir():
        return ShardedSource(folder / ENGINE_FOLDER, specs, world)
    if (folder / CANONICAL_FOLDER).is_dir():
        return FolderSource(folder / CANONICAL_FOLDER, specs)
    raise UserError(f"checkpoint: {folder} has no {ENGINE_FOLDER} or {CANONICAL_FOLDER} folder")


def _check_names(folder: Path, stored: set[str], expected: set[str]) -> None:
    problems = []
    for word, names in (("lacks", expected - stored), ("has unknown", stored - expected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            problems.append(f"{word} {min(names)}{more}")
    if problems:
        raise UserError(f"checkpoint: {folder} does not fit the model it describes: {'; '.join(problems)}")
