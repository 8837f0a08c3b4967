"""A few dozen real-looking items of lm-eval's tasks, as files on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VERBS = ["open", "close", "fold", "carry", "clean", "wrap", "weigh", "label", "stack", "mend"]
THINGS = ["a jar", "the tent", "a letter", "the gate", "a carpet"]


def piqa_items(count: int = 30) -> list[dict[str, Any]]:
    """Two answers each; their lengths differ."""
    return [
        {
            "goal": f"How do you {VERBS[i % 10]} {THINGS[i % 5]}?",
            "sol1": f"Take {THINGS[i % 5]} with both hands and {VERBS[i % 10]} it slowly.",
            "sol2": f"Leave {THINGS[i % 5]} out{' for a day' * (i % 3)}, {VERBS[(i + 3) % 10]} the roof.",
            "label": i * 7 % 2,
        }
        for i in range(count)
    ]


def arc_items(count: int = 24) -> list[dict[str, Any]]:
    """Four answers each."""
    choices = ["a metal spoon", "the north wind", "photosynthesis", "an old map"]
    return [
        {
            "id": str(i),
            "question": f"Which of these would a student use to {VERBS[i % 10]} {THINGS[i % 5]}?",
            "choices": {"text": choices[i % 4 :] + choices[: i % 4], "label": ["A", "B", "C", "D"]},
            "answerKey": "ABCD"[i * 5 % 4],
        }
        for i in range(count)
    ]


def pages(count: int = 3) -> list[dict[str, Any]]:
    """Texts longer than a context."""
    page = " = The bridge = \n\n The bridge was built in 1905 . It is 30 @.@ 5 m high , and long .\n"
    return [{"page": page * (i + 2)} for i in range(count)]


def write(folder: Path, items: list[dict[str, Any]], splits: list[str]) -> None:
    """One JSON Lines file for each split, all with the same items."""
    folder.mkdir(parents=True)
    for split in splits:
        lines = "".join(json.dumps(item) + "\n" for item in items)
        (folder / f"{split}.jsonl").write_text(lines)


def write_data_sets(root: Path) -> Path:
    """The data sets of piqa, arc_easy and wikitext."""
    write(root / "baber/piqa/default", piqa_items(), ["train", "validation"])
    write(root / "allenai/ai2_arc/ARC-Easy", arc_items(), ["train", "validation", "test"])
    write(
        root / "EleutherAI/wikitext_document_level/wikitext-2-raw-v1",
        pages(),
        ["train", "validation", "test"],
    )
    return root
