"""Who imports whom, read from the code, and the pictures of it.

    python docs/draw_architecture.py        # writes docs/pictures/architecture.png and extensions.png

tests/test_architecture.py holds the code to what docs/architecture.md says with the functions of this file.
They parse the files and import none of them.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/architecture.md"
PICTURE = "docs/pictures/architecture.png"
EXTENSIONS_PICTURE = "docs/pictures/extensions.png"
OBJECTS_PICTURE = "docs/pictures/objects.png"
LIST = "pretrain/extensions.py"
"""The one file that names the extensions."""
TOP = "pretrain"
"""The modules that lie in no package of pretrain/: they may import every package, and none imports them."""
KEY = "imports"
"""Under this key the picture's file says which arrows it shows."""

Edges = list[tuple[str, str]]
"""Pairs of packages, importer first."""


class Import(NamedTuple):
    """One module imported by another, both of this project."""

    importer: str
    imported: str
    line: int
    at_once: bool
    """Whether it happens while the importer is loaded; not inside a function, and not for type checkers
    alone."""


# ---------------------------------------------------------------------- reading


def modules(root: Path) -> dict[str, Path]:
    """The files of model/ and pretrain/ by the names they are imported under."""
    found = {}
    for folder in ("model", "pretrain"):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


class Extension(NamedTuple):
    """An extension as the list names it."""

    files: tuple[str, ...]
    """Packages and modules in pretrain/."""
    builds_on: tuple[str, ...]
    """Extensions that it may import."""


