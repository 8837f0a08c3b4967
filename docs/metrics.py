"""The fields of metrics.jsonl and evaluation.jsonl: a page of the reference, and a JSON schema.

tests/test_metrics_page.py compares them with the rows of real runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pretrain.diagnostics.attention import HEAD_MEASURES

PARTS = {
    "LAYER": ("[0-9]+", "a layer, from 0"),
    "GROUP": (".+", "a group of parameters with one learning rate"),
    "MATRIX": (".+", "a weight matrix"),
    "TASK": ("[^/]+", "a task of lm-eval"),
    "METRIC": (".+", "a metric of the task"),
}
"""What stands in capitals in a name: the pattern that it matches, and what it names."""
NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
TYPES: dict[str, dict[str, Any]] = {
    "integer": {"type": "integer", "minimum": 0},
    "number": NUMBER,
    "list": {"type": "array", "items": {"type": "array", "items": NUMBER}},
    "string": {"type": "string"},
    "object": {"type": "object"},
}


@dataclass(frozen=True)
class Field:
    """A field of a row, or those of one form."""

    name: str
    type: str
    """One of TYPES."""
    unit: str
    when: str
    meaning: str

    @property
    def value(self) -> str:
        """Type and unit."""
        return f"{self.type}, {self.unit}" if self.unit else self.type

    @property
    def pattern(self) -> str:
        """The regular expression that the name matches as a whole."""
        parts = re.split(rf"({'|'.join(PARTS)})", self.name)
        return f"^{''.join(PARTS[part][0] if part in PARTS else re.escape(part) for part in parts)}$"


ALWAYS = "every row"
READ = "the last of every `logging.every` rows"
VALIDATED = "every `validation.every` steps and the last"
MEASURED = "every `diagnostics_every` steps"
CHECKED = "every check of a run with growth"
RANKS = f"{READ}, of several ranks"
PER_LABEL = "nats per token (classifiers: per example)"

TRAINING = [
    Field("step", "integer", "steps", ALWAYS, "Attempted optimizer steps, those that were skipped included."),
    Field("tokens", "integer", "tokens", ALWAYS, "Label tokens of all ranks up to this step."),
    Field("skipped", "integer", "updates", ALWAYS, "Skipped updates up to this step."),
    Field("train_loss", "number", PER_LABEL, ALWAYS, "Mean cross-entropy of the step's global batch."),
    Field(
        "z_loss",
        "number",
        "as `train_loss`",
        "every row with `architecture.z_loss`",
        "What the z loss adds to the training loss.",
    ),
    Field(
        "grad_norm",
        "number",
        "",
        ALWAYS,
        "Global gradient norm before clipping; `Infinity` if it was not finite and the update was skipped.",
    ),
    Field("lr/GROUP", "number", "", ALWAYS, "Learning rate of a group of parameters."),
    Field(
        "seconds",
        "number",
        "seconds",
        READ,
        "Training time over all sessions, without validation and saving.",
    ),
    Field(
        "tokens_per_second",
        "number",
        "tokens per second",
        f"{READ}, except the first",
        "Throughput of all ranks over the last 20 readings, without validation and saving.",
    ),
    Field(
        "mfu",
        "number",
        "fraction",
        "with `tokens_per_second`",
        "`tokens_per_second` times FLOPs per token, divided by the peak of all devices.",
    ),
    Field("ranks/tokens_per_second", "number", "tokens per second", RANKS, "Throughput of a rank."),
    Field(
        "ranks/forward_seconds", "number", "seconds", RANKS, "Forward pass of a micro-batch, mean over ranks."
    ),
    Field("ranks/forward_seconds_slowest", "number", "seconds", RANKS, "The same of the slowest rank."),
    Field("ranks/slowest", "integer", "rank", RANKS, "The rank whose forward pass is slowest."),
]
VALIDATION = [
    Field(
        "val_loss", "number", PER_LABEL, VALIDATED, "Cross-entropy over the same held-out windows each time."
    ),
    Field(
        "val_bpb", "number", "bits per byte", f"{VALIDATED}; language models", "The same per byte of text."
    ),
    Field(
        "val_accuracy",
        "number",
        "fraction",
        f"{VALIDATED}; classifiers",
        "Validation examples that are classified correctly.",
    ),
    Field(
        "evaluation/TASK/METRIC",
        "number",
        "as lm-eval defines it",
        "every `evaluation.every` steps and the last",
        "Zero-shot score.",
    ),
]
DIAGNOSTICS = [
    *(
        Field(f"diagnostics/{name}/layer_LAYER", "number", unit, when, f"{meaning[0].upper()}{meaning[1:]}.")
        for name, unit, when, meaning in (
            (
                "attention_distance",
                "tokens",
                MEASURED,
                "mean distance between a query and what it attends to",
            ),
            ("attention_entropy", "nats", MEASURED, "mean entropy of the attention probabilities"),
            ("max_probability", "fraction", MEASURED, "mean of the largest attention probability of a query"),
            ("logit_spread", "", MEASURED, "standard deviation of the attention logits"),
            (
                "attention_gate",
                "fraction",
                f"{MEASURED}, with `architecture.attention_gate`",
                "mean of the gates",
            ),
            ("attention_write", "ratio", MEASURED, "energy that attention adds to the residual stream"),
            ("ffn_write", "ratio", MEASURED, "energy that the feed-forward network adds"),
            ("path_energy", "ratio", MEASURED, "energy written by the layers below"),
            ("lambda_q_initial", "ratio", f"{MEASURED}, until heads grow", "displacement of W_Q from step 0"),
            ("lambda_k_initial", "ratio", f"{MEASURED}, until heads grow", "displacement of W_K from step 0"),
            (
                "lambda_q_release",
                "ratio",
                f"{MEASURED} after a release",
                "displacement of W_Q from the release",
            ),
            (
                "lambda_k_release",
                "ratio",
                f"{MEASURED} after a release",
                "displacement of W_K from the release",
            ),
            (
                "feature_drift",
                "ratio",
                f"{MEASURED} except the first; lower half of the layers",
                "change of the layer's output since the last measurement",
            ),
        )
    ),
    *(
        Field(
            f"diagnostics/{name}/heads",
            "list",
            "as by layer",
            MEASURED,
            "A list for each layer, with a value for each head.",
        )
        for name in (*HEAD_MEASURES, "attention_gate")
    ),
    Field(
        "diagnostics/effective_lr/GROUP",
        "number",
        "",
        MEASURED,
        "RMS of the group's last update, learning rate included.",
    ),
    Field(
        "diagnostics/relative_update/GROUP",
        "number",
        "ratio",
        MEASURED,
        "Norm of the last update, divided by that of the weights.",
    ),
]
CHANGES = [
    Field("growth/heads/layer_LAYER", "integer", "heads", CHECKED, "Heads after the check."),
    Field("growth/gamma/layer_LAYER", "number", "", CHECKED, "Norm Γ of the residual directional energy."),
    Field("growth/lambda_max/layer_LAYER", "number", "", CHECKED, "Largest eigenvalue of that energy."),
    Field("growth/weakest_head/layer_LAYER", "number", "", CHECKED, "Least energy of a head of the layer."),
    Field(
        "growth/gradient/layer_LAYER",
        "number",
        "",
        f"{CHECKED} by `gradient`",
        "Gradient norm that a new head would have.",
    ),
    Field(
        "maturity/drift",
        "number",
        "ratio",
        "every `maturity.every` steps, while a rule waits for maturity",
        "Change of the lower half's features between two probes.",
    ),
    Field(
        "llr/exponent/MATRIX",
        "number",
        "",
        "every `llr.every` steps until `llr.until`",
        "Tail exponent of the matrix's spectrum.",
    ),
    Field("llr/factor/MATRIX", "number", "", "with `llr/exponent`", "Factor of its learning rate."),
]
METRICS = {
    "Training": TRAINING,
    "Validation and scores": VALIDATION,
    "Diagnostics": DIAGNOSTICS,
    "Growth and learning rates": CHANGES,
}
EVALUATION = [
    Field("step", "integer", "steps", ALWAYS, "The step of the checkpoint."),
    Field("tokens", "integer", "tokens", ALWAYS, "Label tokens up to that step."),
    Field("checkpoint", "string", "", ALWAYS, "Identity of the checkpoint: a hash of its manifest."),
    Field("scored", "object", "", ALWAYS, "The settings of the evaluation."),
    Field("evaluation/TASK/METRIC", "number", "as lm-eval defines it", ALWAYS, "Zero-shot score."),
]


def metrics_schema() -> dict[str, Any]:
    """The JSON schema of a row of metrics.jsonl. Other fields are those of hooks of a user."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A row of metrics.jsonl",
        "type": "object",
        "required": ["step"],
        "patternProperties": {
            field.pattern: TYPES[field.type] | {"description": f"{field.meaning} ({field.when})"}
            for fields in METRICS.values()
            for field in fields
        },
    }


