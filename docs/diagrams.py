"""Draws schedules.svg of the README, and the diagrams of the packages, of resuming and of tensor parallelism.

python docs/diagrams.py       # writes schedules, packages, resuming and exchange.svg to docs/pictures/
"""

from __future__ import annotations

import itertools
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from model import preset  # noqa: E402

PICTURES = Path(__file__).parent / "pictures"
COLOURS = ("#4477aa", "#ee8866", "#44aa77", "#aa6699")  # four that remain distinct for the colour-blind
EMPTY = "#dddddd"
PURPOSES = {
    "cli": "the command head-schedules",
    "main": "deepspeed pretrain/main.py",
    "study": "variants compared over seeds",
    "library": "train() and recipe()",
    "assembly": "opens a run",
    "report": "first and last lines of a run",
    "trainer": "the loop",
    "evaluation": "scores of lm-eval",
    "diagnostics": "measurements by layer",
    "plots": "curves of runs",
    "plan.command": "head-schedules plan",
    "prepare.command": "head-schedules prepare",
    "classification": "classes in place of tokens",
    "run": "decisions, session, hooks, run folder, saved runs",
    "prepare.builtin": "the built-in corpus",
    "plan.micro_batch": "the automatic micro-batch",
    "engine": "DeepSpeed around the model",
    "optim": "groups, learning rates, spikes",
    "runtime": "ranks, signals, watchdog",
    "config": "settings",
    "utils": "files, formats",
    "model": "the network alone",
}
"""What the packages are for; rows of three and more have no room for it."""


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, label: str = "") -> str:
    """A filled rectangle with a white border and a label in its middle."""
    middle = text(x + width / 2, y + height / 2 + 4, label, 'text-anchor="middle" fill="#ffffff"')
    shape = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" stroke="#ffffff"/>'
    )
    return shape + (middle if label else "")


def frame(x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="none" '
        'stroke="#222222" stroke-width="2"/>'
    )


def save(name: str, width: int, height: int, title: str, parts: Sequence[str]) -> None:
    """Write a picture with a white ground, so that it is legible on a dark page."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="sans-serif" font-size="13" fill="#222222">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        *parts,
        "</svg>\n",
    ]
    (PICTURES / f"{name}.svg").write_text("\n".join(lines), "utf-8")


def runs(keys: Sequence[object]) -> Iterator[tuple[int, int]]:
    """First place and length of each run of equal keys."""
    start = 0
    for _, equal in itertools.groupby(keys):
        length = len(list(equal))
        yield start, length
        start += length


def draw_schedules() -> None:
    """Heads and FFN width of the layers of four models with equally many parameters."""
    uniform = preset("uniform-124m")
    openelm = {
        "heads": "openelm(12, layers=12, end=1.0)",
        "head_dim": [64] * 12,
        "ffn_width": "openelm(2048)",
    }
    models = {
        "uniform": uniform,
        "wide heads first": preset("prism-124m"),
        "wide FFNs first": uniform.replace(ffn_width="tapered(2048)"),
        "wider with depth": uniform.replace(**openelm),
    }
    (size,) = {config.num_parameters() for config in models.values()}
    unit, middle, parts = 11, 152, []
    for number, (title, config) in enumerate(models.items()):
        left = 20 + 176 * number
        parts.append(text(left, 28, title, 'font-weight="bold" font-size="16"'))
        for layer, heads in enumerate(config.heads):
            x, height = left + (unit + 2) * layer, config.layer_head_dim(layer) / 10
            for head in range(heads):
                parts.append(box(x, middle - height * (head + 1), unit, height, COLOURS[0]))
            parts.append(box(x, middle + 5, unit, config.layer_ffn_width(layer) / 40, COLOURS[1]))
    legend = {20: (COLOURS[0], "attention head"), 170: (COLOURS[1], "FFN width")}
    for x, (colour, label) in legend.items():
        parts += [box(x, 272, 16, 16, colour), text(x + 23, 285, label, 'font-size="15"')]
    note = f"12 layers from left to right, {size / 1e6:.1f}M parameters each"
    parts.append(text(290, 285, note, 'font-size="15"'))
    save("schedules", 724, 304, "Attention heads and feed-forward width by layer of four models", parts)


def draw_packages() -> None:
    """The layers of packages that pyproject.toml allows; each imports only those below it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    parts, width, height = [], 700, 25
    for row, names in enumerate([layer.replace("pretrain.", "").split(" | ") for layer in layers]):
        share, y = width / len(names), 10 + height * row
        for column, name in enumerate(names):
            x = 10 + share * column
            parts.append(box(x, y, share, height, "#dce6f0"))
            purpose = f": {PURPOSES[name]}" if len(names) < 3 else ""
            label = f'<tspan font-weight="bold">{name}</tspan>{purpose}'
            parts.append(text(x + share / 2, y + 17, label, 'text-anchor="middle"'))
    save("packages", width + 20, 20 + height * len(layers), "Each package imports only those below it", parts)


