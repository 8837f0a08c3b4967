"""Types of fields that have a value per layer: numbers, lists or text, in one form."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)

from model.allocations import LARGEST_SIZE, MOST_LAYERS, parse_allocation
from model.declared import STRICT, PositiveFloat, declared
from model.errors import UserError, quote
from model.heads import parse_schedule

One = TypeVar("One", int, float)
Each = TypeVar("Each")


def at_layer(value: One | tuple[Each, ...], layer: int) -> One | Each:
    """The value of a layer, where there is one for all layers or one per layer."""
    return value[layer] if isinstance(value, tuple) else value


def _to_tuple(value: Any, info: ValidationInfo) -> Any:
    """A schedule as its field keeps it: JSON has lists, and users may write 3x2,6x2."""
    if isinstance(value, str):
        return parse_schedule(value, info.field_name or "schedule")
    return tuple(value) if isinstance(value, list) else value


def _one_or_each(one: Any, each: Any, valid: str, allocations: bool = False) -> PlainValidator:
    """A validator: a value of type *one* for all layers, or one of type *each* per layer, as a list or text.

    Args:
        valid: what is valid, in words.
        allocations: whether it may be an allocation by name, whose values follow when the number of layers
            is known.
    """
    several = Annotated[tuple[each, ...], Field(min_length=1, max_length=MOST_LAYERS)]
    of_all, of_each = (TypeAdapter(kind, config=STRICT) for kind in (one, several))

    def convert(value: Any, info: ValidationInfo) -> Any:
        given, field = value, info.field_name or "schedule"
        if isinstance(value, str):
            if allocations and "(" in value:
                return parse_allocation(value, field, blocks=field == "block_width")
            given = parse_schedule(value, field)
            if len(given) == 1 and given[0] is not None:
                given = given[0]
        try:
            if isinstance(given, list | tuple):
                return of_each.validate_python(tuple(given))
            return of_all.validate_python(given)
        except ValidationError:
            raise UserError(f"{field}: {quote(value)} is not valid; give {valid}") from None

    # What may be written is not what is kept; the JSON schema has the former.
    return PlainValidator(convert, json_schema_input_type=one | list[each] | str)


AS_LIST = PlainSerializer(lambda value: list(value) if isinstance(value, tuple) else value)
Size = Annotated[int, Field(gt=0, le=LARGEST_SIZE)]
Count = Annotated[int, Field(ge=0, le=LARGEST_SIZE)]
Base = Annotated[float, Field(gt=0, le=1e12)]
Share = Annotated[float, Field(gt=0, le=1)]
WIDTHS = "or one per layer, such as 1024x4,768x8, or an allocation, such as tapered(1024)"
Bases = Annotated[
    float | tuple[float | None, ...],
    _one_or_each(
        Base, Base | None, "a number above 0 and up to 1e+12, or one per layer, null where a layer has none"
    ),
    AS_LIST,
]
Shares = Annotated[
    float | tuple[float, ...],
    _one_or_each(Share, Share, "a number above 0 and up to 1, or one per layer"),
    AS_LIST,
]
FeedForwardWidths = Annotated[
    int | tuple[int, ...],
    _one_or_each(Count, Count, f"a whole number from 0, {WIDTHS}", allocations=True),
    AS_LIST,
]
"""One width for all layers, or one per layer."""
BlockWidths = Annotated[
    int | tuple[int, ...],
    _one_or_each(Size, Size, f"a whole number from 1, {WIDTHS}", allocations=True),
    AS_LIST,
]
"""As FeedForwardWidths; every layer has some."""
Schedule = Annotated[
    tuple[Count, ...],
    BeforeValidator(_to_tuple, json_schema_input_type=list[Count] | str),
    Field(min_length=1, max_length=MOST_LAYERS),
]
"""One value per layer; 0 where the layer has no such part."""
Windows = Annotated[
    tuple[Size | None, ...], BeforeValidator(_to_tuple, json_schema_input_type=list[Size | None] | str)
]
SCHEDULES = (
    "heads",
    "kv_heads",
    "head_dim",
    "ffn_width",
    "block_width",
    "local_window",
    "rope_base",
    "rotary_share",
)
"""Fields with one value per layer."""


@declared("rope_scaling")
class Llama3Scaling:
    """Llama 3.1's: wavelengths beyond original / low_freq_factor are *factor* times as long, those below
    original / high_freq_factor stay, and those between are interpolated (transformers' rope type llama3)."""

    type: Literal["llama3"]
    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_context_length: Size

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"rope_scaling.high_freq_factor: {self.high_freq_factor:g} is not valid; give a number above "
                f"low_freq_factor, {self.low_freq_factor:g}"
            )


@declared("rope_scaling")
class LinearScaling:
    """All wavelengths are *factor* times as long (position interpolation, arXiv 2306.15595)."""

    type: Literal["linear"]
    factor: PositiveFloat


@declared("rope_scaling")
class YarnScaling:
    """YaRN (arXiv 2309.00071): wavelengths that turn less than beta_slow times in the original context are
    *factor* times as long, those that turn more than beta_fast times stay, and those between are interpolated
    along the dims; cosines and sines are multiplied by attention_factor."""

    type: Literal["yarn"]
    factor: PositiveFloat
    original_context_length: Size
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    attention_factor: PositiveFloat | None = None
    """0.1 ln(factor) + 1 when not given, at least 1."""
    truncate: bool = True
    """Whether the first and last interpolated dims are rounded outwards."""

    def __post_init__(self) -> None:
        if self.beta_fast <= self.beta_slow:
            raise UserError(
                f"rope_scaling.beta_fast: {self.beta_fast:g} is not valid; give a number above beta_slow, "
                f"{self.beta_slow:g}"
            )

    @property
    def magnitude(self) -> float:
        """The factor on cosines and sines."""
        return self.attention_factor or 0.1 * math.log(max(self.factor, 1.0)) + 1.0


RopeScaling = Annotated[Llama3Scaling | LinearScaling | YarnScaling, Field(discriminator="type")]
