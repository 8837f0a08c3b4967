"""``python -m model.parallel_plan``: print, and draw if asked, how tensor parallelism spreads a preset."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from model.errors import UserError, run_command
from model.parallel_plan import DTYPE_BYTES, plan
from model.pictures import draw_plan
from model.presets import named_model
from model.tables import plan_table


def run_parallel_plan(arguments: list[str]) -> None:
    """Print, and draw if asked, the plan of a preset.

    Raises:
        UserError: an unknown preset, a degree that does not divide it, or a file that cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m model.parallel_plan", description="How tensor parallelism spreads a model's heads."
    )
    parser.add_argument(
        "--model",
        required=True,
        help="preset (python -m model.presets lists them), or a .json file of its fields",
    )
    parser.add_argument("--heads", help="head schedule in place of the preset's, such as 3x2,6x2,8x2,12x6")
    parser.add_argument("--tensor_parallel", type=int, required=True, help="t: ranks that share the model")
    parser.add_argument("--micro_batch", type=int, default=8, help="B: sequences per rank and pass (8)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step (1)")
    parser.add_argument("--dtype", choices=sorted(DTYPE_BYTES), default="bf16", help="of activations (bf16)")
    parser.add_argument("--plot", metavar="FILE", help="draw the plan, for example plan.png")
    options = parser.parse_args(arguments)
    for name in ("micro_batch", "accumulation"):
        if getattr(options, name) < 1:
            raise UserError(f"{name}: {getattr(options, name)} is not valid; give a positive number")
    config = named_model(options.model)
    if options.heads is not None:
        config = config.replace(heads=options.heads)
    model_plan = plan(config, options.tensor_parallel, options.micro_batch, options.dtype)
    print(plan_table(model_plan, options.accumulation))
    if options.plot:
        title = f"{options.model} at t = {options.tensor_parallel}, micro-batch {options.micro_batch}"
        draw_plan(model_plan, title, options.plot)
        print(f"wrote {options.plot}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(run_parallel_plan, arguments)


if __name__ == "__main__":
    sys.exit(main())
