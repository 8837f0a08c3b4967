"""Lists phrases that readers of papers and library manuals stumble over, for a writer to look at.

    python docs/phrases.py             # README, docs without the log, docstrings, help texts and messages
    python docs/phrases.py docs/data.md pretrain/cli.py

Each line is a place to look at, no error: a phrase may be the right one where it stands.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PHRASES = {
    r"to the bit|bit for bit|the same bits": "bit-identical",
    r"\bfigures? (?:of|for|that|is|are|in)\b": "number, value or metric, unless it is a picture",
    r"shapes? of the world|\bworlds?\b(?! size)": "parallel configuration, ranks",
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
}


def text_of(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of prose with their numbers: of a page all but code, of a module its strings."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                for place, line in enumerate(node.value.splitlines()):
                    yield node.lineno + place, line
        return
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.startswith("```")
        if not fenced and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`", "", line)


def find(path: Path) -> Iterator[str]:
    """A line of output for each phrase of a file."""
    for number, line in text_of(path):
        for pattern, better in PHRASES.items():
            for match in re.finditer(pattern, line, re.IGNORECASE):
                yield f"{path.relative_to(ROOT)}:{number}: {match[0]!r}: {better}"


def main(arguments: list[str]) -> int:
    """Print the phrases of the files that are named, of all by default."""
    names = (
        arguments
        or subprocess.run(
            ["git", "ls-files", "*.md", "model/*.py", "pretrain/**.py"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        ).stdout.split()
    )
    skipped = ("docs/log/", "CHANGELOG.md", "tests/")
    found = [line for name in names if not name.startswith(skipped) for line in find(ROOT / name)]
    print("\n".join([*found, f"{len(found)} phrases"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
