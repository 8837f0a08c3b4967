"""What tensor parallelism does to each layer: groups of ranks, form of the exchange, bytes. No torch in here.

``python -m model.parallel_plan --model prism-124m --tensor_parallel 4`` prints the plan; ``--plot plan.png`` draws it.
Model and sizes are refused here before anything is allocated.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from model.config import ModelConfig
from model.errors import UserError, run_command
from model.presets import preset

FormName = Literal["none", "batch", "query"]

DTYPE_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


# ---------------------------------------------------------------------- arithmetic


def head_groups(kv_heads: int, tensor_parallel: int) -> tuple[int, int]:
    """g and r: the t ranks form g groups of r neighbours, each of which owns kv_heads / g whole KV heads."""
    groups = math.gcd(kv_heads, tensor_parallel)
    return groups, tensor_parallel // groups


def choose_form(ranks: int, batch: int, length: int, layer: int) -> FormName:
    """The form in which r ranks share the heads of B sequences of T positions.

    Raises:
        UserError: r divides neither B nor T/2.
    """
    if ranks == 1:
        return "none"
    if batch % ranks == 0:
        return "batch"
    if length % (2 * ranks) == 0:
        return "query"
    raise _cannot_split(batch, length, layer, ranks, ranks)


def _cannot_split(batch: int, length: int, layer: int, ranks: int, multiple: int) -> UserError:
    lower, upper = batch // multiple * multiple, (batch // multiple + 1) * multiple
    return UserError(
        f"micro_batch: {batch} sequences of {length} tokens cannot be shared by the {ranks} ranks that split the "
        f"heads of layer {layer}; micro_batch must be a multiple of {multiple} (nearest: "
        f"{f'{lower} or ' if lower else ''}{upper}), or context_length one of {2 * ranks}"
    )


def check_tensor_parallel(
    config: ModelConfig, tensor_parallel: int, *, sequence_parallel: bool = False
) -> None:
    """Refuse a degree t that does not divide a width of the model, naming the nearest that divide all.

    Raises:
        UserError: t divides not every layer's attention width A_l, key/value width, or ffn_width; or, with
            sequence parallelism, not context_length.
    """
    if type(tensor_parallel) is not int or tensor_parallel < 1:
        raise UserError(f"tensor_parallel: {tensor_parallel!r} is not valid; give a positive integer")
    if tensor_parallel == 1:
        return
    widths = [("ffn_width", config.ffn_width)]
    for layer in range(config.num_layers):
        widths.append((f"attention width (layer {layer})", config.attention_width(layer)))
        widths.append((f"key/value width (layer {layer})", config.kv_width(layer)))
    if sequence_parallel:
        widths.append(("context_length (sequence_parallel)", config.context_length))
    for name, width in widths:
        if width % tensor_parallel:
            shared = math.gcd(*(width for _, width in widths))
            raise UserError(
                f"tensor_parallel: {tensor_parallel} does not divide {name} {width}; nearest valid: "
                f"{_nearest_divisors(shared, tensor_parallel)}"
            )


def split_multiple(config: ModelConfig, tensor_parallel: int) -> int:
    """The number that a micro-batch of full sequences must be a multiple of, so that every layer's ranks can split it.

    1 where all layers have whole heads or can use the query form.
    """
    shares = {
        head_groups(config.layer_kv_heads(layer), tensor_parallel)[1] for layer in range(config.num_layers)
    }
    return math.lcm(*(ranks for ranks in shares if ranks > 1 and config.context_length % (2 * ranks)))


def check_split(config: ModelConfig, tensor_parallel: int, micro_batch: int) -> None:
    """Refuse a micro-batch that some layer's ranks can split in neither form; UserError names the valid ones."""
    multiple = split_multiple(config, tensor_parallel)
    if micro_batch % multiple == 0:
        return
    for layer in range(config.num_layers):
        _, ranks = head_groups(config.layer_kv_heads(layer), tensor_parallel)
        if micro_batch % ranks and config.context_length % (2 * ranks):
            raise _cannot_split(micro_batch, config.context_length, layer, ranks, multiple)


def _nearest_divisors(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted]
    above = [d for d in divisors if d > wanted]
    return " or ".join(str(d) for d in [*below[-1:], *above[:1]])


# ---------------------------------------------------------------------- plan


