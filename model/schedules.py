"""Types of fields that have a value per layer: numbers, lists or text, in one form."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from model.allocations import LARGEST_SIZE, MOST_LAYERS, parse_allocation
from model.declared import STRICT, PositiveFloat, declared, describe_valid
from model.errors import UserError, quote
from model.heads import parse_schedule

One = TypeVar("One", bound=float | None)
Each = TypeVar("Each")


def at_layer(value: One | tuple[Each, ...], layer: int) -> One | Each:
    """The value of a layer, where there is one for all layers or one per layer."""
    return value[layer] if isinstance(value, tuple) else value


def _schedule(
    number: type[int] | type[float],
    each: Any,
    valid: str,
    one: bool = False,
    blocks: bool | None = None,
    repeated: bool = False,
) -> PlainValidator:
    """A validator: a value of type *each* per layer, as a list or text. Its errors do not name the field:
    ``explain_error`` does.

    Args:
        number: what text is read as.
        valid: what is valid, in words.
        one: whether one value may be given for all layers; text of one value then is one.
        blocks: where an allocation by name may be given, whose values follow when the number of layers is
            known: whether it is one of block widths.
        repeated: whether one value may be given for all layers, which is kept as a tuple of one until the
            number of layers is known.
    """
    several = Annotated[tuple[each, ...], Field(min_length=1, max_length=MOST_LAYERS)]
    of_each, of_all = (TypeAdapter(kind, config=STRICT) for kind in (several, each))

    def convert(value: Any) -> Any:
        given = value
        try:
            if isinstance(value, str):
                if blocks is not None and "(" in value:
                    return parse_allocation(value, blocks=blocks)
                given = parse_schedule(value, number)
                given = given[0] if one and len(given) == 1 else given
            if isinstance(given, list | tuple):
                return of_each.validate_python(tuple(given))
            if one:
                return of_all.validate_python(given)
            if repeated:
                return of_each.validate_python((given,))
        except UserError as error:  # a ValueError, so that the field's name is added
            raise ValueError(str(error)) from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if isinstance(given, list | tuple):
                where = "".join(
                    f" in layer {layer}, which has {quote(first['input'])}" for layer in first["loc"]
                )
                raise ValueError(f"{describe_valid(first)}{where}") from None
        raise ValueError(f"give {valid}")

    # What may be written is not what is kept; the JSON schema has the former.
    written: Any = list[each] | str
    return PlainValidator(convert, json_schema_input_type=each | written if one or repeated else written)


AS_LIST = PlainSerializer(lambda value: list(value) if isinstance(value, tuple) else value)
Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
Count = Annotated[int, Field(ge=0, le=LARGEST_SIZE)]
Base = Annotated[float, Field(gt=0, le=1e12)]
Share = Annotated[float, Field(gt=0, le=1)]
WIDTHS = "or one per layer, such as 1024x4,768x8, or an allocation, such as tapered(1024)"
Bases = Annotated[
    float | tuple[float | None, ...] | None,
    _schedule(
        *(float, Base | None, "a number above 0 and up to 1e+12, or one per layer, null for no positions"),
        one=True,
    ),
    AS_LIST,
]
Shares = Annotated[
    float | tuple[float, ...],
    _schedule(float, Share, "a number above 0 and up to 1, or one per layer", one=True),
    AS_LIST,
]
FeedForwardWidths = Annotated[
    int | tuple[int, ...],
    _schedule(int, Count, f"a whole number from 0, {WIDTHS}", one=True, blocks=False),
    AS_LIST,
]
"""One width for all layers, or one per layer."""
BlockWidths = Annotated[
    int | tuple[int, ...],
    _schedule(int, Size, f"a whole number from 1, {WIDTHS}", one=True, blocks=True),
    AS_LIST,
]
"""As FeedForwardWidths; every layer has some."""
Schedule = Annotated[
    tuple[int, ...], _schedule(int, Count, "a whole number from 0 per layer, such as 2,4,8x2"), AS_LIST
]
"""One value per layer; 0 where the layer has no such part."""
Repeated = Annotated[
    tuple[int, ...],
    _schedule(int, Count, "a whole number from 0, or one per layer, such as 2,4,8x2", repeated=True),
    AS_LIST,
]
"""As Schedule; one value is that of all layers."""
Windows = Annotated[
    tuple[int | None, ...],
    _schedule(
        int, Size | None, "a whole number from 1, or one per layer or null, such as 128x3,null", repeated=True
    ),
    AS_LIST,
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
