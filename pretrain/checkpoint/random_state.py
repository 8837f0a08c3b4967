"""The states of a rank's random number generators as tensors: Python's, numpy's and torch's."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

PREFIX = "random."


def random_state() -> dict[str, Tensor]:
    """The states by name.

    ``random.python`` and ``random.numpy`` (both Mersenne Twisters) are float64 [627]: 624 words, the position
    in them, and whether a normal number is kept for the next call, and which. ``random.torch`` and
    ``random.cuda`` (this rank's device) are the bytes that torch returns.
    """
    _, words, kept = random.getstate()
    numpy = np.random.get_state(legacy=False)
    twister = numpy["state"]
    states = {
        "python": _pack(words[:-1], words[-1], kept),
        "numpy": _pack(twister["key"], twister["pos"], numpy["gauss"] if numpy["has_gauss"] else None),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # not in a run on CPUs of a machine with a GPU, which it would open
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"{PREFIX}{name}": state for name, state in states.items()}


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Restore the generators from what random_state returned.

    Raises:
        Exception: of any class, from a state that makes no sense.
    """
    words, position, kept = _unpack(states[f"{PREFIX}python"])
    random.setstate((3, (*words, position), kept))
    words, position, kept = _unpack(states[f"{PREFIX}numpy"])
    key = np.array(words, dtype=np.uint32)
    np.random.set_state(("MT19937", key, position, int(kept is not None), kept or 0.0))
    torch.set_rng_state(states[f"{PREFIX}torch"].clone())
    if f"{PREFIX}cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states[f"{PREFIX}cuda"].clone())


def _pack(words: Sequence[int], position: int, kept: float | None) -> Tensor:
    # Whole numbers below 2^53 are exact in float64.
    numbers = [*words, position, kept is not None, kept or 0.0]
    return torch.tensor([float(number) for number in numbers], dtype=torch.float64)


def _unpack(state: Tensor) -> tuple[list[int], int, float | None]:
    *words, position, has_kept, kept = state.tolist()
    return [int(word) for word in words], int(position), kept if has_kept else None