@dataclass(frozen=True)
class LayerPlan:
    """One layer. Bytes are those that one rank sends in the forward and backward pass of one micro-batch."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    groups: int
    """g"""
    ranks: int
    """r = t / g: ranks that share whole heads; 1 needs no exchange."""
    form: FormName
    exchange_bytes: int
    """For the head exchange."""
    all_reduce_bytes: int
    """For the sums after o and down and, backward, before q, k, v and gate, up: what any tensor parallelism sends."""


@dataclass(frozen=True)
class ParallelPlan:
    """All layers of a model, at one degree and micro-batch."""

    tensor_parallel: int
    micro_batch: int
    context_length: int
    layers: tuple[LayerPlan, ...]
    outside_bytes: int
    """All-reduces outside the layers: embedding, output head, and the loss's fp32 sums."""

    @property
    def exchange_bytes(self) -> int:
        """Head exchange of all layers."""
        return sum(layer.exchange_bytes for layer in self.layers)

    @property
    def all_reduce_bytes(self) -> int:
        """What tensor parallelism sends anyway."""
        return self.outside_bytes + sum(layer.all_reduce_bytes for layer in self.layers)


def plan(config: ModelConfig, tensor_parallel: int, micro_batch: int, dtype: str = "bf16") -> ParallelPlan:
    """Plan a micro-batch of full sequences.

    Bytes are counted as a ring sends them: an all-reduce of n bytes sends 2 n (t-1)/t per rank, an all-gather to n
    bytes and an all-to-all of n bytes n (r-1)/r. Activation checkpointing, which repeats the forward pass, is not in.

    Raises:
        UserError: t does not divide the model, or the micro-batch cannot be split.
    """
    check_tensor_parallel(config, tensor_parallel)
    check_split(config, tensor_parallel, micro_batch)
    t, size, tokens = tensor_parallel, DTYPE_BYTES[dtype], micro_batch * config.context_length
    hidden = _ring(tokens * config.d_model * size, t)
    layers = []
    for layer in range(config.num_layers):
        groups, ranks = head_groups(config.layer_kv_heads(layer), t)
        form = choose_form(ranks, micro_batch, config.context_length, layer)
        one_way = exchange_elements(
            form, ranks, tokens, config.attention_width(layer) // t, config.kv_width(layer) // t
        )
        layers.append(
            LayerPlan(
                layer=layer,
                heads=config.heads[layer],
                kv_heads=config.layer_kv_heads(layer),
                head_dim=config.layer_head_dim(layer),
                groups=groups,
                ranks=ranks,
                form=form,
                exchange_bytes=2 * one_way * size,
                all_reduce_bytes=4 * hidden,
            )
        )
    # Embedding forward, output head backward; the largest, the sum and the label's logit of each token (fp64 at fp64).
    outside = 2 * hidden + _ring(3 * tokens * max(4, size), t)
    return ParallelPlan(t, micro_batch, config.context_length, tuple(layers), outside if t > 1 else 0)


def exchange_elements(form: FormName, ranks: int, tokens: int, query_width: int, kv_width: int) -> int:
    """Elements that a rank sends for one layer in one direction; the backward pass sends as many.

    Args:
        tokens: B T.
        query_width: columns of q on a rank, A_l / t.
        kv_width: columns of k, and of v, on a rank.
    """
    if form == "batch":  # q, k, v there and the output back
        return tokens * (2 * query_width + 2 * kv_width) * (ranks - 1) // ranks
    if form == "query":  # q there and the output back; k and v to all
        return tokens * 2 * query_width * (ranks - 1) // ranks + tokens * 2 * kv_width * (ranks - 1)
    return 0


def _ring(number: int, ranks: int) -> int:
    """Bytes that a rank sends in an all-reduce of *number* bytes."""
    return 2 * number * (ranks - 1) // ranks


# ---------------------------------------------------------------------- command


