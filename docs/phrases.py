"""Lists phrases that the style sheet advises against, so that a writer looks at each of them.

    python docs/phrases.py             # README, docs without the log; docstrings, comments and messages
    python docs/phrases.py docs/data.md pretrain/cli.py

A phrase that is correct English where it stands is in ACCEPTED. The exit code is 1 if there are others.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    "*.md",
    "*.sh",
    "*.j2",
    "*.yaml",
    *(f"{name}/*.py" for name in ("benchmarks", "examples", "model", "pretrain")),
]
FILES += ["tests/helpers/*.py"]
SKIPPED = ("docs/log/", "pretrain/studies/")  # what was recorded stays as written
PHRASES = {
    r"to the bit|bit for bit|the same bits": "bit-identical",
    r"\bfigures? (?:of|for|that|is|are|in)\b": "number, value or metric, unless it is a picture",
    r"shapes? of the world|(?-i:(?<!\.)\bworlds?\b(?! size|[:.`]))": "parallel configuration, ranks",
    r"\bf[ae]ll behind\b": "outlier, or diverged",
    r"heads does (?:each|a|every|the) \w+ want|layers? wants?\b": "need",
    r"\b(?:from )?anew\b": "again, from scratch",
    r"\bbeside\b": "compared with, next to",
    r"\bgoes on\b|\bgo on\b": "resumes, continues",
    r"\b(?:is|are) said\b|\bsays so\b|\bsaid once\b": "is reported, prints",
    r"\bone line\b|\bin a line\b": "a message, a one-line error",
    r"\bwhat (?:was asked|there is|it is|is there)\b": "the noun itself",
    r"\b(?:of|with) (?:one's|its|their|his) own\b|of yours\b|of your own\b": "separate, your own",
    r"\b(?:by|of) itself\b": "automatically, on its own",
    r"\btold? (?:apart|from)\b": "distinguished",
    r"\btypically\b": "Hodges-Lehmann estimate, if that is meant",
    r"\b(?:is|are|was|were) refused\b|\brefuses\b": "is rejected, raises an error",
    r", too[.;:)]": "also, or nothing",
    r"\bnothing but\b|\bbut for\b": "only, except for",
    r"python -m pretrain\b": "head-schedules NAME",
}
ACCEPTED = {
    "benchmarks/conversion_memory.py": ["--worlds zero3"],  # a flag
    "pretrain/prepare/labelled.py": ["a file of its own"],  # written into meta.json
    "pretrain/prepare/make.py": ["a source of its own"],
    # a container has the modules of a checkout, and may lack the installed command
    "slurm/prepare.sh": ["command=(python -m pretrain.prepare"],
    "slurm/study.sh": ["exec python -m pretrain.study", "run_once python -m pretrain.study"],
    "tests/helpers/gpt2.py": ["Hello world"],
}
"""Places where a phrase stays: part of the line, by file."""


ANY = re.compile(rf"(?:\b|(?=,))(?:{'|'.join(PHRASES)})", re.IGNORECASE)


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of prose with their numbers: of a page all but code, of a module its strings and comments."""
    text = path.read_text("utf-8")
    if not ANY.search(text):  # parsing takes longer
        return
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield from enumerate(node.value.splitlines(), node.lineno)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        return
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.startswith("```")
        if path.suffix != ".md":
            yield number, line
        elif not fenced and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`", "", line)


def find(path: Path) -> Iterator[str]:
    """A line of output for each phrase of a file, and for each accepted place that it no longer has."""
    name = str(path.relative_to(ROOT))
    unused = set(accepted := ACCEPTED.get(name, []))
    for number, line in texts_of(path):
        kept = {place for place in accepted if place in line}
        unused -= kept
        for pattern, better in PHRASES.items():
            for match in re.finditer(pattern, line, re.IGNORECASE):
                if not any(match[0] in place for place in kept):
                    yield f"{name}:{number}: {match[0]!r}: {better}"
    yield from (f"{name}: {place!r}: accepted, but not there" for place in sorted(unused))


def find_all(patterns: list[str]) -> list[str]:
    """What ``find`` yields for the files under version control that match the patterns."""
    command = ["git", "ls-files", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [line for name in names if not name.startswith(SKIPPED) for line in find(ROOT / name)]


def main(arguments: list[str]) -> int:
    """Print the phrases of the files that are named, of all by default."""
    found = find_all(arguments or FILES)
    print("\n".join([*found, f"{len(found)} phrases"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
