"""What a growth report holds: worths of heads on held-out text and predicted head counts; printed, drawn and
written."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import correlation
from typing import Any

import numpy as np
import pandas as pd
import torch
from pydantic_core import to_json

from model.errors import UserError
from pretrain.classification.examples import held_out_examples
from pretrain.diagnostics.measure import open_own_data
from pretrain.growth.record import GrowthState
from pretrain.growth.report.law import predict
from pretrain.growth.report.worth import SMALL_INCREASE, SMALL_SHARE, HeadWorths, measure_worths
from pretrain.metrics.file import read_metrics
from pretrain.run.saved import SavedRun
from pretrain.utils.files import write_atomically
from pretrain.utils.format import print_lines
from pretrain.utils.plotting import save_figure, whole_numbers

SURE = 2.0
"""Worths of fewer standard errors than this are indistinguishable from zero."""
LAW = """head counts by the law of incrt's threshold, K_0 + κ² ln(Γ(0) / θ_w), κ² from the first growth events
of each layer; it says nothing of layers that stopped at growth.maximum, nor of other criteria:"""


def write_report(folder: Path, step: int | None, sequences: int, out: Path) -> None:
    """Measure a run, print the report, and write it with its pictures to *out*.

    Args:
        folder: the run's.
        step: of the checkpoint; None is the newest valid one.
        sequences: held-out windows that are read.

    Raises:
        UserError: a run that cannot be read, no held-out text of it on this machine, or *out* cannot be
            written.
    """
    source = SavedRun.open(folder, step)
    model, step, heads = source.model, source.state.step, source.model.heads
    if not any(heads):
        raise UserError(f"run: {folder} has a model without attention heads; give a run whose model has some")
    record = GrowthState.from_state(source.state)
    inputs, labels, starts, text = held_out(source, sequences)
    trend = correlation(range(len(heads)), heads) if len(set(heads)) > 1 else None
    print_lines(f"model     {folder.resolve().name}, step {step:,}: {model.summary()}")
    print(f"heads     {sum(heads)}, {sum(heads) / len(heads):.2f} a layer", end="")
    print("" if trend is None else f", correlation with depth {trend:+.2f}", flush=True)
    network = source.load_model().to("cuda" if torch.cuda.is_available() else "cpu")
    worths = measure_worths(network, inputs, labels, starts)
    predictions = [asdict(found) for found in predict(record, heads)] if record else []
    if record:
        print(LAW, pd.DataFrame(predictions).to_string(index=False, na_rep="-"), sep="\n")
    print("\n".join(worth_lines(worths, text)))
    written = [draw_worths(worths, out / "worths.png")]
    rows = read_metrics(folder) if record else []
    if rows := [row for row in rows if row["step"] <= step]:
        written.append(draw_growth(rows, out / "growth.png"))
    layers = [worths.heads[worths.heads["layer"] == layer] for layer in range(len(heads))]
    report = {
        "run": str(source.run_folder),
        "step": step,
        "tokens": source.state.tokens,
        "heads": heads,
        "kv_heads": model.kv_heads or heads,
        "mean_heads": sum(heads) / len(heads),
        "correlation_with_depth": trend,
        "text": text,
        "windows": worths.windows,
        "loss": worths.loss,
        "worths": [rows["worth"].tolist() for rows in layers],
        "standard_errors": [rows["error"].tolist() for rows in layers],
        "gates": [rows["gate"].tolist() for rows in layers] if "gate" in worths.heads else None,
        "removal": worths.curve.to_dict("records"),
        "removable_share": worths.removable["share"],
        "growth": record,
        "predictions": predictions,
    }
    # Numbers that are not finite, which JSON does not know, become null.
    written.append(out / "report.json")
    write_atomically(written[-1], to_json(report, indent=1, inf_nan_mode="null").decode() + "\n")
    print_lines("wrote " + ", ".join(map(str, written)))


def held_out(source: SavedRun, sequences: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray] | None, str]:
    """Held-out windows (or examples) of the run's corpora, shared among them by weight as in its validation.

    Returns:
        Inputs and labels [n, T] each; where documents begin in each, if the model was trained with a document
        mask; the names of the corpora, as far as they are on this machine.

    Raises:
        UserError: no corpus of the run is on this machine.
    """
    data, length = open_own_data(source), source.model.context_length
    names = ", ".join(corpus.name for corpus, _ in data.corpora)
    if source.model.classes is not None:
        inputs, labels = held_out_examples(data.corpora[0][0], length, sequences)
        return inputs, labels, None, f"held-out examples of {names}"
    windows = data.validation_windows(length, sequences)
    mask = source.state.run.get("document_mask", False)
    starts = data.validation_documents(length, sequences) if mask else None
    return windows[:, :-1], windows[:, 1:], starts, f"held-out text of {names}"


def worth_lines(found: HeadWorths, text: str) -> list[str]:
    """Worths by layer, and the removal curve."""
    worth, best = found.heads["worth"], found.removable
    marked = found.heads.assign(
        small=worth < SMALL_SHARE * worth.max(),
        negative=worth < 0,
        unsure=~(worth.abs() > SURE * found.heads["error"]),
    )
    gates = {"gate": ("gate", "mean")} if "gate" in marked else {}
    by_layer = marked.groupby("layer").agg(
        heads=("worth", "size"),
        smallest=("worth", "min"),
        median=("worth", "median"),
        largest=("worth", "max"),
        small=("small", "sum"),
        negative=("negative", "sum"),
        unsure=("unsure", "sum"),
        **gates,
    )
    formats: dict[str, Any] = {
        "share": "{:.0%}".format,
        "loss": "{:.4f}".format,
        "increase": "{:+.2%}".format,
    }
    return [
        f"loss      {found.loss:.4f} nats per {found.per} on {found.windows} windows "
        f"({found.tokens:,} labels): {text}",
        f"worth of each head, in nats per {found.per}: the loss without it minus the loss of the whole model",
        by_layer.to_string(float_format="{:+.6f}".format),
        f"small: below {SMALL_SHARE:.0%} of the largest worth; "
        f"unsure: within {SURE:g} standard errors of zero",
        "heads removed together, smallest worth first, without training again:",
        found.curve.to_string(index=False, formatters=formats),
        f"the largest share tried that costs at most {SMALL_INCREASE:.0%} of loss: {best['share']:.0%} "
        f"({best['removed']:.0f} of {len(worth)} heads, loss {best['increase']:+.2%})",
    ]


def draw_worths(found: HeadWorths, path: Path) -> Path:
    """Draw every head's worth by layer, and the loss increase as heads are removed, smallest worth first.

    The y axes are linear around zero and logarithmic beyond: worths may be negative.

    Raises:
        UserError: the file cannot be written.
    """
    with save_figure(path, "out", 1, 2, size=(11, 4.5), dpi=120) as (_, (strip, curve)):
        for layer, heads in found.heads.groupby("layer"):
            places = np.linspace(layer - 0.25, layer + 0.25, len(heads))
            strip.errorbar(places, heads["worth"], heads["error"].fillna(0), fmt="k.", ecolor="0.6")
        strip.axhline(0, color="0.6", linewidth=0.7)
        strip.set_yscale("symlog", linthresh=SMALL_SHARE * found.heads["worth"].abs().max() or 1)
        strip.set(xlabel="layer", ylabel=f"worth of a head, ± one standard error (nats per {found.per})")
        whole_numbers(strip.xaxis)
        curve.plot(100 * found.curve["share"], 100 * found.curve["increase"], "ko-", markersize=4)
        curve.axhline(100 * SMALL_INCREASE, color="0.4", linestyle="--")
        curve.set_yscale("symlog", linthresh=100 * SMALL_INCREASE)
        curve.set(xlabel="heads removed, smallest worth first (% of all)", xlim=(0, 100))
        curve.set_ylabel("increase of the held-out loss (%)")
    return path


def draw_growth(rows: list[dict[str, Any]], path: Path) -> Path:
    """Draw heads, Γ and λ_max of every layer at the checks, from the rows of metrics.jsonl.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib import colormaps

    with save_figure(path, "out", 3, size=(8, 9), dpi=120, sharex=True) as (figure, axes):
        labels = {"heads": "heads", "gamma": "Γ", "lambda_max": "λ_max"}
        for axis, (name, label) in zip(axes, labels.items(), strict=True):
            checks = pd.DataFrame(rows).set_index("step").filter(like=f"growth/{name}/").dropna()
            for number, key in enumerate(checks):
                color = colormaps["viridis"](0.85 * number / max(1, len(checks.columns) - 1))
                axis.plot(checks.index, checks[key], ".-", color=color, label=key.rpartition("/")[2])
            axis.set_ylabel(label)
        whole_numbers(axes[0].yaxis)
        axes[2].set_xlabel("training step")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return path
