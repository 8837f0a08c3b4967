"""A few dozen real-looking items of lm-eval's tasks, as files on this machine."""

from __future__ import annotations

import json
import re
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


def hellaswag_items(count: int = 12) -> list[dict[str, Any]]:
    """Four endings each; brackets and doubled spaces, which the task takes out."""
    return [
        {
            "activity_label": "Camping",
            "ctx_a": f"A man [title] walks up to {THINGS[i % 5]}.",
            "ctx_b": "he",
            "endings": [f"{VERBS[(i + j) % 10]}s it{'  very  slowly' * (j % 2)}." for j in range(4)],
            "label": str(i * 3 % 4),
        }
        for i in range(count)
    ]


def winogrande_items(count: int = 16) -> list[dict[str, Any]]:
    """Two words for a blank each; the same end of the sentence is scored after both."""
    return [
        {
            "sentence": f"The gate was above {THINGS[i % 5]}, so _ was hard to {VERBS[i % 10]} again.",
            "option1": "the gate",
            "option2": THINGS[i % 5],
            "answer": str(1 + i * 5 % 2),
        }
        for i in range(count)
    ]


def blimp_items(number: int, count: int = 2) -> list[dict[str, Any]]:
    """Pairs of a sentence and an ungrammatical one, of the subtask *number*."""
    return [
        {
            "sentence_good": f"All {number + 2} {VERBS[i]} {THINGS[number % 5]}.",
            "sentence_bad": f"All {number + 2} {VERBS[i]}s {THINGS[number % 5]}.",
        }
        for i in range(count)
    ]


def pages(count: int = 3) -> list[dict[str, Any]]:
    """Texts longer than a context. No two windows of one have the same tokens: lm-eval 0.4.13's own ``hf``
    model runs such windows once, and then sums the log-likelihoods of the wrong ones of their tokens."""
    title, line = " = The bridge = \n\n", " The bridge was built in {} . It is {} @.@ 5 m high , and long .\n"
    return [
        {"page": title + "".join(line.format(1905 + 7 * i + j, 30 + 11 * j) for j in range(2 * i + 3))}
        for i in range(count)
    ]


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


def write_paper_data_sets(root: Path) -> Path:
    """The data sets of all six tasks of the group ``papers``; blimp is 67 small ones."""
    write_data_sets(root)
    write(root / "Rowan/hellaswag/default", hellaswag_items(), ["train", "validation"])
    write(root / "allenai/winogrande/winogrande_xl", winogrande_items(), ["train", "validation"])
    for number, name in enumerate(blimp_names()):
        write(root / "nyu-mll/blimp" / name, blimp_items(number), ["train"])
    return root


def blimp_names() -> list[str]:
    """Names of blimp's data sets, from lm-eval's own task files."""
    import lm_eval

    files = sorted(Path(lm_eval.__file__).parent.glob("tasks/blimp/*.yaml"))
    found = [re.search(r"^dataset_name: (\w+)$", file.read_text(), re.MULTILINE) for file in files]
    return [match[1] for match in found if match]
