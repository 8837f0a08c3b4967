"""``head-schedules presets``: list the model presets; show, draw or print one; how tensor parallelism
spreads it.

head-schedules presets                                              # all
head-schedules presets prism-124m --plot heads.png                  # draw a head schedule
head-schedules presets exchange --model prism-124m --tensor_parallel 4      # what is exchanged, by layer
head-schedules presets context --model prism-124m --context_parallel 2 4 8      # and by context ranks
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from model.allocations import LARGEST_SIZE, MOST_LAYERS, MULTIPLE, PROFILES, parse_allocation
from model.config import ModelConfig
from model.errors import UserError, naming, quote
from model.heads import draw_heads, format_heads, parse_heads
from model.presets import preset, preset_names
from pretrain.config.command_line import CommandParser
from pretrain.config.model_file import load_model
from pretrain.plan.context_parallel import (
    describe_form,
    gather_elements,
    plan_context_parallel,
    ulysses_elements,
)
from pretrain.plan.tensor_parallel import DTYPE_BYTES, ParallelPlan, plan_tensor_parallel
from pretrain.runtime.command import run_command
from pretrain.utils.format import align_columns, print_lines
from pretrain.utils.plotting import save_figure


def run_presets(arguments: list[str]) -> None:
    """List presets, or show one, or (``exchange``) how tensor parallelism spreads one.

    Raises:
        UserError: an unknown preset, a degree that does not divide it, or a file that cannot be written.
    """
    if arguments and (subcommand := SUBCOMMANDS.get(arguments[0])):
        return subcommand(arguments[1:])
    parser = CommandParser(
        prog="head-schedules presets",
        description="List the model presets.",
        epilog="head-schedules presets exchange --help: how tensor parallelism spreads a model's heads; "
        "head-schedules presets context --help: how context parallelism shares its attention; "
        "head-schedules presets allocations --help: shapes of capacity over depth at an equal budget",
    )
    add = parser.add_argument
    add("name", nargs="?", help="show this preset only")
    add("--plot", metavar="FILE", help="draw the preset's head schedule, for example heads.png")
    add("--json", action="store_true", help="print the preset's config as JSON")
    options = parser.parse_args(arguments)
    if options.name is None and (options.plot or options.json):
        raise UserError("name: --plot and --json need the name of a preset")
    if options.json:
        print(json.dumps(preset(options.name).to_json(), indent=2))
    else:
        print(preset_table([options.name] if options.name is not None else preset_names()))
    if options.plot:
        draw_preset(options.name, options.plot)
        if not options.json:
            print_lines(f"wrote {options.plot}")


def _add_model_flags(parser: CommandParser) -> Callable[..., Any]:
    """Add the flags that say which model is shown, and in which dtype; returns what adds more."""
    add = parser.add_argument
    sources = "preset (head-schedules presets lists them), a .json file of its fields, or a run's folder"
    add("--model", required=True, help=sources)
    add("--heads", help="head schedule in place of the preset's, such as 3x2,6x2,8x2,12x6")
    add(
        "--dtype",
        choices=sorted(DTYPE_BYTES),
        default="bf16",
        help="dtype of activations (default: bf16)",
    )
    return add


def _load_model(options: argparse.Namespace, *changed: str) -> ModelConfig:
    """The model of ``--model``, with the fields in place that are given as flags."""
    changes = {name: getattr(options, name) for name in changed}
    given = {name: value for name, value in changes.items() if value is not None}
    model = load_model(options.model)
    if "heads" in given:
        given["heads"] = parse_heads(given["heads"], model.num_layers)
    return model.replace(**given)


def run_exchange(arguments: list[str]) -> None:
    """Print how tensor parallelism spreads a model. Raises UserError as run_presets does."""
    parser = CommandParser(
        prog="head-schedules presets exchange",
        description="How tensor parallelism spreads a model's heads.",
    )
    add = _add_model_flags(parser)
    add("--tensor_parallel", type=int, required=True, help="t: ranks that share the model")
    add("--micro_batch", type=int, default=8, help="B: sequences per rank and pass (default: 8)")
    options = parser.parse_args(arguments)
    if not 0 < options.micro_batch <= LARGEST_SIZE:
        valid = f"give a positive number of at most {LARGEST_SIZE:,}"
        raise UserError(f"micro_batch: {quote(options.micro_batch)} is not valid; {valid}")
    config = _load_model(options, "heads")
    print(
        plan_table(plan_tensor_parallel(config, options.tensor_parallel, options.micro_batch, options.dtype))
    )


def run_context(arguments: list[str]) -> None:
    """Print how context ranks share a model's attention, and what they send. Raises UserError as run_presets
    does."""
    parser = CommandParser(
        prog="head-schedules presets context",
        description="How context parallelism shares each layer's attention, and what it sends.",
    )
    add = _add_model_flags(parser)
    add("--context_parallel", type=int, nargs="+", required=True, help="c: ranks that share each sequence")
    add("--context_length", type=int, help="T, in place of the preset's")
    options = parser.parse_args(arguments)
    config = _load_model(options, "heads", "context_length")
    print("\n\n".join(context_table(config, degree, options.dtype) for degree in options.context_parallel))


def run_allocations(arguments: list[str]) -> None:
    """Print allocations of a width over depth, and draw them. Raises UserError as run_presets does."""
    parser = CommandParser(
        prog="head-schedules presets allocations",
        description="Shapes of a width over depth, each with the sum of the uniform one.",
    )
    add = parser.add_argument
    add("allocation", nargs="*", help="such as tapered(2048, start=1.25, end=0.75) (default: every name)")
    add("--mean", type=int, default=2048, help="width of a layer of the uniform model (default: 2048)")
    add("--layers", type=int, default=12, help="number of layers (default: 12)")
    add(
        "--multiple",
        type=int,
        default=MULTIPLE,
        help=f"widths are multiples of it (default: {MULTIPLE})",
    )
    add("--plot", metavar="FILE", help="draw them, for example allocations.png")
    options = parser.parse_args(arguments)
    for name in ("mean", "layers", "multiple"):
        if not 0 < getattr(options, name) <= MOST_LAYERS * MULTIPLE:
            raise UserError(f"{name}: {getattr(options, name)} is not valid; give a positive number")
    texts = options.allocation or [f"{name}({options.mean})" for name in PROFILES]
    found, widths, missing = [], {}, []
    for text in texts:
        try:
            with naming("allocation", text):
                made = parse_allocation(text, options.multiple)
                widths[made.text] = made.widths(made.layers or options.layers)
                found.append(made)
        except UserError as error:
            missing.append(str(error))
    if missing and (options.allocation or not found):
        raise UserError(missing[0])
    rows = [["allocation", "by layer", "widths", "sum", "less uniform"]]
    for made in found:
        given = widths[made.text]
        difference = sum(given) - len(given) * made.mean
        drawn = (draw_heads(given), format_heads(given))
        rows.append([made.text, *drawn, f"{sum(given):,}", f"{difference:+,}" if difference else "equal"])
    print("\n".join([*align_columns(rows, left={0, 1, 2}), *missing]))
    if options.plot:
        columns = min(4, len(found))
        lines = -(-len(found) // columns)
        size = (2.2 * columns, 0.5 + 1.5 * lines)
        with save_figure(
            *(Path(options.plot), "--plot", lines, columns),
            size=size,
            dpi=150,
            squeeze=False,
            sharex=True,
            sharey=True,
        ) as (fig, axes):
            for axis in axes.flat[len(found) :]:
                axis.set_axis_off()
            for axis, (text, given) in zip(axes.flat, widths.items(), strict=False):
                axis.bar(range(len(given)), given, color="tab:blue")
                axis.set_title(text, fontsize="small")
            fig.supxlabel("layer", fontsize="small")
            fig.supylabel("width", fontsize="small")
        print_lines(f"wrote {options.plot}")


def preset_table(names: Sequence[str]) -> str:
    """An aligned text table of presets: sizes, schedule, exact parameters, training FLOPs per token."""
    rows = [
        [
            *("name", "layers", "d_model", "heads", "by layer", "head dims", "FFN", "blocks"),
            *("parameters", "padded", "FLOPs/token"),
        ]
    ]
    for name in names:
        config = preset(name)
        dims = [config.layer_head_dim(layer) for layer in range(config.num_layers)]
        drawn = (format_heads(config.heads), draw_heads(config.heads))
        widths = map(_short, (dims, config.ffn_widths, config.block_widths))
        shape = (str(config.num_layers), str(config.d_model), *drawn, *widths)
        counts = (config.num_parameters(), config.num_parameters(padded=True), config.flops_per_token())
        rows.append([name, *shape, *(f"{count:,}" for count in counts)])
    return "\n".join(align_columns(rows, left={0, 3, 4, 5, 6, 7}))


def _short(widths: Sequence[int]) -> str:
    """One width for all layers, a schedule of a few widths, or the range of many."""
    if len(kinds := set(widths)) == 1:
        return str(widths[0])
    return format_heads(widths) if len(kinds) <= 6 else f"{min(kinds)} to {max(kinds)}"


def plan_table(found: ParallelPlan) -> str:
    """The plan as an aligned table and its totals, in MiB per rank and micro-batch."""

    def mebibytes(number: int) -> str:
        return f"{number / 2**20:,.2f}"

    header = "layer,heads,kv,head dim,groups,ranks a head group,form,exchange,all-reduce"
    rows = [header.split(",")]
    for layer in found.layers:
        shape = (layer.layer, layer.heads, layer.kv_heads, layer.head_dim, layer.groups, layer.ranks)
        form = "-" if layer.form == "none" else layer.form
        sent = (mebibytes(layer.exchange_bytes), mebibytes(layer.all_reduce_bytes))
        rows.append([*map(str, shape), form, *sent])
    all_reduce = found.all_reduce_bytes
    share = f", {100 * found.exchange_bytes / all_reduce:.1f} % on top" if all_reduce else ""
    totals = [
        f"sent by each rank per {found.micro_batch} sequences of "
        f"{found.context_length} tokens at t = {found.tensor_parallel}, forward and backward, in MiB:",
        f"  all-reduces that tensor parallelism costs anyway  {mebibytes(all_reduce)}"
        f"  (outside the layers {mebibytes(found.outside_bytes)})",
        f"  head exchange                                     {mebibytes(found.exchange_bytes)}{share}",
    ]
    return "\n".join([*align_columns(rows), *totals])


def context_table(config: ModelConfig, context_parallel: int, dtype: str) -> str:
    """What each layer's context ranks do and send, compared with other methods, as an aligned table in MiB
    per rank and sequence; equal neighbouring layers share a row."""
    c, size = context_parallel, DTYPE_BYTES[dtype]
    plan = plan_context_parallel(config, c, dtype=dtype)
    try:
        tensor: ParallelPlan | None = plan_tensor_parallel(config, c, 1, dtype)
    except UserError:  # a width that c does not divide, or T
        tensor = None

    def mebibytes(number: int | None) -> str:
        return "-" if number is None else f"{number / 2**20:,.2f}"

    header = ["layers", "heads", "kv", "head dim", "form", "sent", "Ulysses", "ring or gather", "tensor"]
    rows, totals = [], [0, 0, 0, 0]
    refused = [False, False]
    for layer in plan.layers:
        exchanged = ulysses_elements(config, layer.layer, c)
        sums = None if tensor is None else tensor.layers[layer.layer]
        sent = [
            max(layer.sent_bytes),
            None if exchanged is None else size * exchanged,
            size * gather_elements(config, layer.layer, c),
            None if sums is None else sums.exchange_bytes + sums.all_reduce_bytes,
        ]
        refused = [refused[0] or sent[1] is None, refused[1] or sent[3] is None]
        totals = [total + (number or 0) for total, number in zip(totals, sent, strict=True)]
        shape = [str(number) for number in (layer.heads, layer.kv_heads, layer.head_dim)]
        rows.append([str(layer.layer), *shape, describe_form(layer.form), *map(mebibytes, sent)])
    merged = []
    for values, alike in groupby(rows, key=lambda row: row[1:]):
        layers = [row[0] for row in alike]
        merged.append([layers[0] if len(layers) == 1 else f"{layers[0]}-{layers[-1]}", *values])
    shown = [totals[0], None if refused[0] else totals[1], totals[2], None if refused[1] else totals[3]]
    merged.append(["all", "", "", "", "", *map(mebibytes, shown)])
    length = config.context_length
    title = f"c = {c}: sent by each rank per sequence of {length} tokens, forward and backward, in MiB"
    return "\n".join([title, *align_columns([header, *merged], left={0, 4})])


def draw_preset(name: str, path: str) -> None:
    """Draw the preset's heads (bars), head dim (line), FFN width and, where it differs from d_model, block
    width (bars) per layer; the suffix of *path* is the format.

    Raises UserError if the file cannot be written.
    """
    config = preset(name)
    layers = range(config.num_layers)
    parts = [("FFN width", "tab:green", config.ffn_widths)]
    if config.block_width is not None:
        parts.append(("block width", "tab:purple", config.block_widths))
    with save_figure(Path(path), "--plot", 1 + len(parts), size=(8, 3 + 3 * len(parts)), dpi=150) as (
        figure,
        (heads_axis, *axes),
    ):
        heads_axis.bar(layers, config.heads, color="tab:blue", label="heads")
        heads_axis.set(ylabel="heads", title=f"{name}: {format_heads(config.heads)}")
        head_dim_axis = heads_axis.twinx()
        head_dims = [config.layer_head_dim(layer) for layer in layers]
        head_dim_axis.plot(layers, head_dims, color="tab:orange", marker="o", label="head dim")
        head_dim_axis.set(ylabel="head dim", ylim=(0, None))
        for axis, (part, color, widths) in zip(axes, parts, strict=True):
            axis.bar(layers, widths, color=color, label=part)
            axis.set(ylabel=part)
        for axis in (heads_axis, *axes):
            axis.set(xlabel="layer")
            axis.set_xticks(layers)
        # Above the axes: inside, a legend would cover bars for one schedule or another.
        figure.legend(loc="outside lower center", ncols=2)


SUBCOMMANDS = {"exchange": run_exchange, "context": run_context, "allocations": run_allocations}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(run_presets, arguments)


if __name__ == "__main__":
    sys.exit(main())
