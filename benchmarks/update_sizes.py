"""How large Muon's updates of q, k, v and o are by layer and scale, for whole matrices and head by head.

    python benchmarks/update_sizes.py --plot update_sizes.png [--after 50] [FLAGS of main.py]

The model of the recipe learns the bytes of this project's code with Muon for --after steps. Its momentum is
then given every size that muon.scale and muon.heads offer. Printed, and for q and o drawn, are the root mean
square of the entries and the spectral norm of the whole matrix, both at a rate of 1.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import torch  # noqa: E402

from benchmarks.coordinates import batches, training  # noqa: E402
from benchmarks.helpers import MAIN_FLAGS, command_line_of, parser_of, run_main, write  # noqa: E402
from model.initialization import initialize  # noqa: E402
from model.parameters import parameter_specs  # noqa: E402
from model.transformer import Transformer  # noqa: E402
from pretrain.config.run_config import RunConfig  # noqa: E402
from pretrain.engine.matrix_exchange import describe_matrix  # noqa: E402
from pretrain.optim.muon import matrix_update  # noqa: E402
from pretrain.utils.format import align_columns  # noqa: E402
from pretrain.utils.plotting import save_figure  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

SCALES, HEADS = ("rms", "spectral", "unit"), ("whole", "each")
PARTS, DRAWN = ("q", "k", "v", "o"), ("q", "o")
MEASURES = ("RMS", "spectral norm")


def momenta(run: RunConfig, steps: int, seed: int = 0) -> tuple[Transformer, dict[str, Tensor]]:
    """Train with Muon; the model and the momentum of PARTS in each layer, by parameter."""
    network = Transformer(run.build_model_config(vocab_size=256))
    initialize(network, seed)
    *_, optimizer = training(network, run, batches(steps, network.config.context_length))
    specs = parameter_specs(network.config)
    return network, {
        name: optimizer.state[parameter]["exp_avg"]
        for name, parameter in network.named_parameters()
        if specs[name].role.part in PARTS and parameter.ndim == 2
    }


def sizes(run: RunConfig, steps: int) -> list[dict[str, Any]]:
    """One row for every layer, part, scale and kind of block: what MEASURES name, at a rate of 1."""
    network, found = momenta(run, steps)
    specs = parameter_specs(network.config)
    rows = []
    for (name, momentum), scale, heads in itertools.product(found.items(), SCALES, HEADS):
        choice: dict[str, Any] = {"scale": scale, "heads": heads}
        settings = dataclasses.replace(run.muon, **choice)
        update = matrix_update(
            momentum, settings, describe_matrix(specs[name], network.config, settings).head
        )
        role = specs[name].role
        assert role.layer is not None
        row: dict[str, Any] = {
            "layer": role.layer,
            "heads": network.config.heads[role.layer],
            "part": role.part,
        }
        row |= {"scale": scale, "blocks": heads}
        row["RMS"] = update.square().mean().sqrt().item()
        row["spectral norm"] = torch.linalg.matrix_norm(update.double(), 2).item()
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and draw."""
    parser = parser_of(__doc__, MAIN_FLAGS)
    parser.add_argument("--after", type=int, default=50, metavar="STEPS", help="default: 50")
    parser.add_argument("--plot", metavar="FILE.png", default="update_sizes.png")
    options, flags = parser.parse_known_args(arguments)
    constant = "--schedule.kind wsd --schedule.warmup 0 --schedule.decay 0 --optimizer.kind muon"
    run = command_line_of(*constant.split(), "--steps", str(options.after), *flags).run
    rows = sizes(run, options.after)
    header = ("part", "layer", "heads", "blocks", *(f"{m}, {s}" for m in MEASURES for s in SCALES))
    table: dict[tuple[str, ...], list[str]] = {}
    for measure, row in itertools.product(MEASURES, rows):
        key = (row["part"], *(str(row[name]) for name in ("layer", "heads", "blocks")))
        table.setdefault(key, []).append(f"{row[measure]:.3f}")
    lines = sorted((*key, *values) for key, values in table.items())
    print("\n".join(align_columns([header, *lines], left=(0, 3))))
    _draw(Path(options.plot), rows)
    write(options.out, {"after": options.after, "flags": flags, "rows": rows})


def _draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    lines = list(itertools.product(enumerate(SCALES), (("-", "whole"), ("--", "each"))))
    with save_figure(path, "plot", 2, 2, size=(9.0, 6.5), dpi=150, sharex=True, sharey="row") as (
        figure,
        axes,
    ):
        for (place, measure), (column, part) in itertools.product(enumerate(MEASURES), enumerate(DRAWN)):
            axis = axes[place][column]
            for (color, scale), (style, blocks) in lines:
                key = (part, scale, blocks)
                drawn = [found for found in rows if (found["part"], found["scale"], found["blocks"]) == key]
                layers = [found["layer"] for found in drawn]
                axis.plot(
                    layers,
                    [found[measure] for found in drawn],
                    f"C{color}o{style}",
                    markersize=3,
                    linewidth=4 if (scale, blocks) == ("spectral", "whole") else 1.5,  # seen below unit's
                    label=f"{scale}, {'whole' if blocks == 'whole' else 'head by head'}",
                )
            axis.set_xticks(layers, [f"{found['layer']}\n{found['heads']} heads" for found in drawn])
            axis.set_title(f"{part}: {measure} of the update")
        for row in axes:
            row[0].set_ylim(bottom=0)
        for axis in axes[-1]:
            axis.set_xlabel("layer")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, ncols=3, fontsize=8, loc="outside lower center")


if __name__ == "__main__":
    run_main(main)
