"""What a run has cost, and the heads that it had when: FLOPs and head counts over training."""

from __future__ import annotations

from pretrain.study.results import RunResult

History = list[tuple[int, tuple[int, ...]]]
"""Steps, and the heads of every layer from there on."""


def training_flops(run: RunResult) -> float | None:
    """FLOPs of all training steps: FLOPs per token of the model of the time, times tokens; None if not known.

    Heads that grow count from the check at which metrics.jsonl shows them.
    """
    model = run.model_config
    rows = [row for row in run.rows if "tokens" in row]
    if model is None or not rows:
        return None
    changes = dict(head_history(run))
    flops, seen = 0.0, 0
    per_token = 0.0
    for step, tokens in ((0, 0), *((row["step"], row["tokens"]) for row in rows)):
        flops += per_token * (tokens - seen)
        seen = tokens
        if step in changes:
            per_token = float(model.replace(heads=changes[step]).flops_per_token())
    return flops


def head_history(run: RunResult) -> History:
    """At step 0, at each check of growth, and at the last row; empty without a checkpoint."""
    model = run.model_config
    if model is None:
        return []
    grows = run.planned.grows
    found = {0: run.planned.run.build_model_config().heads if grows else model.heads}
    for row in run.rows:
        shown = [row.get(f"growth/heads/layer_{layer}") for layer in range(model.num_layers)]
        counts = [count for count in shown if isinstance(count, int)]
        if len(counts) == model.num_layers:
            found[row["step"]] = tuple(counts)
    return sorted(({run.step: model.heads} | found).items())
