"""How many heads grow on data that needs a known number of directed relations between tokens?

    python benchmarks/planted_rank.py --out runs/planted [--relations 1 2 4 8] [--seeds 1 2 3] [FLAGS of main.py]

A sequence holds one symbol of each of k groups, shuffled among fillers, and ends with a query that names a group; the
class is which of the group's symbols was there. So the answer needs k relations, query i to group i, each of its own
direction. A model of two layers begins with one head in each (the first layer can bring the query to where the answer
is read). The table compares k with the heads that it ends with. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import random
import string
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from benchmarks.figures import MAIN_FLAGS, write  # noqa: E402
from pretrain.classification.corpus import Task, prepare_labelled  # noqa: E402
from pretrain.classification.sources import Example  # noqa: E402
from pretrain.metrics.file import read_metrics  # noqa: E402

SYMBOLS = 4
"""Of a group: the number of classes."""
LENGTH = 16
FILLERS = "....,,,,;;;;"
ARCHITECTURE = (
    "{context_length: 32, d_model: 64, ffn_width: 128, heads: [1, 1], head_dim: [8, 8], positions: learned}"
)
SETTINGS = [
    "--config", "classification", "--model", "prism-nano", "--architecture", ARCHITECTURE, "--steps", "2000",
    "--global_batch_tokens", "2048", "--optimizer.learning_rate", "3e-3", "--validation.every", "500",
    "--checkpoint.every", "0", "--compile", "false", "--logging.wandb", "disabled", "--threads", "1",
    "--growth.criterion", "incrt", "--growth.grow_share", "0.8", "--growth.maximum", "12", "--growth.head_dim", "8",
]  # fmt: skip


def examples(relations: int, count: int, seed: int) -> list[Example]:
    """*count* sequences of the task with so many relations; letters are symbols, digits and signs queries."""
    draw = random.Random(f"{relations} {seed}")
    symbols = [string.ascii_letters[SYMBOLS * g : SYMBOLS * (g + 1)] for g in range(relations)]
    found = []
    for _ in range(count):
        chosen = [draw.randrange(SYMBOLS) for _ in symbols]
        letters = [group[index] for group, index in zip(symbols, chosen, strict=True)]
        letters += draw.choices(FILLERS, k=LENGTH - relations)
        draw.shuffle(letters)
        asked = draw.randrange(relations)
        found.append(Example("".join(letters) + (string.digits + "+-")[asked], str(chosen[asked])))
    return found


def run(out: Path, relations: int, seed: int, flags: list[str]) -> Path:
    """Train one model, unless it is there; returns its folder."""
    data = out / f"data-{relations}"
    task = Task(
        examples(relations, 20_000, 1),
        examples(relations, 1_000, 2),
        {"name": f"planted {relations}"},
        {"by": "seed"},
    )
    prepare_labelled(data, task, None)
    folder = out / f"k{relations}-s{seed}"
    command = [
        sys.executable, str(ROOT / "pretrain/main.py"), "--ds_config", str(ROOT / "ds_configs/zero2.json"), *SETTINGS,
        "--data", str(data), "--runs_dir", str(out), "--name", folder.name, "--seed", str(seed), *flags,
    ]  # fmt: skip
    with (out / f"{folder.name}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    return folder


def main() -> None:
    """Train and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=MAIN_FLAGS)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--relations", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options, flags = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print("| relations k | seed | heads, layer by layer | accuracy |\n|---:|---:|---|---:|")
    rows = []
    for relations in options.relations:
        for seed in options.seeds:
            metrics = list(read_metrics(run(options.out, relations, seed, flags)))
            last = [row for row in metrics if "growth/heads/layer_0" in row][-1]
            heads = [last[f"growth/heads/layer_{layer}"] for layer in range(2)]
            accuracy = [row for row in metrics if "val_accuracy" in row][-1]["val_accuracy"]
            rows.append({"relations": relations, "seed": seed, "heads": heads, "accuracy": accuracy})
            print(f"| {relations} | {seed} | {', '.join(map(str, heads))} | {accuracy:.1%} |", flush=True)
    write(str(options.out / "table.json"), rows)


if __name__ == "__main__":
    main()
