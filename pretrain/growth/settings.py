"""The settings of growth: how heads are added and pruned while a model trains."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from model.config import ModelConfig
from model.declared import Count, FromZero, Positive, PositiveNumber, declared
from model.errors import UserError
from model.heads import HeadSchedule, format_heads, parse_heads
from pretrain.config.section import Section


@declared("growth")
class GrowthConfig:
    """Start with few heads, and add and drop heads while training (INCRT, arXiv 2604.10703).

    See docs/growth.md for what is measured and decided, and where it differs from the paper and its code.
    """

    criterion: Literal["none", "incrt", "gradient", "random", "schedule"] = "none"
    """What asks for a head. none: the heads stay as they are. incrt: the largest eigenvalue of a layer's residual
    directional energy exceeds a threshold. gradient: at every check the layer where a new head would have the largest
    gradient. random: at every check a layer by chance. schedule: given steps and head counts."""
    start: Positive = 1
    """Heads of every layer at step 0."""
    maximum: Positive | None = None
    """Most heads of a layer; the largest head count of the model's own schedule when not given."""
    budget: Positive | None = None
    """Most heads of all layers together; no limit when not given. Where several layers grow at once and it is too
    small for all, those that ask most (incrt) or come first get theirs."""
    head_dim: Positive | None = None
    """Width of every head; the smallest of the model's own schedule when not given."""
    interval: PositiveNumber = 0.02
    """Steps (or fraction of the run, and 24 steps at least; gradient: 60) between two checks."""
    until: PositiveNumber = 0.9
    """Step (or fraction of the run) of the last check: a head added at the very end learns nothing."""
    layers: Literal["per_layer", "together"] = "per_layer"
    """per_layer: each layer by what it measures. together: all layers grow when the median layer asks for it, and are
    pruned when all have a head to prune; random and gradient add a head to every layer at every check."""
    new_heads: Literal["captured", "random"] = "captured"
    """q and k of a new head: along the direction that was found and its partner, or drawn as at step 0."""
    calibration: Positive = 4
    """Checks from which a layer's thresholds are taken. Decisions begin with the last of them; with grow_above incrt
    decides from the first check on."""
    grow_share: PositiveNumber = 0.1
    """incrt: a layer grows above this share of the median of its residual energy over the calibration."""
    prune_share: FromZero = 0.01
    """incrt: a head is pruned below this share of the threshold for growth; 0 prunes none."""
    grow_above: PositiveNumber | None = None
    """incrt: threshold of growth for all layers, in place of grow_share."""
    prune_below: FromZero | None = None
    """incrt: threshold of pruning for all heads, in place of prune_share; the layer's threshold for growth at most."""
    dwell: Count = 1
    """incrt: checks that a layer waits after it has grown or was pruned."""
    patience: Positive = 5
    """Checks in a row in which a head must be below the threshold before it is pruned."""
    average: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Weight of the past in the running average of the second moment, from one check to the next."""
    schedule: dict[int, str] = field(default_factory=dict)
    """For the criterion schedule: step -> heads per layer, such as {100: 2x4, 200: "2x2,4x2"}."""

    @property
    def active(self) -> bool:
        """Whether heads are added or pruned."""
        return self.criterion != "none"

    def counts(self) -> dict[int, HeadSchedule]:
        """The schedule's head counts by step, ascending."""
        return {step: parse_heads(self.schedule[step]) for step in sorted(self.schedule)}

    def start_model(self, model: ModelConfig, tensor_parallel: int = 1) -> ModelConfig:
        """*model* with ``start`` heads of ``head_dim`` in every layer.

        Raises:
            UserError: no head dim fits, t does not divide it, the model groups its queries, or ``schedule`` or
                ``budget`` do not fit the model.
        """
        if model.kv_heads not in (None, model.heads):
            raise UserError(
                f"growth.criterion: {self.criterion} is not for grouped queries, and the model has kv_heads "
                f"{format_heads(model.kv_heads or ())}; take a model without kv_heads"
            )
        maximum, head_dim = self.maximum or max(model.heads), self.head_dim
        if maximum < self.start:
            raise UserError(
                f"growth.start: {self.start} is above the model's {maximum} heads; give growth.maximum"
            )
        layers = model.num_layers
        if head_dim is None:
            head_dim = min(model.layer_head_dim(layer) for layer in range(layers))
        check_head_dim(head_dim, tensor_parallel)
        for step, counts in self.counts().items():
            if len(counts) != layers:
                raise UserError(
                    f"growth.schedule: {self.schedule[step]!r} has {len(counts)} layers, and the model {layers}"
                )
            if max(counts) > maximum:
                raise UserError(
                    f"growth.maximum: the {maximum} heads of the model's own schedule are below the {max(counts)} of "
                    f"growth.schedule at step {step}; give growth.maximum {max(counts)}"
                )
        if self.budget is not None and self.budget < self.start * layers:
            raise UserError(
                f"growth.budget: {self.budget} is below the {self.start * layers} heads that {layers} layers start "
                "with; give more"
            )
        return model.replace(heads=(self.start,) * layers, head_dim=(head_dim,) * layers, kv_heads=None)

    def check(self, heads: str | None, steps: int) -> None:
        """Refuse fields that contradict each other.

        Args:
            heads: the run's field of that name.
            steps: of the run.

        Raises:
            UserError: it names the field, its value and what would be valid.
        """
        if not self.active:
            if self.schedule:
                raise UserError(
                    "growth.criterion: none ignores growth.schedule; give growth.criterion schedule"
                )
            return
        if heads is not None:
            raise UserError(
                f"heads: {heads!r} contradicts growth.criterion {self.criterion}, which finds the heads; leave one out"
            )
        for name in ("interval", "until"):
            value = getattr(self, name)
            if value >= 1 and value != int(value):
                raise UserError(
                    f"growth.{name}: {value} is neither a fraction below 1 nor a whole number of steps"
                )
        if self.maximum is not None and self.maximum < self.start:
            raise UserError(
                f"growth.maximum: {self.maximum} is below growth.start {self.start}; give at least {self.start}"
            )
        above, below = self.grow_above, self.prune_below
        if above is not None and below is not None and below >= above:
            raise UserError(
                f"growth.prune_below: {below:g} is not below growth.grow_above {above:g}: a new head could be "
                "pruned at once; give less"
            )
        if below is None and self.prune_share >= 1:
            raise UserError(
                f"growth.prune_share: {self.prune_share:g} would prune what grows; give a share below 1"
            )
        if (self.criterion == "schedule") != bool(self.schedule):
            raise UserError(
                "growth.schedule: it is for growth.criterion schedule, and needs steps and head counts there, such as "
                "{100: 2x4, 200: 4x4}"
            )
        before: HeadSchedule = ()
        for step, counts in self.counts().items():
            before = before or (self.start,) * len(counts)
            if not 0 < step < steps:
                raise UserError(
                    f"growth.schedule: step {step} is not valid; give steps from 1 to {steps - 1}"
                )
            if len(before) != len(counts):
                raise UserError(
                    f"growth.schedule: {self.schedule[step]!r} has {len(counts)} layers, the one before {len(before)}"
                )
            if any(now < earlier for now, earlier in zip(counts, before, strict=True)):
                raise UserError(
                    f"growth.schedule: {self.schedule[step]!r} of step {step} has fewer heads in a layer than "
                    f"{format_heads(before)} before it; a schedule only grows"
                )
            if self.maximum is not None and max(counts) > self.maximum:
                raise UserError(
                    f"growth.maximum: {self.maximum} is below the {max(counts)} heads of growth.schedule at step {step}"
                )
            before = counts


