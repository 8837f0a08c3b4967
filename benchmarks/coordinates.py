"""How far training moves the activations of models of different widths: the coordinate check of muP.

    python benchmarks/coordinates.py --plot coordinates.png [--widths 64 128 256 512 1024] [FLAGS of main.py]

Four layers of 2, 4, 8 and 8 heads learn the bytes of this project's code for eight steps, once with each
parametrization; the base is the narrowest width. Drawn is the root mean square by which an activation of a
fixed batch differs from its value at the start, after 1, 2, 4 and 8 steps. The table has the slopes of its
logarithm over that of the width: 0 is the same at every width (arXiv 2203.03466, appendix D.1).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.blocks import block
from model.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import torch  # noqa: E402

from benchmarks.helpers import MAIN_FLAGS, command_line_of, parser_of, run_main, say, write  # noqa: E402
from model.initialization import initialize  # noqa: E402
from model.parameters import is_hidden, parameter_specs  # noqa: E402
from model.transformer import Transformer  # noqa: E402
from pretrain.config.run_config import RunConfig  # noqa: E402
from pretrain.engine.matrix_exchange import Matrix, describe_matrix  # noqa: E402
from pretrain.optim.groups import GroupRates, build_optimizer, parameter_groups, run_groups  # noqa: E402
from pretrain.optim.muon import MuonAndAdamW, matrix_update  # noqa: E402
from pretrain.utils.format import align_columns  # noqa: E402
from pretrain.utils.plotting import save_figure  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

STEPS = (1, 2, 4, 8)
VOCABULARY, LENGTH, ROWS = 256, 128, 8
HEADS = (2, 4, 8, 8)
PARAMETRIZATIONS = ("standard", "mup")

Changes = dict[str, list[float]]
"""By activation, the root mean square of its change after each of STEPS."""


def model_of(width: int, base: int, parametrization: str, **changes: Any) -> ModelConfig:
    """The model of this width; at the base both parametrizations are the same."""
    switches: dict[str, Any] = {"attention_scale": "sqrt_head_dim"}
    if parametrization == "mup":  # sqrt(b) / d_h is 1 / sqrt(d_h) in the base's first layer
        switches = {"attention_scale": "head_dim", "attention_scale_base": base // HEADS[0]}
        switches |= {"parametrization": "mup", "base_width": base}
    sizes = {"vocab_size": VOCABULARY, "context_length": LENGTH, "d_model": width, "ffn_width": 4 * width}
    return block("llama", **{**sizes, "heads": HEADS, **switches, **changes})


def batches(count: int, length: int = LENGTH) -> Iterator[Tensor]:
    """Bytes of this project's code, int64 [ROWS, length + 1]."""
    files = sorted((ROOT / "model").glob("*.py")) + sorted((ROOT / "pretrain").rglob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        starts = torch.randint(len(text) - length, (ROWS, 1), generator=generator)
        yield text[starts + torch.arange(length + 1)].long()


def activations(network: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """What the embedding, q and the two halves of each block, and the LM head give for *tokens*."""
    found: dict[str, Tensor] = {}
    modules = {"embedding": network.token_embedding}
    for layer, part in enumerate(network.layers):
        for name in ("attention.q", "attention", "ffn"):
            modules[f"layer {layer} {name}"] = part.get_submodule(name)
    hooks = [
        module.register_forward_hook(lambda _, inputs, out, name=name: found.setdefault(name, out.clone()))
        for name, module in modules.items()
    ]
    with torch.no_grad():
        found["logits"] = network(tokens)
    for hook in hooks:
        hook.remove()
    return found


def updates_of(network: Transformer, run: RunConfig) -> Any:
    """What makes Muon's updates orthogonal where each parameter is its own master."""
    specs = parameter_specs(network.config)
    matrices: dict[Tensor, Matrix] = {
        parameter: describe_matrix(specs[name], network.config, run.muon)
        for name, parameter in network.named_parameters()
        if is_hidden(specs[name].role)
    }

    def update(master: Tensor, values: Tensor) -> None:
        values.copy_(matrix_update(values, run.muon, matrices[master].head))

    return update


def training(network: Transformer, run: RunConfig, data: Iterable[Tensor]) -> Iterator[torch.optim.Optimizer]:
    """Train in this process; yield the optimizer after each step."""
    optimizer = build_optimizer(parameter_groups(network, run.optimizer), run.optimizer, False, run.muon)
    if isinstance(optimizer, MuonAndAdamW):
        optimizer.updates = updates_of(network, run)
    rates = GroupRates(run_groups(run, network.config), run)
    for step, tokens in enumerate(data):
        rates.write(optimizer, step)
        network(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield optimizer


def changes_of(model: ModelConfig, run: RunConfig, seed: int = 0) -> Changes:
    """Train a model for the last of STEPS and measure after each of them."""
    network = Transformer(model)
    initialize(network, seed)
    fixed, *trained = batches(1 + STEPS[-1])
    before = activations(network, fixed[:, :-1])
    changes: Changes = {name: [] for name in before}
    for step, _ in enumerate(training(network, run, trained), start=1):
        if step in STEPS:
            for name, value in activations(network, fixed[:, :-1]).items():
                changes[name].append((value - before[name]).square().mean().sqrt().item())
    return changes


def slopes(widths: Sequence[int], measured: Sequence[Changes]) -> Changes:
    """By activation and step, the slope of log change over log width, by least squares."""
    x = torch.tensor(widths, dtype=torch.float64).log()
    x = x - x.mean()
    result = {}
    for name in measured[0]:
        y = torch.tensor(
            [changes[name] for changes in measured], dtype=torch.float64
        ).log()  # [widths, steps]
        result[name] = ((x[:, None] * y).sum(0) / x.square().sum()).tolist()
    return result


def run_of(flags: Sequence[str]) -> RunConfig:
    """The settings of a run at a constant rate."""
    constant = "--steps 100 --schedule.kind wsd --schedule.warmup 0 --schedule.decay 0.01"
    return command_line_of(*constant.split(), *flags).run


def main() -> None:
    """Measure, print and draw."""
    parser = parser_of(__doc__, MAIN_FLAGS)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--plot", metavar="FILE.png", default="coordinates.png")
    options, flags = parser.parse_known_args()
    run, widths = run_of(flags), sorted(options.widths)
    measured: dict[str, list[Changes]] = {}
    for kind in PARAMETRIZATIONS:
        measured[kind] = []
        for width in widths:
            measured[kind].append(changes_of(model_of(width, widths[0], kind), run))
            say(f"measured {kind} at width {width}")
    found = {kind: slopes(widths, measured[kind]) for kind in PARAMETRIZATIONS}
    header = ("activation", *(f"{kind}, step {step}" for kind in PARAMETRIZATIONS for step in STEPS))
    rows = [
        (name, *(f"{slope:+.2f}" for kind in PARAMETRIZATIONS for slope in found[kind][name]))
        for name in found["mup"]
    ]
    print("\n".join(align_columns([header, *rows], left=(0,))))
    _draw(Path(options.plot), widths, measured)
    write(
        options.out, {"widths": widths, "steps": STEPS, "flags": flags, "changes": measured, "slopes": found}
    )


def _draw(path: Path, widths: Sequence[int], measured: dict[str, list[Changes]]) -> None:
    """A colour for each layer, a line style for each of its activations."""
    size = (3 * len(STEPS) + 2.0, 6.0)
    with save_figure(path, "plot", 2, len(STEPS), size=size, dpi=150, sharex=True, sharey=True) as (_, axes):
        for row, kind in zip(axes, PARAMETRIZATIONS, strict=True):
            for place, (axis, step) in enumerate(zip(row, STEPS, strict=True)):
                for name in measured[kind][0]:
                    values = [changes[name][place] for changes in measured[kind]]
                    axis.loglog(widths, values, marker=".", label=name, **_style(name))
                axis.set_title(f"{kind}, step {step}")
                axis.set_xticks(widths, [str(width) for width in widths])
                axis.minorticks_off()
            row[0].set_ylabel("RMS change")
        for axis in axes[-1]:
            axis.set_xlabel("d_model")
        axes[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False)


def _style(name: str) -> dict[str, str]:
    layer, _, part = name.removeprefix("layer ").partition(" ")
    if not part:
        return {"color": "black", "linestyle": "-" if name == "logits" else ":"}
    return {
        "color": f"C{layer}",
        "linestyle": {"attention.q": "-", "attention": "--", "ffn": ":"}[part],
    }


if __name__ == "__main__":
    run_main(main)
