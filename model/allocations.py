"""Named allocations of a layer's capacity over depth, at the budget of the uniform model.

An allocation is written as ``NAME(MEAN)``, with parameters ``tapered(2048, start=1.25, end=0.75)``, where a
schedule may be: as ``ffn_width``, and, where ``head_dim`` is set, as ``heads``. Its widths are multiples of
*multiple*, and their sum is that of the uniform model wherever the multiple divides it, else the nearest. As
``block_width`` the mean is the width of the uniform model, and the parameters are equal, see block_widths.
``permuted(tapered(2048), seed=1)`` has the same widths in a random order, as a control for any allocation.
"""

from __future__ import annotations

import ast
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from model.errors import UserError, quote, suggest

MULTIPLE = 64
"""Of widths, unless another is given."""
LARGEST_SIZE = 2**31 - 1
"""Limit of any width, count or length: matrix products take no larger ones, and divisors are found
quickly."""
MOST_LAYERS = 10_000


def uniform(layers: int) -> list[float]:
    """The same in every layer."""
    return [1.0] * layers


def tapered(layers: int, start: float = 1.5, end: float = 0.5) -> list[float]:
    """From *start* to *end* along a half cosine: Tapered Language Models (arXiv 2606.23670); the defaults are
    its best. The mean is (start + end) / 2 for any number of layers."""
    last = max(1, layers - 1)
    return [end + (start - end) * (1 + math.cos(math.pi * layer / last)) / 2 for layer in range(layers)]


def late(layers: int, start: float = 0.5, end: float = 1.5) -> list[float]:
    """Tapered the other way round: its control."""
    return tapered(layers, start, end)


def middle(layers: int, share: float = 0.7) -> list[float]:
    """All of it in the middle *share* of the layers, nothing in the others (arXiv 2508.17734). Of an odd
    number of others the later side has one more, which the paper leaves open."""
    count = min(layers, max(1, round(share * layers)))
    first = (layers - count) // 2
    return [layers / count if first <= layer < first + count else 0.0 for layer in range(layers)]


def ends(layers: int, share: float = 0.7) -> list[float]:
    """All of it in the layers that ``middle`` leaves empty: its complement."""
    empty = [not part for part in middle(layers, share)]
    if not any(empty):
        raise UserError(f"ffn_width: a share of {share:g} leaves none of {layers} layers; give a smaller one")
    return [layers / sum(empty) * part for part in empty]


def openelm(layers: int, start: float = 0.5, end: float = 4.0) -> list[float]:
    """Growing linearly from *start* to *end*: OpenELM's scaling of the feed-forward networks (arXiv
    2404.14619). The paper does not keep the budget equal. For heads it uses 0.5 to 1."""
    last = max(1, layers - 1)
    return _scale_to_mean([start + (end - start) * layer / last for layer in range(layers)])


def waist(layers: int, turn: float = 0.75, depth: float = 0.3) -> list[float]:
    """Wide at both ends and narrow at the *turn*, by a constant factor from layer to layer: the × shape of
    Variable-Width Transformers (arXiv 2606.18246). *depth*: the narrowest in units of the mean.

    The paper solves for equal parameters of layers whose width enters squared; here the mean is 1, as for any
    part whose parameters are proportional to its width. Its own widths: ``variable_widths``.
    """
    narrowest = max(1, round(turn * layers))

    def narrow(factor: float) -> float:
        values = _cross(layers, narrowest, factor)
        return min(values) * layers / sum(values)

    return _scale_to_mean(_cross(layers, narrowest, _find_factor(narrow, depth)))


def _scale_to_mean(values: Sequence[float]) -> list[float]:
    """The values in units of their mean."""
    return [value * len(values) / sum(values) for value in values]


def _cross(layers: int, narrowest: int, factor: float) -> list[float]:
    """1, falling by the factor to the *narrowest*-th of the layers, then growing by another, to 1."""
    falling, steps = [factor**layer for layer in range(narrowest)], layers - narrowest
    return falling + [falling[-1] ** (1 - (layer + 1) / steps) for layer in range(steps)]


def _find_factor(narrow: Callable[[float], float], depth: float) -> float:
    """The factor in (0, 1] for which *narrow*, which grows with it, is *depth*."""
    return _bisect(narrow, depth, 1e-3, 1.0)


