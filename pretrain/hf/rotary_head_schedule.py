"""Rotary positions of a decoder whose layers have their own numbers of attention heads.

This file is shipped with exported checkpoints and must not import anything but torch and transformers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .configuration_head_schedule import HeadScheduleConfig, layer_rotary

Rotation = tuple[Tensor, Tensor]  # cosines and sines, each [B or 1, T, d_h]


class HeadScheduleRotaryEmbedding(nn.Module):
    """Cosines and sines of every position, for each number of rotated dims and base that some layer has.

    The frequencies stay fp32 when the model is cast to a smaller type: at position 1000 a bf16 angle would be
    wrong by several radians. So their bits are kept as integers, which no cast changes.
    """

    def __init__(self, config: HeadScheduleConfig) -> None:
        super().__init__()
        self.scaling = config.rotary_scaling
        self.magnitude = magnitude(config.rotary_scaling)
        layers = range(config.num_hidden_layers)
        self.kinds = sorted({kind for layer in layers if (kind := layer_rotary(config, layer)) is not None})
        for index, kind in enumerate(self.kinds):
            self.register_buffer(f"frequencies_{index}", self.frequencies(*kind), persistent=False)

    def frequencies(self, dims: int, base: float) -> Tensor:
        """Bits of the angle per position of each pair, int32 [dims / 2]; computed on the CPU, the same for
        every device."""
        exponents = torch.arange(0, dims, 2, device="cpu", dtype=torch.float32) / dims
        frequencies = 1.0 / base**exponents
        if self.scaling is not None:
            kept = kept_share(frequencies, base, self.scaling)
            frequencies = frequencies * (kept + (1 - kept) / self.scaling["factor"])
        return frequencies.view(torch.int32)

    @torch.no_grad()
    def forward(self, position_ids: Tensor) -> dict[tuple[int, float] | None, Rotation]:
        """Position ids [B or 1, T] -> by rotated dims and base, cosines and sines [B or 1, T, dims], fp32."""
        rotations: dict[tuple[int, float] | None, Rotation] = {}
        for index, kind in enumerate(self.kinds):
            bits = getattr(self, f"frequencies_{index}")
            frequencies = decode_bits(bits) if torch.compiler.is_exporting() else bits.view(torch.float32)
            angles = (position_ids[..., None].float() * frequencies).repeat(1, 1, 2)
            rotations[kind] = (angles.cos() * self.magnitude, angles.sin() * self.magnitude)
        return rotations


def decode_bits(bits: Tensor) -> Tensor:
    """Positive fp32 numbers from their bits, int32, by exact arithmetic: ONNX has no view as another type."""
    fraction, exponent = (bits % 2**23).float() / 2**23, bits // 2**23 - 127
    return (1 + fraction) * 2.0 ** exponent.float()


def kept_share(frequencies: Tensor, base: float, scaling: dict[str, Any]) -> Tensor:
    """Which share of each frequency [dims / 2] a scaling keeps; the rest is divided by its factor.

    llama3: by the turns in the original context. linear: nothing. yarn (arXiv 2309.00071): by the dim.
    """
    if scaling["type"] == "linear":
        return torch.zeros_like(frequencies)
    if scaling["type"] == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_context_length"] * frequencies / (2 * math.pi)
        return ((turns - low) / (high - low)).clamp(0, 1)
    pairs = len(frequencies)

    def pair_of(turns: float) -> float:
        """The pair, as a fraction, that turns so often in the original context."""
        longest = scaling["original_context_length"] / (turns * 2 * math.pi)
        return pairs * math.log(longest) / math.log(base)

    first, last = pair_of(scaling["beta_fast"]), pair_of(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    ramp = (torch.arange(pairs, device="cpu", dtype=frequencies.dtype) - first) / ((last - first) or 0.001)
    return 1 - ramp.clamp(0, 1)


def magnitude(scaling: dict[str, Any] | None) -> float:
    """The factor on cosines and sines; only yarn has one."""
    if scaling is None or scaling["type"] != "yarn":
        return 1.0
    return scaling["attention_factor"] or 0.1 * math.log(max(scaling["factor"], 1.0)) + 1.0
