"""Seeded weights that do not depend on ranks, devices, dtypes, ZeRO stages or the order of parameters."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.linears import shard_dim
from model.parameters import ParameterRole, has_vocabulary_rows, is_hidden, parameter_roles
from model.transformer import Transformer

Gather = Callable[[nn.Parameter], AbstractContextManager[Any]]


def initialize(model: Transformer, seed: int, gather: Gather = nullcontext) -> None:
    """Give every parameter its initial value, in place; with tensor parallelism, this rank's part of it.

    gather(parameter) is a context manager that gives the parameter its full shape and keeps what is written
    to it; the default suits parameters that are not partitioned. For ZeRO-3 it is
    ``lambda p: deepspeed.zero.GatheredParameters(p, modifier_rank=0)``.
    """
    roles = parameter_roles(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            with gather(parameter):
                shape, dim, t = list(parameter.shape), shard_dim(parameter), model.grid.tensor_parallel
                if dim is not None:
                    shape[dim] *= t
                value = initial_value(name, roles[name], shape, model.config, seed)
                if dim is not None:  # drawn whole, then cut: the same model for any t
                    value = value.chunk(t, dim)[model.grid.tensor_rank]
                parameter.copy_(value)  # to the parameter's dtype and device


def initial_value(
    name: str, role: ParameterRole, shape: Sequence[int], config: ModelConfig, seed: int
) -> Tensor:
    """The full initial tensor of one parameter, fp32 on the CPU; a pure function of its arguments.

    Its entries are independent draws from a normal distribution (initial_distribution). Padded vocabulary
    rows are 0, and only the real ones are drawn, because a draw of another size need not begin with the same
    numbers.
    """
    mean, std, rows = initial_distribution(name, role, shape, config)
    value = torch.zeros(*shape, device="cpu", dtype=torch.float32)
    value[:rows] = mean
    if std > 0:
        value[:rows].normal_(mean, std, generator=_generator(name, seed))
    return value


def initial_distribution(
    name: str, role: ParameterRole, shape: Sequence[int], config: ModelConfig
) -> tuple[float, float, int]:
    """Mean and standard deviation of a parameter's initial entries, and its first rows that have such.

    Two parameters of one name, shape and distribution begin with the same values if they have one seed.

    Norm weights are 1 and biases 0. Everything else has mean 0 and std init_std, or init_std / sqrt(n) for
    the n projections that write into the residual stream, o and down (GPT-2; nanoGPT; the Prism paper leaves
    it open): n is 2L where every layer has both. With parametrization mup the variance of the blocks'
    matrices is divided by the ratio of the layer's width.
    """
    rows = config.vocab_size if has_vocabulary_rows(name) else shape[0]
    if role.kind in ("norm", "bias"):
        return float(role.kind == "norm"), 0.0, rows
    residual = role.part == "o" or name.endswith(".ffn.down.weight")
    divisor: float = config.residual_writes if residual else 1
    if is_hidden(role):
        assert role.layer is not None
        divisor *= config.layer_ratio(role.layer)
    return 0.0, config.init_std / math.sqrt(divisor), rows


def _generator(name: str, seed: int) -> torch.Generator:
    """A CPU generator for (seed, name); sha256 because Python's hash() differs from process to process."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device="cpu")
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # 63 bits
    return generator
