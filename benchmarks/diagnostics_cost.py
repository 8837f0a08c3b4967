"""What in-loop diagnostics cost: seconds of a look against seconds of a training step, on this machine.

    python benchmarks/diagnostics_cost.py [--model prism-tiny] [--rounds 5] [FLAGS of pretrain/main.py]

Steps and looks take turns in one process, in the trainer's own objects; medians are printed, and the cost at
the default interval: seconds of a look / (interval x seconds of a step). Peak memory of a look is not in it.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from benchmarks.helpers import MAIN_FLAGS, parser_of, run_main, write  # noqa: E402
from benchmarks.one_trainer import one_trainer  # noqa: E402
from pretrain.config.run_config import RunConfig  # noqa: E402
from pretrain.diagnostics.in_loop import Diagnostics  # noqa: E402


def main() -> None:
    """Print the results."""
    parser = parser_of(__doc__, MAIN_FLAGS)
    parser.add_argument("--rounds", type=int, default=5)
    options, flags = parser.parse_known_args()
    steps, looks = [], []
    with one_trainer("--compile", "false", *flags) as one:
        session, engine = one.session, one.trainer.engine
        run = session.run
        diagnostics = next(hook for hook in one.trainer.hooks if isinstance(hook, Diagnostics))
        for index in range(options.rounds + 1):
            steps.append(one.seconds(one.step))
            looks.append(one.seconds(lambda: diagnostics.run(engine, session.state, {})))
            if index == 0:  # the first of each fills caches
                print(f"first step {steps.pop():.3f} s, first look {looks.pop():.3f} s")
    write(options.out, {"model": run.model, "steps": steps, "looks": looks})
    step, look = statistics.median(steps), statistics.median(looks)
    default = RunConfig().diagnostics_every
    print(
        f"{run.model}: {session.model_config.num_parameters():,} parameters, {session.tokens_per_step:,} "
        "tokens a step"
    )
    print(
        f"step {step:.3f} s, look {look:.3f} s ({run.diagnostics.sequences} windows); medians of {len(steps)}"
    )
    print(f"cost at every {default} steps: {look / (default * step):.2%}")
    if run.diagnostics_every not in (0, default):
        print(f"cost at every {run.diagnostics_every} steps: {look / (run.diagnostics_every * step):.2%}")


if __name__ == "__main__":
    run_main(main)
