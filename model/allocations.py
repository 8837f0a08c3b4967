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

PERMUTED = "permuted(tapered(2048), seed=1)"
"""An example, for messages."""
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
    return tapered(layers, end, start)[::-1]


def middle(layers: int, share: float = 0.7) -> list[float]:
    """All of it in the middle *share* of the layers, nothing in the others (arXiv 2508.17734). Of an odd
    number of others the later side has one more, which the paper leaves open."""
    count = _layers_of("share", share, layers, 1)
    first = (layers - count) // 2
    return [layers / count if first <= layer < first + count else 0.0 for layer in range(layers)]


def ends(layers: int, share: float = 0.7) -> list[float]:
    """All of it in the layers that ``middle`` leaves empty: its complement."""
    empty = [not part for part in middle(layers, share)]
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
    narrowest = _turn(layers, turn, depth)

    def narrow(factor: float) -> float:
        values = _cross(layers, narrowest, factor)
        return min(values) * layers / sum(values)

    return _scale_to_mean(_cross(layers, narrowest, _find_factor(narrow, depth)))


def _turn(layers: int, turn: float, depth: float) -> int:
    """How many layers a waist falls."""
    if depth >= 1:
        raise UserError(f"depth: {depth:g} is not valid; give a number below 1")
    return _layers_of("turn", turn, layers, 2)


def _layers_of(name: str, share: float, layers: int, least: int) -> int:
    """The share in whole layers, of which it leaves one and takes *least*; the parameter is called *name*."""
    if least <= (count := round(share * layers)) < layers:
        return count
    if layers <= least:
        raise UserError(
            f"{name}: needs {least + 1} layers or more, and there are {layers}; give another shape"
        )
    low, high = f"{least / layers:.3g}", f"{(layers - 1) / layers:.3g}"
    raise UserError(f"{name}: {share:g} is not valid for {layers} layers; give a number from {low} to {high}")


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

    def widths(self, layers: int | None = None, d_model: int | None = None) -> tuple[int, ...]:
        """The widths of all layers.

        Args:
            layers: of the model; None: as the text says.
            d_model: of the model, for block widths; None: the mean.

        Raises:
            UserError: parameters without sense, or another number of layers than the model's; the message
                does not name the field.
        """
        count = self.layers if layers is None else layers
        if count is None:
            raise UserError("how many layers? give layers=12, say")
        if self.layers not in (None, count):
            raise UserError(f"layers={self.layers}, and the model has {count}; leave it out")
        if count > MOST_LAYERS:
            raise UserError(f"more than {MOST_LAYERS:,} layers; give at most that")
        if self.blocks:
            found = self._block_widths(count, d_model or self.mean)
        else:
            profile = PROFILES[self.name](count, **self.parameters)
            mean = sum(profile) / count  # not 1 for a taper from 2 to 1, say
            found = round_to_budget([part / mean for part in profile], self.mean, self.multiple)
        if self.seed is not None:
            random.Random(self.seed).shuffle(found)
        return tuple(found)

    def describe_excess(self, widths: Sequence[int], d_model: int) -> str:
        """By how much the widths exceed the uniform model's or fall short of them; empty: not at all."""
        uniform = len(widths) * self.mean
        if self.blocks:
            equal = block_parameters([self.mean] * len(widths), d_model)
            what = describe_share(block_parameters(widths, d_model) / equal)
            return f"have {what} (with FFNs in proportion)" if what else ""
        excess = sum(widths) - uniform
        where = f"{abs(excess):,} {'above' if excess > 0 else 'below'} the uniform model's {uniform:,}"
        return f"add up to {sum(widths):,}, {where}" if excess else ""

    def _block_widths(self, layers: int, d_model: int) -> list[int]:
        if self.name == "waist":
            given: dict[str, Any] = {**self.parameters, "multiple": self.multiple, "d_model": d_model}
            return [*variable_widths(self.mean, layers, **given)]
        profile = PROFILES[self.name](layers, **self.parameters)
        if not all(profile):
            raise UserError("a layer has a width of 0; give a shape that leaves no layer empty")
        return _round(block_widths(profile, self.mean, d_model), self.multiple)


def describe_share(share: float) -> str:
    """How parameters that are *share* of the uniform model's differ from them; empty: by less than a
    twentieth of a percent."""
    if abs(share - 1) < 5e-4:
        return ""
    return f"{100 * abs(share - 1):.1f} % {'more' if share > 1 else 'fewer'} parameters than uniform ones"


def round_to_budget(profile: Sequence[float], mean: int, multiple: int) -> list[int]:
    """Widths near mean × profile, multiples of *multiple*, whose sum is the multiple that is nearest to
    layers × mean.

    Each is rounded; what is then too much or too little goes, a multiple each, to the layers with the largest
    error of rounding, of equal ones to the widest: a profile that falls and its reverse have the same widths.
    A layer whose profile is 0 stays at 0, any other has at least one multiple.
    """
    # Errors of rounding may differ by that of floats: those are equal.
    exact = [round(mean * part / multiple, 9) for part in profile]
    units = [max(1, math.floor(value + 0.5)) if value else 0 for value in exact]
    while missing := math.floor(len(exact) * mean / multiple + 0.5) - sum(units):
        sign = 1 if missing > 0 else -1
        free = [layer for layer, count in enumerate(units) if exact[layer] and (sign > 0 or count > 1)]
        if not free:
            break
        errors = {layer: round(sign * (exact[layer] - units[layer]), 9) for layer in free}
        units[max(free, key=lambda layer: (errors[layer], exact[layer], -layer))] += sign
    return [count * multiple for count in units]