def describe(found: ParallelPlan, accumulation: int = 1) -> str:
    """The plan as an aligned table and its totals, in MiB per rank and optimizer step."""
    rows = [
        ("layer", "heads", "kv", "head dim", "groups", "ranks a head group", "form", "exchange", "all-reduce")
    ]
    for layer in found.layers:
        rows.append(
            (
                str(layer.layer),
                str(layer.heads),
                str(layer.kv_heads),
                str(layer.head_dim),
                str(layer.groups),
                str(layer.ranks),
                "-" if layer.form == "none" else layer.form,
                _mebibytes(layer.exchange_bytes * accumulation),
                _mebibytes(layer.all_reduce_bytes * accumulation),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    exchange, anyway = found.exchange_bytes * accumulation, found.all_reduce_bytes * accumulation
    share = f", {100 * exchange / anyway:.1f} % on top" if anyway else ""
    return "\n".join(
        [
            *lines,
            f"sent by each rank per step of {accumulation} x {found.micro_batch} sequences of "
            f"{found.context_length} tokens at t = {found.tensor_parallel}, forward and backward, in MiB:",
            f"  all-reduces that tensor parallelism costs anyway  {_mebibytes(anyway)}"
            f"  (outside the layers {_mebibytes(found.outside_bytes * accumulation)})",
            f"  head exchange                                     {_mebibytes(exchange)}{share}",
        ]
    )


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:,.2f}"


def draw(found: ParallelPlan, title: str, path: str) -> None:
    """Draw heads per layer, coloured by form, over the bytes that each layer sends; UserError if it cannot be saved."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (heads_axis, bytes_axis) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    colors = {"none": "tab:gray", "batch": "tab:blue", "query": "tab:orange"}
    labels = {"none": "whole heads", "batch": "batch form", "query": "query form"}
    for form in colors:
        chosen = [layer for layer in found.layers if layer.form == form]
        if chosen:
            places = [layer.layer for layer in chosen]
            heads_axis.bar(places, [layer.heads for layer in chosen], color=colors[form], label=labels[form])
    for layer in found.layers:
        heads_axis.annotate(
            f"{layer.groups}x{layer.ranks}", (layer.layer, layer.heads), ha="center", va="bottom", fontsize=8
        )
    heads_axis.set(ylabel="heads (groups x ranks)", title=title)
    heads_axis.margins(y=0.15)
    places = [layer.layer for layer in found.layers]
    anyway = [layer.all_reduce_bytes / 2**20 for layer in found.layers]
    exchange = [layer.exchange_bytes / 2**20 for layer in found.layers]
    bytes_axis.bar(places, anyway, color="tab:gray", label="all-reduces")
    bytes_axis.bar(places, exchange, bottom=anyway, color="tab:red", label="head exchange")
    bytes_axis.set(xlabel="layer", ylabel="MiB sent per rank and micro-batch")
    bytes_axis.set_xticks(places)
    for axis in (heads_axis, bytes_axis):  # beside the bars, which fill the axes
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
        raise UserError(f"--plot: cannot write {path!r}: {error}".replace("\n", " ")) from error
    finally:
        plt.close(figure)


def run_parallel_plan(arguments: list[str]) -> None:
    """Print, and draw if asked, the plan of a preset.

    Raises:
        UserError: an unknown preset, a degree that does not divide it, or a file that cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m model.parallel_plan", description="How tensor parallelism spreads a model's heads."
    )
    parser.add_argument("--model", required=True, help="preset; python -m model.presets lists them")
    parser.add_argument("--heads", help="head schedule in place of the preset's, such as 3x2,6x2,8x2,12x6")
    parser.add_argument("--tensor_parallel", type=int, required=True, help="t: ranks that share the model")
    parser.add_argument("--micro_batch", type=int, default=8, help="B: sequences per rank and pass (8)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step (1)")
    parser.add_argument("--dtype", choices=sorted(DTYPE_BYTES), default="bf16", help="of activations (bf16)")
    parser.add_argument("--plot", metavar="FILE", help="draw the plan, for example plan.png")
    options = parser.parse_args(arguments)
    for name in ("micro_batch", "accumulation"):
        if getattr(options, name) < 1:
            raise UserError(f"{name}: {getattr(options, name)} is not valid; give a positive number")
    config = preset(options.model)
    if options.heads is not None:
        config = config.replace(heads=options.heads)
    found = plan(config, options.tensor_parallel, options.micro_batch, options.dtype)
    print(describe(found, options.accumulation))
    if options.plot:
        title = f"{options.model} at t = {options.tensor_parallel}, micro-batch {options.micro_batch}"
        draw(found, title, options.plot)
        print(f"wrote {options.plot}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(run_parallel_plan, arguments)


if __name__ == "__main__":
    sys.exit(main())
