"""What growth costs: a check compared with a step, and the seconds of an event.

    python benchmarks/growth.py [--model prism-124m] [--micro_batch 1] [--every 100] [FLAGS of main.py]

The trainer takes --steps steps and checks in turn. A check's share of the training time is its median over
that of --every steps. Then one event adds a head to every layer; its parts are timed one by one. Last comes
the other way to grow, which was not taken: a model that has its largest size from the start, and computes
with the first heads of each layer.
"""

from __future__ import annotations

import copy
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from benchmarks.helpers import MAIN_FLAGS, parser_of, run_main, write  # noqa: E402
from benchmarks.one_trainer import trainer_of  # noqa: E402 - before torch
from model.attention import Attention, attend  # noqa: E402
from model.config import ModelConfig  # noqa: E402
from model.rotary import Table  # noqa: E402
from pretrain.config.model_file import load_named_model  # noqa: E402
from pretrain.growth.edit import Change, apply_changes  # noqa: E402
from pretrain.growth.hook import Growth  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, MAIN_FLAGS)
    parser.add_argument("--model", default="prism-124m")
    parser.add_argument("--micro_batch", type=int, default=1)
    parser.add_argument("--vocab_size", type=int, help="of the built-in corpus (default: the model's)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--every", type=int, default=100, help="steps between two checks, for the share")
    parser.add_argument("--criterion", default="incrt")
    options, flags = parser.parse_known_args()
    model = load_named_model(options.model)
    model = model.replace(vocab_size=options.vocab_size or model.vocab_size)
    growing = ["--growth.criterion", options.criterion, "--growth.calibration", "1", *flags]
    with trainer_of(model, options.micro_batch, *growing) as one:
        session, trainer = one.session, one.trainer
        [hook] = [hook for hook in trainer.hooks if isinstance(hook, Growth)]

        def check() -> None:
            """The first check again: what it decides is not done."""
            growth, captured = copy.deepcopy(session.state.records), hook._captured
            hook.run(trainer.engine, session.state, {})
            session.state.records, hook._captured = growth, captured

        one.step()
        check()
        steps, checks = [], []
        for _ in range(options.steps):
            steps.append(one.seconds(one.step))
            checks.append(one.seconds(check))
        step, checking = statistics.median(steps), statistics.median(checks)
        parameters = session.model_config.num_parameters()
        print(
            f"{options.model}: {parameters:,} parameters at the start; a step of "
            f"{session.tokens_per_step:,} tokens {step:.3f} s, a check {checking:.3f} s: "
            f"{checking / (options.every * step + checking):.2%} of the time at one every {options.every} "
            "steps"
        )
        heads = session.model_config.heads
        changes = [Change(layer, count, "grow") for layer, count in enumerate(heads)]
        session.state.record("growth")["pending"] = [vars(change) for change in changes]
        saving = one.seconds(trainer._save)
        trainer._next_model = apply_changes(session.model_config, changes)
        changing = one.seconds(trainer._change_model)
        after = one.seconds(one.step)
        print(
            f"an event: {saving + changing:.1f} s ({saving:.1f} s to write the checkpoint, {changing:.1f} s "
            f"to build the engine and read it); {session.model_config.num_parameters():,} parameters after "
            f"it, the first step {after:.3f} s"
        )
        largest = session.run.largest_model_config(session.model_config)
    preallocated = preallocated_steps(largest, heads, options.micro_batch, options.steps, flags)
    print(
        f"preallocated: {largest.num_parameters():,} parameters from the start; a step with the same heads "
        f"{statistics.median(preallocated):.3f} s, {statistics.median(preallocated) / step:.2f} x; no event"
    )
    write(
        options.out,
        {
            "model": options.model,
            "parameters": parameters,
            "step": steps,
            "check": checks,
            "saving": saving,
            "changing": changing,
            "first_step": after,
            "preallocated": preallocated,
        },
    )


def preallocated_steps(
    largest: ModelConfig, heads: tuple[int, ...], micro_batch: int, steps: int, flags: list[str]
) -> list[float]:
    """Seconds of steps of the *largest* model that computes with the first *heads* of each layer only."""
    with trainer_of(largest, micro_batch, *flags) as one:
        for layer, count in zip(one.trainer.engine.module.layers, heads, strict=True):
            use_first_heads(layer.attention, count)
        one.step()
        return [one.seconds(one.step) for _ in range(steps)]


def use_first_heads(attention: Attention, count: int) -> None:
    """Let an attention module without biases read and write with the first *count* of its heads."""
    import torch.nn.functional as F

    width = count * attention.head_dim
    attention.heads = attention.kv_heads = count

    def forward(
        hidden: Tensor, table: Table | None, mask: Tensor | None, offsets: Tensor | None = None
    ) -> Tensor:
        query, key, value = (F.linear(hidden, getattr(attention, part).weight[:width]) for part in "qkv")
        out: Tensor = attention.o.weight  # type: ignore[assignment]
        heads, _ = attention.whole_heads(query, key, value, table, mask, offsets)
        output = attend(heads, attention.scale, attention.window, attention.attention).flatten(2)
        return F.linear(output, out[:, :width])

    attention.forward = forward  # type: ignore[method-assign]


if __name__ == "__main__":
    run_main(main)
