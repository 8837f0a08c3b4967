"""The settings of growth: how heads are added and pruned while a model trains."""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from model.config import ModelConfig
from model.declared import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, declared
from model.errors import UserError
from model.heads import HeadSchedule, format_heads, normalize_heads, parse_heads

SCHEDULE = "growth.schedule"


def _read_steps(value: Any) -> Any:
    """The schedule with its steps as numbers: JSON's keys are text. UserError for a step given twice."""
    if not isinstance(value, dict):
        return value
    steps = [int(key) if str(key).isdecimal() else key for key in value]
    if twice := [step for step, count in Counter(steps).items() if count > 1]:
        raise UserError(f"growth.schedule: step {twice[0]} is given twice; keep one")
    return dict(zip(steps, value.values(), strict=True))


def _read_counts(value: Any) -> Any:
    return normalize_heads(value, SCHEDULE)


ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]


@declared("growth")
class GrowthConfig:
    """Start with few heads, and add and drop heads while training (INCRT, arXiv 2604.10703).

    See docs/growth.md for what is measured and decided, and where it differs from the paper and its code.
    """

    criterion: Literal["none", "incrt", "gradient", "random", "schedule"] = "none"
    """When a head is added. none keeps the heads fixed. incrt adds one where the largest eigenvalue of a
    layer's residual directional energy exceeds a threshold. gradient adds one at every check, to the layer
    where a new head would have the largest gradient; random adds it to a random layer. schedule follows given
    steps and head counts."""
    start: PositiveInt = 1
    """Heads of every layer at step 0."""
    maximum: PositiveInt | None = None
    """Most heads of a layer; the largest head count of the model's own schedule when not given."""
    budget: PositiveInt | None = None
    """Most heads of all layers together; no limit when not given. Where several layers grow at once and it is
    too small for all, those furthest above their threshold (incrt) or the lowest layers come first."""
    head_dim: PositiveInt | None = None
    """Width of every head; the smallest of the model's own schedule when not given."""
    interval: PositiveFloat = 0.02
    """Steps between two checks, or a fraction of the run, then at least 24 steps (60 for gradient)."""
    until: PositiveFloat = 0.9
    """Step (or fraction of the run) of the last check. Later heads would have no time to learn."""
    new_heads: Literal["captured", "random"] = "captured"
    """Weights of q and k in a new head: captured aligns them with the direction that was found and its
    partner, random draws them as at step 0."""
    calibration: PositiveInt = 4
    """Checks from which a layer's thresholds are taken. Decisions begin with the last of them; with
    grow_above incrt decides from the first check on."""
    grow_share: PositiveFloat = 0.1
    """For incrt, a layer grows above this share of its median residual energy during calibration."""
    prune_share: ShareBelowOne = 0.01
    """For incrt, a head is pruned below this share of the threshold for growth; 0 prunes none."""
    grow_above: PositiveFloat | None = None
    """For incrt, threshold of growth for all layers, in place of grow_share."""
    prune_below: NonNegativeFloat | None = None
    """For incrt, threshold of pruning for all heads, in place of prune_share; at most the layer's threshold
    for growth."""
    dwell: NonNegativeInt = 1
    """For incrt, number of checks that a layer waits after it has grown or was pruned."""
    patience: PositiveInt = 5
    """Checks in a row in which a head must be below the threshold before it is pruned."""
    average: ShareBelowOne = 0.5
    """Weight of the past in the running average of the second moment, from one check to the next."""
    schedule: Annotated[
        dict[int, Annotated[str, BeforeValidator(_read_counts)]], BeforeValidator(_read_steps)
    ] = field(default_factory=dict)
    """For the criterion schedule: step -> heads per layer, such as {100: 2x4, 200: "2x2,4x2"}."""

    def __post_init__(self) -> None:
        if self.schedule and self.criterion != "schedule":
            raise UserError(
                f"growth.schedule: {self.schedule} does not go with growth.criterion {self.criterion}, which "
                "does not read it; leave it out, or give --growth.schedule '{}'"
            )
        if self.criterion == "schedule" and not self.schedule:
            raise UserError(
                "growth.schedule: missing; give steps and head counts, such as {100: 2x4, 200: 4x4}"
            )

    @property
    def active(self) -> bool:
        """Whether heads are added or pruned."""
        return self.criterion != "none"

    def counts(self, layers: int) -> dict[int, HeadSchedule]:
        """The schedule's head counts by step, ascending, for a model of so many layers.

        Raises:
            UserError: a text that is no head schedule.
        """
        return {step: parse_heads(self.schedule[step], layers, SCHEDULE) for step in sorted(self.schedule)}

    def check_attention(self, model: ModelConfig) -> None:
        """Raises UserError: a layer of *model* has no attention."""
        if 0 in model.heads:
            raise UserError(
                f"growth.criterion: {self.criterion} needs attention in every layer, and layer "
                f"{model.heads.index(0)} has none (heads 0); take a model with heads in all of them"
            )

    def start_model(self, model: ModelConfig, steps: int, tensor_parallel: int = 1) -> ModelConfig:
        """*model* with ``start`` heads of ``head_dim`` in every layer.

        Args:
            steps: of the run.

        Raises:
            UserError: no head dim fits, t does not divide it, the model groups its queries, or ``schedule``
                or ``budget`` do not fit the model.
        """
        if model.kv_heads not in (None, model.heads):
            raise UserError(
                f"growth.criterion: {self.criterion} is not for grouped queries, and the model has kv_heads "
                f"{format_heads(model.kv_heads or ())}; take a model without kv_heads"
            )
        self.check_attention(model)
        layers, maximum = model.num_layers, self.maximum or max(model.heads)
        for name, most, least in (
            ("maximum", maximum, self.start),
            ("budget", self.budget, self.start * layers),
        ):
            if most is not None and most < least:
                raise UserError(
                    f"growth.{name}: {most} is below the {least} heads that growth.start gives; give more"
                )
        before = (self.start,) * layers
        for step, counts in self.counts(layers).items():
            fits = 0 < step < steps and len(counts) == layers and max(counts) <= maximum
            if not fits or any(now < earlier for now, earlier in zip(counts, before, strict=True)):
                raise UserError(
                    f"growth.schedule: {self.schedule[step]!r} at step {step} is not valid; give steps from "
                    f"1 to {steps - 1}, and in each of {layers} layers at most {maximum} heads "
                    f"(growth.maximum) and no fewer than before, {format_heads(before)}"
                )
            before = counts
        if self.budget is not None and sum(before) > self.budget:
            raise UserError(
                f"growth.schedule: {format_heads(before)} are {sum(before)} heads, and growth.budget is "
                f"{self.budget}; give fewer, or a larger budget"
            )
        head_dim = self.head_dim or min(model.layer_head_dim(layer) for layer in range(layers))
        check_head_dim(head_dim, tensor_parallel)
        return model.replace(heads=(self.start,) * layers, head_dim=(head_dim,) * layers, kv_heads=None)


def check_head_dim(head_dim: int, tensor_parallel: int) -> None:
    """Reject heads whose width t does not divide: then it would not divide every head count's width."""
    if head_dim % tensor_parallel:
        raise UserError(
            f"growth.head_dim: {head_dim} is not a multiple of tensor_parallel {tensor_parallel}, which "
            f"every head count needs; give a multiple of {tensor_parallel}"
        )