def metrics_page() -> str:
    """What each field means, in what unit, and in which rows it is."""
    lines = [
        "# Fields of metrics.jsonl",
        "",
        "`runs/NAME/metrics.jsonl` has one JSON object per line, and one line for every step:",
        "",
        "```python",
        "from pathlib import Path",
        "from pretrain import read_metrics",
        "",
        'rows = read_metrics(Path("runs/first"))   # those of evaluation.jsonl included',
        'losses = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]',
        "```",
        "",
        "A row has the fields that were measured at its step. Hooks of your own may add others. Numbers that",
        'JSON cannot express are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`. The',
        "[JSON schema of a row](metrics.schema.json) has the same content as this page.",
        "[](../numbers.md) explains MFU, and which runs are comparable.",
        "",
        *(f"- `{part}` is {what}." for part, (_, what) in PARTS.items()),
    ]
    for title, fields in METRICS.items():
        lines += ["", f"## {title}", "", *_table(fields)]
    lines += [
        "",
        "## evaluation.jsonl",
        "",
        "`head-schedules evaluate --follow` writes a row for each checkpoint that it has scored:",
        "",
        *_table(EVALUATION),
        "",
    ]
    return "\n".join(lines)


def _table(fields: list[Field]) -> list[str]:
    rows = [f"| `{each.name}` | {each.meaning} | {each.value} | {each.when} |" for each in fields]
    return ["| field | meaning | value | appears in |", "|---|---|---|---|", *rows]