def check_head_dim(head_dim: int, tensor_parallel: int) -> None:
    """Refuse heads whose width t does not divide: then it would not divide every head count's width."""
    if head_dim % tensor_parallel:
        raise UserError(
            f"growth.head_dim: {head_dim} is not a multiple of tensor_parallel {tensor_parallel}, which every head "
            f"count needs; give a multiple of {tensor_parallel}"
        )


def most_heads(run: Any) -> int:
    """Most heads of a layer that a run with growth may reach."""
    return run.growth.maximum or max(run.fixed_model_config().heads)


@declared()
class GrowthSettings(Section):
    """What growth adds to RunConfig."""

    growth: GrowthConfig = field(default_factory=GrowthConfig)
    """Heads that are added and pruned while the model trains. See docs/growth.md."""

    @staticmethod
    def check(run: Any) -> None:
        """Refuse fields of growth that contradict each other, or the run."""
        run.growth.check(run.heads, run.steps)

    @staticmethod
    def first_model(run: Any, model: ModelConfig) -> ModelConfig:
        """The model with the heads that growth starts with."""
        return run.growth.start_model(model, run.tensor_parallel) if run.growth.active else model

    @staticmethod
    def largest_model(run: Any, model: ModelConfig) -> ModelConfig:
        """The model with the most heads in every layer."""
        if not run.growth.active:
            return model
        return model.replace(heads=tuple(max(heads, most_heads(run)) for heads in model.heads))
