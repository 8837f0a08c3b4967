"""Why some bad input is accepted: the first row that fits a case."""

from __future__ import annotations

from fnmatch import fnmatchcase

from tests.bad_inputs.cases import Case

REASONS: tuple[tuple[str, str, str, str], ...] = (
    # command, field, kind (patterns), reason
    ("*", "$*", "*", "a variable that the command does not use, or whose library takes its default instead"),
    (
        "*",
        "runs/*/metrics.jsonl",
        "*",
        "figures that it does not use; a last line cut short by a stop",
    ),
    ("*", "runs/*/decisions.json", "*", "written for people, never read back"),
    (
        "*",
        "runs/*",
        "*",
        "not read by it, or the valid checkpoint before the damaged one is taken",
    ),
    ("*", "hf/one/*", "*", "a key or file that transformers does without or has a default for"),
    ("*", "data/mine/*", "*", "what names the corpus for people, or a part that the command does not read"),
    ("*", "text*", "*", "any text is a document, and files that are none are named and left out"),
    ("*", "*.jsonl", "*", "any text is a document or a label"),
    ("*", "*.json", "leaf*", "a value in its range, or null: the default"),
    ("*", "*.yaml", "leaf*", "a value in its range, or null: the default"),
    ("*", "*.yaml", "truncated", "its first half is a whole file with fewer fields"),
    ("*", "*.yaml", "byte", "another letter in a name or a comment"),
    ("*", "recipe.yaml", "empty", "a recipe may leave every field out"),
    ("study task", "0", "*", "the number of one of its tasks"),
    ("evaluation", "*", "*", "a value in its range, or a file that these tasks do not need"),
    ("*", "--*", "*", "a value in its range: free text, a number, or a name that can be made"),
    ("*", "*", "missing", "the command does without it"),
    ("*", "*", "appended", "what follows the end is not read"),
    ("study *", "*", "path", "an empty name's folder, or one that holds nothing yet"),
)


def reason(case: Case) -> str:
    """The reason for which the case may be accepted; empty if none is known."""
    for *patterns, why in REASONS:
        if all(fnmatchcase(part, pattern) for part, pattern in zip(case.key, patterns, strict=True)):
            return why
    return ""