def draw_resuming() -> None:
    """Pieces of three parameters on four ranks, by parameter, and on three ranks; sequences of two steps."""
    unit, left, parts = 19, 24, []
    owner = "A" * 10 + "B" * 14 + "C" * 8
    rows = {  # where the bars of a row begin, and the space between them
        "written": (range(0, 32, 8), 12, 44),
        "parameter": ((0, 10, 24), 30, 124),
        "read": (range(0, 32, 11), 18, 204),
    }

    def place(row: str, n: int) -> tuple[float, int]:
        starts, gap, top = rows[row]
        return left + unit * n + gap * sum(start <= n for start in starts[1:]), top

    def bar(row: str, n: int) -> int:
        return sum(start <= n for start in rows[row][0])

    for upper, lower in (("written", "parameter"), ("parameter", "read")):
        for n, length in runs([(bar(upper, n), bar(lower, n)) for n in range(32)]):
            (a, top), (b, bottom) = place(upper, n), place(lower, n)
            corners = [(a, top + 28), (a + unit * length, top + 28), (b + unit * length, bottom), (b, bottom)]
            ends = " ".join(f"{x:g},{y}" for x, y in corners)
            parts.append(f'<polygon points="{ends}" fill="{COLOURS["ABC".index(owner[n])]}" opacity="0.25"/>')
    for row in rows:
        for n, length in runs([(bar(row, n), owner[n]) for n in range(32)]):
            label = f"parameter {owner[n]}" if row == "parameter" else owner[n]
            parts.append(box(*place(row, n), unit * length, 28, COLOURS["ABC".index(owner[n])], label))
    x, top = place("read", 31)
    parts.append(box(x + unit, top, unit, 28, EMPTY))
    for rank in range(4):
        x, top = place("written", 8 * rank)
        parts += [frame(x, top, 8 * unit, 28), text(x, top - 8, f"rank_{rank:05d}.safetensors")]
    for rank in range(3):
        x, top = place("read", 11 * rank)
        parts += [frame(x, top, 11 * unit, 28), text(x, top + 46, f"rank {rank} of 3 reads its own pieces")]
    parts.append(
        text(left, 294, "Sequences of a step, numbered from the start of the run. Colours are ranks.")
    )
    for line, (ranks, label) in enumerate(
        {4: "4 ranks, micro-batch 2", 2: "2 ranks, micro-batch 2, twice"}.items()
    ):
        parts.append(text(left, 328 + 36 * line, label))
        for n in range(16):
            x = 230 + 26 * n + 24 * (n >= 8)
            parts.append(box(x, 310 + 36 * line, 26, 28, COLOURS[n // 2 % ranks], str(n)))
    for step in range(2):
        parts.append(text(230 + 232 * step, 392, f"step {step + 1}"))
    save("resuming", 720, 406, "A checkpoint of four ranks read by three; the order of the data", parts)


def draw_exchange() -> None:
    """The columns of q of 3 and of 6 heads on four ranks, before and after the exchange."""
    unit, height, sides, parts = 20, 26, (110, 440), []
    for x, words in zip(
        sides, ("projections: own columns, all sequences", "attention: whole heads"), strict=True
    ):
        parts.append(text(x, 30, words))
    for top, heads, groups in ((66, 3, 1), (246, 6, 2)):
        ranks = 4 // groups
        note = f"{heads} heads: {groups} group{'s' * (groups > 1)} of {ranks} ranks"
        parts.append(text(16, top - 12, note, 'font-weight="bold"'))
        for sequence in range(4):
            y = top + height * sequence
            parts.append(text(16, y + 18, f"sequence {sequence}"))
            for rank in range(4):
                parts.append(box(sides[0] + 3 * unit * rank, y, 3 * unit, height, COLOURS[rank]))
            for group in range(groups):
                rank, width = group * ranks + sequence * ranks // 4, 12 * unit / groups
                parts.append(box(sides[1] + width * group, y, width, height, COLOURS[rank]))
        for side, head in itertools.product(sides, range(heads)):
            wide = 12 * unit / heads
            edge = side + wide * head
            parts.append(frame(edge, top, wide, 4 * height))
            anchor = 'text-anchor="middle" font-size="11"'
            parts.append(text(edge + wide / 2, top + 4 * height + 16, f"head {head}", anchor))
        parts.append(text(395, top + 60, "⇄", 'text-anchor="middle" font-size="26"'))
    for rank in range(4):
        left = 110 + 90 * rank
        parts += [box(left, 390, 18, 18, COLOURS[rank]), text(left + 24, 404, f"rank {rank}")]
    save("exchange", 720, 424, "Even columns of heads, exchanged for whole heads of some sequences", parts)


if __name__ == "__main__":
    draw_schedules()
    draw_packages()
    draw_resuming()
    draw_exchange()
