"""What text and code name exists: files, modules, and methods of classes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("pretrain", "model", "tests", "docs", "benchmarks", "slurm", "examples")
FILE = re.compile(rf"(?<![\w/.-])(?:{'|'.join(PLACES)})/[\w/.-]*\w\.(?:py|md|sh)\b")
MODULE = re.compile(
    r"(?<![\w/.-])(?:(?:pretrain|tests)(?:\.[A-Za-z_]\w*)+|(?<=-m )(?:model|benchmarks)\.\w+)"
)
METHOD = re.compile(r"`([A-Z][A-Za-z]*[a-z][A-Za-z]*)\.([a-z_]\w*)`")
THEIRS = {"Dataset"}  # classes of libraries
LOG = ROOT / "docs/log"  # names what was there when it was written


def written(*suffixes: str) -> list[Path]:
    files = [*ROOT.glob("*.md"), ROOT / "Makefile", *(ROOT / ".ci").glob("*")]
    files += [path for place in PLACES for path in (ROOT / place).rglob("*")]
    own = (LOG, Path(__file__), ROOT / "CHANGELOG.md", ROOT / "docs/reference")
    return [
        path
        for path in files
        if path.is_file()
        and (not suffixes or path.suffix in suffixes)
        and not any(path.is_relative_to(other) for other in own)
    ]


def missing(path: Path) -> list[str]:
    """Files and modules that a file names, and that do not exist."""
    text = path.read_text(encoding="utf-8")
    files = [name for name in FILE.findall(text) if "NAME" not in name and not (ROOT / name).exists()]
    return files + [name for name in MODULE.findall(text) if not is_there(name)]


def is_there(name: str) -> bool:
    """Whether a dotted name is a package, a module, or something at the top level of one."""
    parts, folder = name.split("."), ROOT
    while parts and (folder / parts[0]).is_dir():
        folder = folder / parts.pop(0)
    if not parts or (len(parts) == 1 and (folder / f"{parts[0]}.py").is_file()):
        return True
    file = folder / ("__init__.py" if len(parts) == 1 else f"{parts[0]}.py")
    last = parts[0] if len(parts) == 1 else parts[1]
    return file.is_file() and re.search(rf"\b{last}\b", file.read_text(encoding="utf-8")) is not None


def members() -> dict[str, set[str]]:
    """What each class of the code has: methods, and whatever is declared in it or assigned to self."""
    found: dict[str, set[str]] = {}
    for place in ("model", "pretrain"):
        for path in (ROOT / place).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    names = found.setdefault(node.name, set())
                    for inner in ast.walk(node):
                        if isinstance(inner, ast.FunctionDef):
                            names.add(inner.name)
                        elif isinstance(inner, ast.Attribute | ast.Name):
                            names.add(inner.attr if isinstance(inner, ast.Attribute) else inner.id)
    return found


def test_what_is_named_exists():
    paths = written(".md", ".py", ".sh", "")
    assert {str(path.relative_to(ROOT)): found for path in paths if (found := missing(path))} == {}


def test_methods_in_the_documentation_exist():
    known, wrong = members(), []
    for path in written(".md"):
        for kind, name in METHOD.findall(path.read_text(encoding="utf-8")):
            if name not in known.get(kind, ()) and kind not in THEIRS:
                wrong.append(f"{path.relative_to(ROOT)}: {kind}.{name}")
    assert wrong == []


def test_a_wrong_name_is_found(tmp_path):
    (tmp_path / "page.md").write_text("pretrain/nothing.py, pretrain.config.nothing, pretrain/main.py")
    assert missing(tmp_path / "page.md") == ["pretrain/nothing.py", "pretrain.config.nothing"]
    assert "fit" in members()["Trainer"] and "_attend" not in members()["Attention"]


def test_files_are_short():
    """At most 500 lines: what is longer has two subjects."""
    long = {
        str(path.relative_to(ROOT)): count
        for path in written(".py")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 500
    }
    assert long == {}
