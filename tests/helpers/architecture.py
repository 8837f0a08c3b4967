"""Checks that the code is as docs/architecture.md describes it. Files are parsed, never imported.

Each check is a function from a folder to a list of problems.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from docs.draw_architecture import (
    EXTENSIONS_PICTURE,
    LIST,
    PAGE,
    PICTURE,
    extension_edges,
    extensions,
    imported_names,
    imports,
    modules,
    package_edges,
    packages,
    parsed,
    pictured_edges,
    stated_order,
)

Check = Callable[[Path], list[str]]

MOST_MODULES = 14  # of a package of pretrain/
MOST_AT_THE_TOP = 12  # of pretrain/ itself
MOST_LINES = 500
PUBLIC_TITLE = "## What study uses"

# ---------------------------------------------------------------------- who imports whom


def direction(root: Path) -> list[str]:
    """Imports against the order that the page states, inside functions and for type checkers too."""
    order, home = stated_order(root), packages(root)
    home = {name: package for name, package in home.items() if package not in extensions(root)}
    problems = [f"{PAGE}: {name}/ is not in the order of packages" for name in {*home.values()} - {*order}]
    for found in imports(root):
        if not {found.importer, found.imported} <= home.keys() or found.imported == "pretrain.extensions":
            continue
        importer, imported = home[found.importer], home[found.imported]
        if {importer, imported} <= {*order} and order.index(imported) > order.index(importer):
            line = f"{found.importer}:{found.line} imports {found.imported}"
            problems.append(f"{line}: {imported} comes after {importer}")
    return problems


def extensions_apart(root: Path) -> list[str]:
    """The core names no extension but in the list, neither in imports nor in strings that name modules. An
    extension imports the core, and those that the list says it builds on."""
    listed, home = extensions(root), packages(root)
    problems, used = [], set()
    for found in imports(root):
        importer, imported = home[found.importer], home[found.imported]
        if imported not in listed or importer == imported:
            continue
        if importer not in listed:
            problems.append(f"{found.importer}:{found.line} is core and imports {found.imported}")
        elif imported not in listed[importer].builds_on:
            line = f"{found.importer}:{found.line} imports {found.imported}"
            problems.append(f"{line}, which {LIST} does not say")
        used.add((importer, imported))
    for name, path in modules(root).items():
        if home[name] in listed or path == root / LIST:
            continue
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(text := node.value, str):
                module = text.partition(":")[0]
                while module and module not in home:
                    module = module.rpartition(".")[0]
                if re.fullmatch(r"pretrain(\.\w+)+(:\w+)?", text) and home.get(module) in listed:
                    problems.append(f"{name}:{node.lineno} is core and names {text}")
    for name, extension in listed.items():
        unused = [other for other in extension.builds_on if (name, other) not in used]
        problems += [f"{LIST}: {name} does not build on {other}" for other in unused]
        absent = [file for file in extension.files if not (root / "pretrain" / file).exists()]
        problems += [f"{LIST}: {name} has no {file}" for file in absent]
    return problems


def cycles(root: Path) -> list[str]:
    """Modules that need each other while they are loaded."""
    needs: dict[str, set[str]] = {name: set() for name in modules(root)}
    for found in imports(root):
        if found.at_once:
            needs[found.importer].add(found.imported)
    while free := [name for name in needs if not needs[name] & needs.keys()]:
        for name in free:
            del needs[name]
    # What is left is in a circle, or needs one; a walk along it comes back to where it was.
    way: list[str] = [min(needs)] if needs else []
    while way and way[-1] not in way[:-1]:
        way.append(min(needs[way[-1]] & needs.keys()))
    return [" imports ".join(way[way.index(way[-1]) :])] if way else []


def study_apart(root: Path) -> list[str]:
    """Studies start runs and read what they wrote: they import what the page calls public, all of it and no
    more."""
    text = (root / PAGE).read_text(encoding="utf-8")
    public, last = set(), ""
    for name in re.findall(r"`([a-z_.]+)`", text.partition(f"{PUBLIC_TITLE}\n")[2].partition("\n## ")[0]):
        last = last.rpartition(".")[0] + name if name.startswith(".") else name
        public.add(last)
    used = {
        found.imported: f"{found.importer}:{found.line}"
        for found in imports(root)
        if found.importer.startswith("pretrain.study") and not found.imported.startswith("pretrain.study")
    }
    return [
        f"{used[name]} imports {name}, which {PAGE} does not call public" for name in {*used} - public
    ] + [f"{PAGE}: studies do not use {name}" for name in public & {*modules(root)} - {*used}]


def network_alone(root: Path) -> list[str]:
    """The network needs nothing that is around it."""
    return [
        f"{found.importer}:{found.line} imports {found.imported}"
        for found in imports(root)
        if found.importer.split(".")[0] == "model" and found.imported.split(".")[0] == "pretrain"
    ]


# ---------------------------------------------------------------------- DeepSpeed's private parts

KNOW_DEEPSPEED = ("pretrain/engine",)
# What DeepSpeed documents, and this project uses. (Its optimizers' classes are public; what they hold is
# not.)
NAMES = "initialize init_distributed __version__ zero.Init zero.GatheredParameters ops.adam.DeepSpeedCPUAdam"
PUBLIC = tuple(f"deepspeed.{name}" for name in NAMES.split())
NAMES = "backward step train eval training module optimizer destroy "
NAMES += "get_global_grad_norm was_step_applied zero_optimization_stage register_forward_hook"
PUBLIC_OF_ENGINES = {*NAMES.split()}
BY_NAME = ("getattr", "setattr", "hasattr", "delattr")
PUBLIC_OF_OPTIMIZERS = {"param_groups", "step", "zero_grad", "state_dict", "load_state_dict"}
# What it hangs on parameters and keeps in its optimizers, and what of its modules is replaced.
MARKS = re.compile(
    r"ds_(id|shape|numel|tensor|status|persist|process_group|world_size)|_?hp_\w+|is_invalid_grad_norm"
    r"|\w*(bf16|fp16|fp32|bit16)_\w*groups\w*"
)


def private_deepspeed(root: Path) -> list[str]:
    """Imports, uses and patches of what DeepSpeed may change from one version to the next."""
    return [
        f"{path.relative_to(root)}:{line} uses {what}"
        for path in modules(root).values()
        if not path.relative_to(root).as_posix().startswith(KNOW_DEEPSPEED)
        for line, what in _private_uses(parsed(path.read_text(encoding="utf-8")))
    ]


def _private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    nodes = list(ast.walk(tree))
    names = {"deepspeed"}  # what the module calls it
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in imported_names(node):
                if name.startswith("deepspeed.") and not _public(name, or_above=isinstance(node, ast.Import)):
                    yield node.lineno, name
            names |= {alias.asname for alias in node.names if alias.name == "deepspeed" and alias.asname}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            chain = _dotted(node)
            if chain[0] in names and id(node) not in inner:
                written = not isinstance(node.ctx, ast.Load)
                if written or not _public(".".join(["deepspeed", *chain[1:]])):
                    yield node.lineno, ".".join(chain)
            elif _private_attribute(chain):
                yield node.lineno, ".".join(chain)
        elif isinstance(node, ast.Call) and _dotted(node.func)[-1] in BY_NAME:
            chain = [*_dotted(node.args[0]), str(getattr(node.args[1], "value", ""))]
            if _private_attribute(chain):
                yield node.lineno, ".".join(chain)
        elif isinstance(node, ast.Constant) and isinstance(text := node.value, str) and _hidden(text):
            yield node.lineno, repr(text)


def _dotted(node: ast.expr) -> list[str]:
    """The parts of ``a.b.c``; whatever is not a name is "…"."""
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else "…"]


def _public(name: str, or_above: bool = False) -> bool:
    return any(f"{name}.".startswith(f"{known}.") for known in PUBLIC) or (
        or_above and any(known.startswith(f"{name}.") for known in PUBLIC)
    )


def _hidden(text: str) -> bool:
    """Whether a string is the address of something private."""
    return re.fullmatch(r"deepspeed(\.\w+)+", text) is not None and not _public(text)


def _private_attribute(chain: list[str]) -> bool:
    """Whether the last name of ``a.b.c`` belongs to DeepSpeed alone."""
    *owners, name = chain
    if MARKS.fullmatch(name):
        return True
    if owners[-1] == "engine" and owners[0] != "pretrain":  # not the package
        return name not in PUBLIC_OF_ENGINES
    # Not the settings, as in run.optimizer.learning_rate.
    of_engine = owners == ["optimizer"] or owners[-2:] == ["engine", "optimizer"]
    return of_engine and name not in PUBLIC_OF_OPTIMIZERS


# ---------------------------------------------------------------------- sizes and names


def sizes(root: Path) -> list[str]:
    """Packages and files that have grown out of one head."""
    problems = []
    for folder in sorted({path.parent for path in (root / "pretrain").rglob("*.py")}):
        count = sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        most = MOST_AT_THE_TOP if folder.name == "pretrain" else MOST_MODULES
        if count > most:
            problems.append(f"{folder.relative_to(root)}/ holds {count} modules, more than {most}")
    for path in modules(root).values():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES:
            problems.append(f"{path.relative_to(root)} has {lines} lines, more than {MOST_LINES}")
    return problems


def shadows(root: Path) -> list[str]:
    """Names at the top of pretrain/ that a library has: a file that is run from there would import ours
    instead."""
    libraries = _libraries()
    return [
        f"pretrain/{path.name} shadows the library {path.stem}"
        for path in sorted((root / "pretrain").iterdir())
        if path.stem in libraries - {"pretrain", "model"} and path.name != "py.typed"
    ]


@functools.cache
def _libraries() -> set[str]:
    return {*sys.stdlib_module_names, *importlib.metadata.packages_distributions()}


def picture(root: Path) -> list[str]:
    """A picture shows other arrows than the script would draw."""
    problems = []
    for path, now in ((PICTURE, package_edges(root)), (EXTENSIONS_PICTURE, extension_edges(root))):
        drawn = pictured_edges(root / path) if (root / path).is_file() else []
        if drawn != now:
            changed = ", ".join(f"{a} -> {b}" for a, b in sorted({*(drawn or [])} ^ {*now}))
            problems.append(f"{path} is out of date ({changed}); run python docs/draw_architecture.py")
    return problems


PLACES = ("pretrain", "model", "tests", "docs", "benchmarks", "slurm")
FILE = re.compile(rf"(?<![\w/.-])(?:{'|'.join(PLACES)})/[\w/.-]*\w\.(?:py|md|sh)\b")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#:]*)#([^)]*)\)")
MODULE = re.compile(
    r"(?<![\w/.-])(?:(?:pretrain|tests)(?:\.[A-Za-z_]\w*)+|(?<=-m )(?:model|benchmarks)\.\w+)"
)


def mentions(root: Path) -> list[str]:
    """Files and modules that text, comments or code name, and that do not exist."""
    problems = []
    log = root / "docs/log"  # names what was there when it was written
    planted = root / "tests/test_architecture.py"  # names files that are not there
    written = [*root.glob("*.md"), root / "Makefile", *(root / ".ci").glob("*")]
    for place in PLACES:
        written += [path for path in (root / place).rglob("*") if path.suffix in (".md", ".py", ".sh")]
    for path in sorted(path for path in written if path.is_file() and path != planted):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            named = [] if path.is_relative_to(log) else FILE.findall(line)
            missing = [name for name in named if "NAME" not in name and not (root / name).exists()]
            missing += [
                name
                for name in LINK.findall(line)
                if path.suffix == ".md" and not (path.parent / name).exists()
            ]
            missing += [
                f"{name}#{anchor}"
                for name, anchor in ANCHOR.findall(line)
                if path.suffix == ".md" and anchor not in _anchors(path.parent / name if name else path)
            ]
            named = [] if path.is_relative_to(log) else MODULE.findall(line)
            missing += [name for name in named if not _resolves(root, name) and not _example(root, name)]
            problems += [f"{path.relative_to(root)}:{number} names {name}" for name in missing]
    return problems


def _example(root: Path, name: str) -> bool:
    """Whether a dotted name is that of an example, at the place where its page puts it."""
    return (root / "examples" / name.split(".")[1]).is_dir()


def _anchors(path: Path) -> set[str]:
    """What a link can name in a page: its headings, spelled as GitHub does."""
    text = path.read_text(encoding="utf-8") if path.is_file() and path.suffix == ".md" else ""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"(?ms)^```.*?^```", "", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _resolves(root: Path, name: str) -> bool:
    """Whether a dotted name is a package, a module, or something at the top level of one."""
    parts = name.split(".")
    folder = root
    while parts and (folder / parts[0]).is_dir():
        folder = folder / parts.pop(0)
    file = folder / f"{parts[0]}.py" if parts else folder
    if not parts or (len(parts) == 1 and file.is_file()):
        return True
    if len(parts) == 1:  # something that a package has imported
        parts, file = ["__init__", *parts], folder / "__init__.py"
    return file.is_file() and parts[1] in _top_level(file)


def _top_level(path: Path) -> set[str]:
    names: set[str] = set()
    body = parsed(path.read_text(encoding="utf-8")).body
    for node in [*body, *(inner for outer in body if isinstance(outer, ast.If) for inner in outer.body)]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        else:
            names |= {target.id for target in ast.walk(node) if isinstance(target, ast.Name)}
    return names
