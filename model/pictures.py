"""Draws the pictures of this package's commands: head schedules, and how tensor parallelism spreads them."""

from __future__ import annotations

from pathlib import Path

from model.heads import format_heads
from model.parallel_plan import ParallelPlan
from model.plotting import saved_figure
from model.presets import preset


def draw_preset(name: str, path: str) -> None:
    """Draw the preset's heads per layer (bars) and head dim (line); the suffix of *path* is the format.

    Raises UserError if the file cannot be written.
    """
    config = preset(name)
    layers = range(config.num_layers)
    with saved_figure(Path(path), "--plot", size=(8, 4), dpi=150) as (figure, heads_axis):
        heads_axis.bar(layers, config.heads, color="tab:blue", label="heads")
        heads_axis.set(xlabel="layer", ylabel="heads", title=f"{name}: {format_heads(config.heads)}")
        heads_axis.set_xticks(layers)
        head_dim_axis = heads_axis.twinx()
        head_dims = [config.layer_head_dim(layer) for layer in layers]
        head_dim_axis.plot(layers, head_dims, color="tab:orange", marker="o", label="head dim")
        head_dim_axis.set_ylabel("head dim")
        head_dim_axis.set_ylim(bottom=0)
        # Above the axes: inside, a legend would cover bars for one schedule or another.
        figure.legend(loc="outside lower center", ncols=2)


def draw_plan(found: ParallelPlan, title: str, path: str) -> None:
    """Draw heads per layer, coloured by form, over the bytes that each layer sends; UserError if it cannot be saved."""
    with saved_figure(Path(path), "--plot", rows=2, size=(8, 6), dpi=150, sharex=True) as (_, axes):
        heads_axis, bytes_axis = axes
        colors = {"none": "tab:gray", "batch": "tab:blue", "query": "tab:orange"}
        labels = {"none": "whole heads", "batch": "batch form", "query": "query form"}
        for form in colors:
            layers_of_form = [layer for layer in found.layers if layer.form == form]
            if layers_of_form:
                layer_numbers = [layer.layer for layer in layers_of_form]
                heads_axis.bar(
                    layer_numbers,
                    [layer.heads for layer in layers_of_form],
                    color=colors[form],
                    label=labels[form],
                )
        for layer in found.layers:
            heads_axis.annotate(
                f"{layer.groups}x{layer.ranks}",
                (layer.layer, layer.heads),
                ha="center",
                va="bottom",
                fontsize=8,
            )
        heads_axis.set(ylabel="heads (groups x ranks)", title=title)
        heads_axis.margins(y=0.15)
        layer_numbers = [layer.layer for layer in found.layers]
        all_reduces = [layer.all_reduce_bytes / 2**20 for layer in found.layers]
        exchange = [layer.exchange_bytes / 2**20 for layer in found.layers]
        bytes_axis.bar(layer_numbers, all_reduces, color="tab:gray", label="all-reduces")
        bytes_axis.bar(layer_numbers, exchange, bottom=all_reduces, color="tab:red", label="head exchange")
        bytes_axis.set(xlabel="layer", ylabel="MiB sent per rank and micro-batch")
        bytes_axis.set_xticks(layer_numbers)
        for axis in (heads_axis, bytes_axis):  # beside the bars, which fill the axes
            axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
