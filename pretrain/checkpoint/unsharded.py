"""Reads a checkpoint that any world wrote as unsharded tensors: full-shape fp32, by parameter name.

    checkpoint = UnshardedCheckpoint.open(Path("runs/NAME/checkpoints/step_000500"))
    for name in checkpoint.names():
        weight = checkpoint.parameter(name)          # fp32 master weight, full shape
        moments = checkpoint.optimizer_state(name)   # exp_avg, exp_avg_sq (full shape), step

Resuming, evaluation and conversion to other formats all use it. It needs no process group, no GPU and no
model in memory, and holds about one parameter at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError
from model.parameters import ParameterSpec, parameter_specs
from pretrain.checkpoint.index import MASTERS, TENSORS_FOLDER
from pretrain.checkpoint.sharded_files import ShardedFiles
from pretrain.checkpoint.source import Source
from pretrain.checkpoint.state import TrainingState, explain_damage, read_state
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
        with explain_damage(folder):
            specs = parameter_specs(ModelConfig.from_json(state.model))
            source = ShardedFiles(folder / TENSORS_FOLDER, specs, state.world)
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
        with explain_damage(self.folder):
            return self._source.step(name)

    def tensor(self, name: str, key: str) -> Tensor:
        """One tensor of a parameter: ``fp32`` (its weight), ``exp_avg`` or ``exp_avg_sq``."""
        with explain_damage(self.folder):
            return self._source.tensor(name, key)

    def holds_shard(self, name: str, count: int) -> bool:
        """See Source.holds_shard."""
        return self._source.holds_shard(name, count)

    def read_shard(self, name: str, key: str, shard: int, start: int, out: Tensor) -> None:
        """Fill *out*, flat fp32, with the elements of a shard from *start* on, and read no others.

        Args:
            shard: the tensor-parallel rank.
        """
        with explain_damage(self.folder):
            self._source.read_shard(name, key, shard, start, out)

    def random_state(self, rank: int) -> dict[str, Tensor]:
        """The states of a rank's generators, as restore_random_state takes them; empty if not stored."""
        return self._source.random_state(rank)

    def check(self, part: int = 0, parts: int = 1) -> None:
        """See Source.check."""
        with explain_damage(self.folder):
            self._source.check(part, parts)

    def release(self) -> None:
        """Unmap the files read so far, which are counted as this process's memory until then."""
        self._source.release()


def _check_names(folder: Path, stored: set[str], expected: set[str]) -> None:
    problems = []
    for word, names in (("lacks", expected - stored), ("has unknown", stored - expected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            problems.append(f"{word} {min(names)}{more}")
    if problems:
        raise UserError(f"checkpoint: {folder} does not fit the model it describes: {'; '.join(problems)}")
