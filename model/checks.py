"""Checks that the fields of a ModelConfig agree: UserError names the field and what would be valid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model.errors import UserError, describe_nearest, divisors
from model.schedules import SCHEDULES, YarnScaling

if TYPE_CHECKING:
    from model.config import ModelConfig

LARGEST_WIDTH_RATIO = 64
"""Of d_model and base_width, either way: further apart no rate has been seen to transfer."""


def check_model(config: ModelConfig) -> None:
    """Check a ModelConfig whose fields are each valid, and whose allocations have been replaced by widths."""
    if (config.attention_scale_base is None) == (config.attention_scale in ("head_dim", "constant")):
        kind = f"attention_scale {config.attention_scale!r}"
        raise UserError(
            f"attention_scale_base: missing; {kind} needs the head dim at which it equals 1/sqrt(d_h)"
            if config.attention_scale_base is None
            else f"attention_scale_base: {kind} takes none; leave it out, or give null"
        )
    _check_parametrization(config)
    if config.rope_scaling is not None and config.positions != "rope":
        raise UserError(f"rope_scaling: positions {config.positions!r} have no wavelengths; leave it out")
    if config.classes is not None and (config.logit_softcap is not None or config.z_loss):
        name = "z_loss" if config.logit_softcap is None else "logit_softcap"
        off = "0" if name == "z_loss" else "null"
        raise UserError(f"{name}: is for language models, and this is a classifier; give {off}")
    for name in SCHEDULES[1:]:
        schedule = getattr(config, name)
        if isinstance(schedule, tuple) and len(schedule) != config.num_layers:
            raise UserError(
                f"{name}: {len(schedule)} layers given, but heads has {config.num_layers}; "
                f"{name} must have {config.num_layers} values"
            )
    if config.rope_scaling is not None and config.attention_layers and not config.rotary_kinds:
        raise UserError("rope_scaling: no layer has positions (rope_base null); leave it out")
    if isinstance(config.rope_scaling, YarnScaling):
        for layer in config.attention_layers:
            if (base := config.layer_base(layer)) is not None and base <= 1:
                raise UserError(f"rope_base: {base:g} with rope_scaling 'yarn'; give a base above 1")
    _check_widths(config)
    for layer, heads in enumerate(config.heads):
        if heads:
            _check_attention(config, layer, heads)
        else:
            _check_absent(config, layer)


def _check_parametrization(config: ModelConfig) -> None:
    if config.parametrization == "standard":
        if config.base_width is not None:
            raise UserError("base_width: parametrization 'standard' takes none; leave it out")
        return
    if config.base_width is None:
        raise UserError("base_width: missing; parametrization 'mup' needs the d_model of its rates")
    if config.attention_scale == "sqrt_head_dim":
        raise UserError(
            "attention_scale: 'sqrt_head_dim' does not carry over to other widths; valid with "
            "parametrization 'mup': head_dim or constant (with attention_scale_base), none"
        )


def _check_widths(config: ModelConfig) -> None:
    """Check that widths are not too far from that of the rates."""
    widths = [("d_model", config.d_model)]
    if config.block_width is not None:
        widths += [(f"block_width (layer {i})", width) for i, width in enumerate(config.block_widths)]
    for name, width in widths:
        ratio = width / (config.base_width or width)
        if not 1 / LARGEST_WIDTH_RATIO <= ratio <= LARGEST_WIDTH_RATIO:
            raise UserError(
                f"base_width: {config.base_width} is more than {LARGEST_WIDTH_RATIO} times "
                f"{'narrower' if ratio > 1 else 'wider'} than {name} {width}; valid: "
                f"{-(-width // LARGEST_WIDTH_RATIO)} to {width * LARGEST_WIDTH_RATIO}"
            )


def _check_attention(config: ModelConfig, layer: int, heads: int) -> None:
    """Check a layer with attention."""
    # Of a head dim: rotary positions are pairs.
    multiple = 2 if config.layer_base(layer) is not None and config.layer_share(layer) == 1 else 1
    width = config.layer_width(layer)
    if config.head_dim is None and width % (multiple * heads):
        share = config.layer_share(layer) if config.layer_base(layer) is not None else 0
        groups = config.kv_heads[layer] if config.kv_heads is not None else 1
        valid = [
            count
            for count in divisors(width)
            if width % (multiple * count) == 0
            and count % (groups or 1) == 0
            and (not share or _is_even(share * width / count))
        ]
        raise UserError(
            f"heads: layer {layer} has {heads} heads, which do not divide "
            f"{'d_model' if config.block_width is None else 'its block_width'} {width}"
            f"{' into even head dims' if width % heads == 0 else ''}; nearest valid: "
            f"{describe_nearest(heads, valid)}"
        )
    head_dim = config.layer_head_dim(layer)
    if not head_dim:
        raise UserError(f"head_dim: layer {layer} has 0, and {heads} heads; give a number above 0")
    if head_dim % multiple:
        raise UserError(
            f"head_dim: layer {layer} has {head_dim}; positions 'rope' needs an even head dim; "
            f"nearest valid: {describe_nearest(head_dim, [head_dim - 1, head_dim + 1])}"
        )
    _check_rotary(config, layer, head_dim)
    kv_heads = config.layer_kv_heads(layer)
    if not kv_heads or heads % kv_heads:
        raise UserError(
            f"kv_heads: layer {layer} has {kv_heads} key/value heads, which do not divide its "
            f"{heads} heads; nearest valid: {describe_nearest(kv_heads, divisors(heads))}"
        )


def _check_rotary(config: ModelConfig, layer: int, head_dim: int) -> None:
    """Check that a layer rotates an even number of its heads' dims, up to the digits of a written share."""
    dims = config.layer_share(layer) * head_dim
    if config.layer_base(layer) is not None and not _is_even(dims):
        low = int(dims) // 2 * 2
        valid = [f"{count / head_dim:.6g}" for count in (low, low + 2) if 0 < count <= head_dim]
        raise UserError(
            f"rotary_share: layer {layer} rotates {config.layer_share(layer):g} of a head dim of "
            f"{head_dim}, {dims:g} of its dims; they must be an even number; nearest valid: "
            f"{' or '.join(valid) or 'none, with such a head dim'}"
        )


def _is_even(dims: float) -> bool:
    return abs(dims / 2 - max(1, round(dims / 2))) <= 1e-3


def _check_absent(config: ModelConfig, layer: int) -> None:
    """Check a layer without attention."""
    if not config.layer_ffn_width(layer):
        raise UserError(
            f"heads: layer {layer} has neither heads nor a feed-forward network (ffn_width 0); give it "
            "one of both, or leave the layer out"
        )
    if config.layer_kv_heads(layer):
        raise UserError(
            f"kv_heads: layer {layer} has {config.layer_kv_heads(layer)} key/value heads, and no heads; "
            "nearest valid: 0"
        )