def _bisect(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where a growing function reaches the target; or the nearer end."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > target else (middle, high)
    return middle


def prism(layers: int) -> list[float]:
    """The steps of the Prism Transformer's head schedule at 124M (arXiv 2606.27449): a quarter of the most in
    the first sixth of the layers, then half of it, two thirds of it, and all."""
    steps = [0.25, 0.5, 2 / 3, 1.0, 1.0, 1.0]
    return _scale_to_mean([steps[layer * len(steps) // layers] for layer in range(layers)])


PROFILES: dict[str, Callable[..., list[float]]] = {
    made.__name__: made for made in (uniform, tapered, late, middle, ends, openelm, waist, prism)
}
"""By name: of the layers and parameters, the share of each layer; the mean is 1 with the defaults."""


class Allocation(NamedTuple):
    """An allocation that a user has written."""

    text: str
    field: str
    name: str
    mean: int
    multiple: int
    layers: int | None
    """None: as many as the model has."""
    parameters: dict[str, float]
    seed: int | None
    """Of a random order; None: in the order of the profile."""
    blocks: bool
    """Whether these are widths of the residual stream, whose square the parameters of a layer follow."""

    def widths(self, layers: int | None = None) -> tuple[int, ...]:
        """The widths of all layers.

        Raises:
            UserError: parameters without sense, or another number of layers than the model's.
        """
        count, where = self.layers if layers is None else layers, f"{self.field}: {quote(self.text)}"
        if count is None:
            raise UserError(f"{where}: how many layers? give layers=12, say")
        if self.layers not in (None, count):
            raise UserError(f"{where}: layers={self.layers}, and the model has {count}; leave it out")
        if count > MOST_LAYERS:
            raise UserError(f"{where} has more than {MOST_LAYERS:,} layers; give at most that")
        if self.blocks:
            found = self._block_widths(count, where)
        else:
            profile = PROFILES[self.name](count, **self.parameters)
            mean = sum(profile) / count  # not 1 for a taper from 2 to 1, say
            found = round_to_budget([part / mean for part in profile], self.mean, self.multiple)
        if self.seed is not None:
            random.Random(self.seed).shuffle(found)
        return tuple(found)

    def _block_widths(self, layers: int, where: str) -> list[int]:
        if self.name == "waist":
            return [*variable_widths(self.mean, layers, **self.parameters, multiple=self.multiple)]
        profile = PROFILES[self.name](layers, **self.parameters)
        if not all(profile):
            raise UserError(f"{where}: a layer has a width of 0; give a shape that leaves no layer empty")
        return _round(block_widths(profile, self.mean), self.multiple)


def round_to_budget(profile: Sequence[float], mean: int, multiple: int) -> list[int]:
    """Widths near mean × profile, multiples of *multiple*, whose sum is the multiple that is nearest to
    layers × mean.

    Each is rounded; what is then too much or too little goes, a multiple each, to the layers with the largest
    error of rounding. A layer whose profile is 0 stays at 0, any other has at least one multiple.
    """
    exact = [mean * part / multiple for part in profile]
    units = [max(1, math.floor(value + 0.5)) if value else 0 for value in exact]
    while missing := math.floor(len(exact) * mean / multiple + 0.5) - sum(units):
        sign = 1 if missing > 0 else -1
        free = [layer for layer, count in enumerate(units) if exact[layer] and (sign > 0 or count > 1)]
        if not free:
            break
        units[max(free, key=lambda layer: (sign * (exact[layer] - units[layer]), -layer))] += sign
    return [count * multiple for count in units]


def block_widths(profile: Sequence[float], d_model: int) -> list[float]:
    """Widths of the layers in proportion to the profile, with the parameters of a uniform model of *d_model*
    (arXiv 2606.18246).

    A layer of width w has K = 16 w² parameters (attention 4, SwiGLU of 4 w); less those that cannot matter,
    because the embeddings keep d_model: q, k and v of the first layer read nothing beyond it, and of what the
    last FFN writes there nothing is read, 3 and 4 times w (w - d_model).
    """

    def parameters(scale: float) -> float:
        first, last = profile[0] * scale, profile[-1] * scale
        lost = 3 * first * max(0, first - d_model) + 4 * last * max(0, last - d_model)
        return 16 * squares * scale**2 - lost

    squares = sum(part**2 for part in profile)
    highest = 4 * d_model * len(profile) / min(profile)
    scale = _bisect(parameters, 16 * len(profile) * d_model**2, 0.0, highest)
    return [scale * part for part in profile]


def variable_widths(
    d_model: int, layers: int, turn: float = 0.75, depth: float = 0.3, multiple: int = 32
) -> tuple[int, ...]:
    """Residual widths of the layers of a Variable-Width Transformer with the parameters of a uniform one of
    *d_model* (arXiv 2606.18246: the × shape, and its budget).

    d_1 = d_L = D, falling by a constant factor to depth × d_model at layer turn × L, then growing by another;
    D follows from the budget of block_widths.
    """
    narrowest = round(turn * layers)
    if not 1 < narrowest < layers:
        raise UserError(f"block_width: a turn of {turn:g} is not within {layers} layers; give one between")

    def find_widths(factor: float) -> list[float]:
        return block_widths(_cross(layers, narrowest, factor), d_model)

    found = find_widths(_find_factor(lambda factor: min(find_widths(factor)), depth * d_model))
    return tuple(_round(found, multiple))


def _round(widths: Sequence[float], multiple: int) -> list[int]:
    """The nearest multiples, at least one."""
    return [max(multiple, multiple * math.floor(width / multiple + 0.5)) for width in widths]


def parse_allocation(text: str, field: str, multiple: int = MULTIPLE, blocks: bool = False) -> Allocation:
    """Read ``tapered(2048, start=1.5, multiple=16)`` or ``permuted(tapered(2048), seed=1)``.

    Args:
        field: whose schedule it is, for messages.
        multiple: of the widths, where the text gives none.
        blocks: see Allocation.

    Raises:
        UserError: it is nothing of that kind; the message has what would be valid.
    """
    where = f"{field}: {quote(text)}"
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _not_valid(where, "it is no NAME(MEAN)") from None
    seed = None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "permuted":
        given = _keywords(where, call, {"seed": int})
        seed = int(given.get("seed", 0))
        if len(call.args) != 1:
            raise _not_valid(where, "permuted takes one allocation")
        call = call.args[0]
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        raise _not_valid(where, "it is no NAME(MEAN)")
    name = call.func.id
    if name not in PROFILES:
        raise UserError(
            f"{where}: {quote(name)} is unknown; give one of {', '.join(PROFILES)}, or permuted of one"
            f"{suggest(name, PROFILES)}"
        )
    code = PROFILES[name].__code__
    own: dict[str, type] = dict.fromkeys(code.co_varnames[1 : code.co_argcount], float)
    given = _keywords(where, call, {"layers": int, "multiple": int} | own)
    mean = [node.value for node in call.args if isinstance(node, ast.Constant) and type(node.value) is int]
    if len(mean) != 1 or len(call.args) != 1 or not 0 < mean[0] <= LARGEST_SIZE:
        raise _not_valid(where, "the mean of the layers comes first, a whole number from 1")
    layers, multiple = given.pop("layers", None), given.pop("multiple", multiple)
    return Allocation(text.strip(), field, name, mean[0], multiple, layers, given, seed, blocks)


def _keywords(where: str, call: ast.Call, types: dict[str, type]) -> dict[str, Any]:
    """The named parameters of a call, each of its type."""
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        name, node = str(keyword.arg), keyword.value
        if name not in types:
            known = f"give {', '.join(types)}" if types else "it has no parameters"
            raise _not_valid(where, f"{name} is unknown; {known}{suggest(name, types)}")
        value: Any = node.value if isinstance(node, ast.Constant) else None
        admitted = (int,) if types[name] is int else (int, float)
        least = 0 if name == "seed" else 1 if types[name] is int else 1e-6
        if type(value) not in admitted or not least <= value <= LARGEST_SIZE:
            raise _not_valid(where, f"{name} is not a {'whole ' * (least in (0, 1))}number from {least:g}")
        found[name] = value
    return found


def _not_valid(where: str, problem: str) -> UserError:
    return UserError(
        f"{where}: {problem}; write NAME(MEAN), such as tapered(2048, multiple=64), NAME being one of "
        f"{', '.join(PROFILES)}"
    )
