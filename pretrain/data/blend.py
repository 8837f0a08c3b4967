"""Assigns each sequence of a blended run to a corpus: exactly by weight, in O(log corpora) per sequence."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

from model.errors import UserError, quote
from pretrain.utils.parsing import parse_fraction

# A number after the last colon, valid or not.
_LIKE_A_WEIGHT = re.compile(r":\s*[+-]?[\d.][\d._/]*(e[+-]?\d+)?\s*$", re.IGNORECASE)
_TOLERANCE = Fraction(1, 10**6)  # "0.333333" three times is meant as thirds


def parse_blend(text: str) -> list[tuple[str, Fraction]]:
    """Parse ``"a:0.7,b:0.3"`` (or ``"a:2/3,b:1/3"``, or one folder without a weight) into (folder, weight).

    Raises UserError for an unreadable or non-positive weight, and weights that do not sum to 1.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UserError(
            "data: no corpus given; valid: FOLDER or FOLDER:WEIGHT,FOLDER:WEIGHT,… with weights summing to 1"
        )
    if len(parts) == 1 and not _LIKE_A_WEIGHT.search(parts[0]):
        return [(parts[0], Fraction(1))]
    blend = []
    for part in parts:
        folder, colon, weight = part.rpartition(":")
        if not colon or not folder:
            raise UserError(
                f"data: {part!r} has no weight; valid in a blend: FOLDER:WEIGHT, such as {part}:0.5"
            )
        blend.append((folder, _weight(weight, folder)))
    total = sum((weight for _, weight in blend), Fraction(0))
    if abs(total - 1) > _TOLERANCE:
        share = ",".join(f"{folder}:{weight / total}" for folder, weight in blend)
        raise UserError(f"data: the weights of {text!r} sum to {total}, not to 1; in the same ratio: {share}")
    return blend


def _weight(text: str, folder: str) -> Fraction:
    weight = parse_fraction(text)
    if weight is None or weight <= 0:
        raise UserError(
            f"data: {quote(text)} is not a weight for {folder!r}; valid: a positive number such as 0.3 or 1/3"
        )
    return weight


class BlendSplitter:
    """Assigns sequence n of the blend to (corpus, number within that corpus).

    A balanced binary tree over the corpora: each node with integer weights a and b sends round(n·a / (a+b))
    of its first n sequences left (Bresenham's line), the rest right. After any n sequences corpus i has
    received n·w_i up to rounding (½ per level of the tree). The error never grows, and the result depends on
    n alone.
    """

    def __init__(self, weights: Sequence[Fraction | int | float]) -> None:
        # str() first: a float stands for the decimal that the user wrote, not for its binary neighbour.
        fractions = [
            Fraction(str(weight)) if isinstance(weight, float) else Fraction(weight) for weight in weights
        ]
        if not fractions or min(fractions) <= 0:
            raise UserError(
                f"data: blend weights {[str(w) for w in fractions]}; valid: one or more positive numbers"
            )
        scale = math.lcm(*(fraction.denominator for fraction in fractions))
        integer_weights = [int(fraction * scale) for fraction in fractions]
        divisor = math.gcd(*integer_weights)
        self._prefix = [0]
        for weight in integer_weights:
            self._prefix.append(self._prefix[-1] + weight // divisor)

    def __call__(self, number: int) -> tuple[int, int]:
        """(index of the corpus, number of the sequence within it) for sequence *number* ≥ 0."""
        prefix, low, high = self._prefix, 0, len(self._prefix) - 1
        while high - low > 1:
            middle = (low + high) // 2
            left_weight, node_weight = prefix[middle] - prefix[low], prefix[high] - prefix[low]
            left_before = (number * left_weight + node_weight // 2) // node_weight
            left_after = ((number + 1) * left_weight + node_weight // 2) // node_weight
            if left_after > left_before:
                number, high = left_before, middle
            else:
                number, low = number - left_before, middle
        return low, number
