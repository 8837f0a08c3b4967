"""Aligned tables that this package's commands print: presets, and how tensor parallelism spreads a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from model.heads import format_heads
from model.parallel_plan import ParallelPlan
from model.presets import preset


def preset_table(names: Sequence[str]) -> str:
    """An aligned text table of presets: sizes, schedule, exact parameters, training FLOPs per token."""
    rows = [("name", "layers", "d_model", "heads", "head dims", "parameters", "padded", "FLOPs/token")]
    for name in names:
        config = preset(name)
        head_dims = format_heads(config.layer_head_dim(layer) for layer in range(config.num_layers))
        rows.append(
            (
                name,
                str(config.num_layers),
                str(config.d_model),
                format_heads(config.heads),
                head_dims,
                f"{config.num_parameters():,}",
                f"{config.num_parameters(padded=True):,}",
                f"{config.flops_per_token():,}",
            )
        )
    return "\n".join(aligned(rows, left={0, 3, 4}))


def plan_table(found: ParallelPlan, accumulation: int = 1) -> str:
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
    exchange, all_reduce = found.exchange_bytes * accumulation, found.all_reduce_bytes * accumulation
    share = f", {100 * exchange / all_reduce:.1f} % on top" if all_reduce else ""
    return "\n".join(
        [
            *aligned(rows),
            f"sent by each rank per step of {accumulation} x {found.micro_batch} sequences of "
            f"{found.context_length} tokens at t = {found.tensor_parallel}, forward and backward, in MiB:",
            f"  all-reduces that tensor parallelism costs anyway  {_mebibytes(all_reduce)}"
            f"  (outside the layers {_mebibytes(found.outside_bytes * accumulation)})",
            f"  head exchange                                     {_mebibytes(exchange)}{share}",
        ]
    )


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:,.2f}"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Lines with the cells of a table in columns, two spaces apart, without spaces at their ends.

    Args:
        rows: cells, the same number in every row; the first row may be a header.
        left: columns that are aligned on the left; all others are on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