def extensions(root: Path) -> dict[str, Extension]:
    """The extensions in the list, by name."""
    path, found = root / LIST, {}
    tree = parsed(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Listed":
            name = ast.literal_eval(node.args[0])
            values = {word.arg: ast.literal_eval(word.value) for word in node.keywords}
            found[name] = Extension(values.get("files", (name,)), tuple(values.get("builds_on", ())))
    return found


def packages(root: Path) -> dict[str, str]:
    """What each module belongs to: a package of the core, or an extension by its name.

    A package has the name that the page's table gives it: model, pretrain/engine, pretrain.

    A folder inside a package is part of that package.
    """
    owner = {file: name for name, extension in extensions(root).items() for file in extension.files}
    found = {}
    for name, path in modules(root).items():
        parts = path.relative_to(root).parts
        package = "model" if parts[0] == "model" else "/".join(parts[:2]) if len(parts) > 2 else TOP
        found[name] = package if parts[0] == "model" else owner.get(parts[1], package)
    return found


def imports(root: Path) -> list[Import]:
    """Every import of one of the project's modules by another."""
    known = modules(root)
    found = []
    for name, path in known.items():
        home = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node, at_once in _import_statements(parsed(path.read_text(encoding="utf-8"))):
            for target in imported_names(node, home):
                while target and target not in known:  # a function of a module, or a library
                    target = target.rpartition(".")[0]
                if target and target != name:
                    found.append(Import(name, target, node.lineno, at_once))
    return found


@functools.cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a file's text, made once."""
    return ast.parse(text)


def imported_names(node: ast.Import | ast.ImportFrom, home: str = "") -> list[str]:
    """What a statement imports, as dotted names; *home* is the package that relative ones start from."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        folder = home.split(".")[: len(home.split(".")) - node.level + 1]
        base = ".".join([*folder, *([base] if base else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def _import_statements(
    tree: ast.AST, at_once: bool = True
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, at_once
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            later = later or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
            yield from _import_statements(node, at_once and not later)


def stated_order(root: Path) -> list[str]:
    """The packages in the order of the page's table: each may import those before it."""
    section = (root / PAGE).read_text(encoding="utf-8").partition("## The order of packages")[2]
    return re.findall(r"^\| `([\w/]+)/` \|", section.partition("\n## ")[0], re.MULTILINE)


def package_edges(root: Path) -> Edges:
    """Which package of the core imports which, without those that follow from others (a -> c where a -> b ->
    c)."""
    home = packages(root)
    listed = extensions(root)
    home = {name: home[name] for name in home if home[name] not in listed and name != "pretrain.extensions"}
    direct: dict[str, set[str]] = {name: set() for name in home.values()}
    for found in imports(root):
        if not {found.importer, found.imported} <= home.keys():
            continue
        if home[found.importer] != home[found.imported]:
            direct[home[found.importer]].add(home[found.imported])
    reached: dict[str, set[str]] = {}

    def reach(name: str, way: tuple[str, ...] = ()) -> set[str]:
        if name not in reached:
            onwards = [reach(other, (*way, name)) for other in direct[name] if other not in (*way, name)]
            reached[name] = direct[name].union(*onwards)
        return reached[name]

    return sorted(
        (name, other)
        for name, others in direct.items()
        for other in others
        if not any(other in reach(between) for between in others - {other})
    )


def extension_edges(root: Path) -> Edges:
    """Which extension builds on which; one that builds on none stands on the core."""
    return [
        (name, other)
        for name, extension in extensions(root).items()
        for other in extension.builds_on or ("core",)
    ]


def pictured_edges(path: Path) -> Edges | None:
    """What a picture says it shows; None when it says nothing. Reads the PNG's text chunks only."""
    data = path.read_bytes()
    position = 8
    while position < len(data):
        (length,), kind = struct.unpack_from(">I", data, position), data[position + 4 : position + 8]
        body = data[position + 8 : position + 8 + length]
        if kind == b"tEXt" and body.startswith(KEY.encode() + b"\0"):
            return [(importer, imported) for importer, imported in json.loads(body.partition(b"\0")[2])]
        position += 12 + length
    return None


# ---------------------------------------------------------------------- drawing


def layers(edges: Edges) -> list[list[str]]:
    """Packages by height, what nobody needs last: each above everything that it imports."""
    height: dict[str, int] = {}

    def place(name: str) -> int:
        if name not in height:
            height[name] = 1 + max(
                (place(other) for importer, other in edges if importer == name), default=-1
            )
        return height[name]

    for importer, _ in edges:
        place(importer)
    return [[name for name in height if height[name] == level] for level in range(max(height.values()) + 1)]


def routes(edges: Edges) -> tuple[dict[str, tuple[float, float]], list[list[tuple[float, float]]]]:
    """Where the packages stand, and the points of every arrow; an arrow over several layers gets a place in
    each."""
    rows = layers(edges)
    height = {name: level for level, row in enumerate(rows) for name in row}
    chains = []
    for index, (importer, imported) in enumerate(edges):
        between = [f"{index}:{level}" for level in range(height[importer] - 1, height[imported], -1)]
        for stop, level in zip(between, range(height[importer] - 1, height[imported], -1), strict=True):
            rows[level].append(stop)
        chains.append([importer, *between, imported])
    beside: dict[str, list[str]] = {}
    for chain in chains:
        for upper, lower in itertools.pairwise(chain):
            beside.setdefault(upper, []).append(lower)
            beside.setdefault(lower, []).append(upper)
    x = {name: float(place) for row in rows for place, name in enumerate(row)}
    for _ in range(60):  # each row in the order of its neighbours' mean place, up and down again
        for row in [*rows, *reversed(rows)]:
            row.sort(key=lambda name: sum(x[other] for other in beside[name]) / len(beside[name]))
            widths = [0.55 if ":" in name else 1.0 for name in row]
            left = -sum(widths) / 2
            for name, width in zip(row, widths, strict=True):
                x[name], left = left + width / 2, left + width
    points = {name: (x[name], float(level)) for level, row in enumerate(rows) for name in row}
    return {name: points[name] for name in height}, [[points[stop] for stop in chain] for chain in chains]


def draw(edges: Edges, path: Path) -> None:
    """Write the picture: a box for each package, arrows from the importer down to what it imports."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    places, arrows = routes(edges)
    rows = layers(edges)
    width = max(9, 1.5 * max(map(len, rows)))
    figure, axes = plt.subplots(figsize=(width, 1 + 0.9 * len(rows)))
    half = 0.2  # of a box's height
    for stops in arrows:
        points = [(stops[0][0], stops[0][1] - half), *stops[1:-1], (stops[-1][0], stops[-1][1] + half)]
        vertices, codes = [points[0]], [Curve.MOVETO]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            vertices += [(x0, y0 - (y0 - y1) / 2), (x1, y1 + (y0 - y1) / 2), (x1, y1)]
            codes += [Curve.CURVE4] * 3
        axes.add_patch(
            FancyArrowPatch(
                path=Curve(vertices, codes),
                arrowstyle="-|>",
                mutation_scale=11,
                color="0.45",
                linewidth=1.1,
                zorder=1,
            )
        )
    for name, (x, y) in places.items():
        label = "pretrain/*.py" if name == TOP else name.removeprefix("pretrain/")
        color = "#d9e8f5" if name not in ("model", TOP, "core") else "#f5e6cc"
        box = {"boxstyle": "round,pad=0.45", "facecolor": color, "edgecolor": "0.3"}
        axes.text(x, y, label, ha="center", va="center", fontsize=11, zorder=2, bbox=box)
    xs, ys = zip(*itertools.chain(*arrows), strict=True)  # an arrow may pass beside every box
    axes.set_xlim(min(xs) - 0.7, max(xs) + 0.7)
    axes.set_ylim(min(ys) - 0.5, max(ys) + 0.5)
    axes.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={KEY: json.dumps(edges), "Software": None})
    plt.close(figure)


OBJECTS = {  # name, what it is: where it stands
    ("RunConfig", "the request"): (0, 2),
    ("ds_config", "DeepSpeed's settings"): (0, 1),
    ("checkpoint", "what was saved"): (0, 0),
    ("World", "ranks, facts of the machine"): (1, 0),
    ("decide", "one pure function"): (1, 1),
    ("Decisions", "value and reason of each"): (1, 2),
    ("Session", "request, decisions, world,\ndata, checkpoints, state"): (2, 1),
    ("Trainer", "engine, loop, hooks"): (3, 1),
    ("Engine", "DeepSpeed around the network"): (3, 2),
    ("extensions", "settings, hooks, records"): (2, 0),
    ("run folder", "config.yaml, decisions.json,\nmetrics.jsonl, checkpoints/"): (3, 0),
}
FLOWS = [
    ("RunConfig", "decide"),
    ("ds_config", "decide"),
    ("checkpoint", "decide"),
    ("World", "decide"),
    ("decide", "Decisions"),
    ("Decisions", "Session"),
    ("extensions", "Session"),
    ("Session", "Trainer"),
    ("Trainer", "Engine"),
    ("Trainer", "run folder"),
]


def draw_objects(path: Path) -> None:
    """Write the picture of the objects on the main path, and what is made from what."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 4.2))
    places = {name: (1.35 * x, y) for (name, _), (x, y) in OBJECTS.items()}
    box = {"boxstyle": "round,pad=0.5", "facecolor": "#d9e8f5", "edgecolor": "0.3"}
    boxes = {
        name: axes.text(*places[name], f"{name}\n{words}", ha="center", va="center", fontsize=9, bbox=box)
        for name, words in OBJECTS
    }
    figure.canvas.draw()  # places the boxes, at whose borders the arrows end
    for begin, end in FLOWS:
        ends = {"patchA": boxes[begin].get_bbox_patch(), "patchB": boxes[end].get_bbox_patch()}
        style = {"arrowstyle": "-|>", "color": "0.45", "shrinkA": 2, "shrinkB": 2}
        axes.annotate("", places[end], places[begin], arrowprops=style | ends)
    axes.set_xlim(-0.6, 4.7)
    axes.set_ylim(-0.5, 2.5)
    axes.axis("off")
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    draw_objects(ROOT / OBJECTS_PICTURE)
    for picture, found in ((PICTURE, package_edges(ROOT)), (EXTENSIONS_PICTURE, extension_edges(ROOT))):
        draw(found, ROOT / picture)
        names = {name for edge in found for name in edge}
        print(f"{picture}: {len(names)} boxes, {len(found)} arrows", file=sys.stderr)
