"""Types of fields that have a value per layer: numbers, lists or text, in one form."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, ValidationInfo

from model.allocations import LARGEST_SIZE, MOST_LAYERS, Allocation, parse_allocation
from model.declared import PositiveFloat, declared
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


def _to_widths(name: str, least: int) -> Callable[[Any], int | tuple[int, ...] | Allocation]:
    """A validator: a width from *least* for all layers, one per layer, or an allocation by name."""

    def convert(value: Any) -> int | tuple[int, ...] | Allocation:
        given = value
        if isinstance(value, str):
            if "(" in value:  # its widths follow when the number of layers is known
                return parse_allocation(value, name, blocks=name == "block_width")
            given = parse_schedule(value, name)
        widths = tuple(given) if isinstance(given, list | tuple) else (given,)
        valid = all(type(width) is int and least <= width <= LARGEST_SIZE for width in widths)
        if not (valid and 0 < len(widths) <= MOST_LAYERS):
            raise UserError(
                f"{name}: {quote(value)} is not valid; give a whole number from {least}, or one per layer, "
                "such as 1024x4,768x8, or an allocation, such as tapered(1024)"
            )
        return widths if isinstance(value, list | tuple) or widths[1:] else widths[0]

    return convert


def _to_rates(name: str, most: float, absent: bool) -> Callable[[Any], float | tuple[float | None, ...]]:
    """A validator: a number above 0 and up to *most* for all layers, or one per layer; null if *absent*."""

    def convert(value: Any) -> float | tuple[float | None, ...]:
        given = parse_schedule(value, name) if isinstance(value, str) else value
        several = isinstance(given, list | tuple)
        items = tuple(given) if isinstance(given, list | tuple) else (given,)
        for item in items if 0 < len(items) <= MOST_LAYERS else (0,):
            number = type(item) in (int, float) and 0 < item <= most
            if not number and not (several and absent and item is None):
                words = f"a number above 0 and up to {most:g}"
                null = ", null where a layer has none" if absent else ""
                raise UserError(f"{name}: {quote(value)} is not valid; give {words}, or one per layer{null}")
        rates = tuple(None if item is None else float(item) for item in items)
        listed = isinstance(value, list | tuple) or rates[1:] or rates[0] is None
        return rates if listed else cast(float, rates[0])

    return convert


AS_LIST = PlainSerializer(lambda value: list(value) if isinstance(value, tuple) else value)
LARGEST_BASE = 1e12
Size = Annotated[int, Field(gt=0, le=LARGEST_SIZE)]
Count = Annotated[int, Field(ge=0, le=LARGEST_SIZE)]
Base = Annotated[float, Field(gt=0, le=LARGEST_BASE)]
Share = Annotated[float, Field(gt=0, le=1)]
# What may be written is not what is kept; the JSON schema has the former.
Bases = Annotated[
    float | tuple[float | None, ...],
    PlainValidator(
        _to_rates("rope_base", LARGEST_BASE, True), json_schema_input_type=Base | list[Base | None] | str
    ),
    AS_LIST,
]
Shares = Annotated[
    float | tuple[float | None, ...],
    PlainValidator(_to_rates("rotary_share", 1, False), json_schema_input_type=Share | list[Share] | str),
    AS_LIST,
]
Schedule = Annotated[
    tuple[Count, ...],
    BeforeValidator(_to_tuple, json_schema_input_type=list[Count] | str),
    Field(min_length=1, max_length=MOST_LAYERS),
]
"""One value per layer; 0 where the layer has no such part."""
FeedForwardWidths = Annotated[
    int | tuple[int, ...],
    PlainValidator(_to_widths("ffn_width", 0), json_schema_input_type=Count | list[Count] | str),
    AS_LIST,
]
"""One width for all layers, or one per layer."""
BlockWidths = Annotated[
    int | tuple[int, ...],
    PlainValidator(_to_widths("block_width", 1), json_schema_input_type=Size | list[Size] | str),
    AS_LIST,
]
"""As FeedForwardWidths; every layer has some."""
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