def block_widths(profile: Sequence[float], mean: int, d_model: int) -> list[float]:
    """Widths of the layers in proportion to the profile, with the parameters of a uniform model whose layers
    have *mean* (arXiv 2606.18246)."""

    def parameters(scale: float) -> float:
        return block_parameters([scale * part for part in profile], d_model)

    equal = block_parameters([mean] * len(profile), d_model)
    scale = _bisect(parameters, equal, 0.0, 4 * mean * len(profile) / min(profile))
    return [scale * part for part in profile]


def block_parameters(widths: Sequence[float], d_model: int) -> float:
    """A layer of width w has 16 w² parameters (attention 4, SwiGLU of 4 w); less those that cannot matter,
    because the embeddings keep d_model: q, k and v of the first layer read nothing beyond it, and of what the
    last FFN writes there nothing is read, 3 and 4 times w (w - d_model)."""
    first, last = widths[0], widths[-1]
    lost = 3 * first * max(0, first - d_model) + 4 * last * max(0, last - d_model)
    return 16 * sum(width**2 for width in widths) - lost


def variable_widths(
    mean: int,
    layers: int,
    turn: float = 0.75,
    depth: float = 0.3,
    multiple: int = 32,
    d_model: int | None = None,
) -> tuple[int, ...]:
    """Residual widths of the layers of a Variable-Width Transformer with the parameters of a uniform one
    whose layers have *mean* (arXiv 2606.18246: the × shape, and its budget).

    d_1 = d_L = D, falling by a constant factor to depth × mean at layer turn × L, then growing by another;
    D follows from the budget of block_widths. d_model is the mean where it is not given.
    """
    narrowest = _turn(layers, turn, depth)

    def find_widths(factor: float) -> list[float]:
        return block_widths(_cross(layers, narrowest, factor), mean, d_model or mean)

    found = find_widths(_find_factor(lambda factor: min(find_widths(factor)), depth * mean))
    return tuple(_round(found, multiple))


def _round(widths: Sequence[float], multiple: int) -> list[int]:
    """The nearest multiples, at least one."""
    return [max(multiple, multiple * math.floor(width / multiple + 0.5)) for width in widths]


def parse_allocation(text: str, multiple: int = MULTIPLE, blocks: bool = False) -> Allocation:
    """Read ``tapered(2048, start=1.5, multiple=16)`` or ``permuted(tapered(2048), seed=1)``.

    Args:
        multiple: of the widths, where the text gives none.
        blocks: see Allocation.

    Raises:
        UserError: it is nothing of that kind; the message says what would be valid, not which field it is.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _not_valid("it is no NAME(MEAN)") from None
    seed = None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "permuted":
        given = _keywords(call, {"seed": int})
        seed = int(given.get("seed", 0))
        if len(call.args) != 1:
            raise UserError(f"permuted takes one allocation and a seed, such as {PERMUTED}")
        call = call.args[0]
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        raise _not_valid("it is no NAME(MEAN)")
    name = call.func.id
    if name == "permuted":
        raise UserError(f"permuted is given twice; write it once, such as {PERMUTED}")
    if name not in PROFILES:
        raise UserError(
            f"{quote(name)} is unknown; give one of {', '.join(PROFILES)}, or permuted of one"
            f"{suggest(name, PROFILES)}"
        )
    code = PROFILES[name].__code__
    own: dict[str, type] = dict.fromkeys(code.co_varnames[1 : code.co_argcount], float)
    given = _keywords(call, {"layers": int, "multiple": int} | own)
    mean = [node.value for node in call.args if isinstance(node, ast.Constant) and type(node.value) is int]
    if len(mean) != 1 or len(call.args) != 1 or not 0 < mean[0] <= LARGEST_SIZE:
        raise _not_valid("the mean of the layers comes first, a whole number from 1")
    layers, multiple = given.pop("layers", None), given.pop("multiple", multiple)
    if mean[0] < multiple:
        raise UserError(
            f"its mean is below the multiple of the widths, {multiple}; give multiple={mean[0]} or less"
        )
    return Allocation(text.strip(), name, mean[0], multiple, layers, given, seed, blocks)


def _keywords(call: ast.Call, types: dict[str, type]) -> dict[str, Any]:
    """The named parameters of a call, each of its type."""
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        name, node = str(keyword.arg), keyword.value
        if name not in types:
            if name == "seed":
                raise UserError(f"seed is for permuted, such as {PERMUTED}")
            known = f"give {', '.join(types)}" if types else "it has no parameters"
            raise _not_valid(f"{name} is unknown; {known}{suggest(name, types)}")
        value: Any = node.value if isinstance(node, ast.Constant) else None
        admitted = (int,) if types[name] is int else (int, float)
        least = 0 if name == "seed" else 1 if types[name] is int else 1e-6
        if type(value) not in admitted or not least <= value <= LARGEST_SIZE:
            raise _not_valid(f"{name} is not a {'whole ' * (least in (0, 1))}number from {least:g}")
        found[name] = value
    return found


def _not_valid(problem: str) -> UserError:
    return UserError(
        f"{problem}; write NAME(MEAN), such as tapered(2048, multiple=64), NAME being one of "
        f"{', '.join(PROFILES)}"
    )
