"""``head-schedules growth report runs/NAME``: what every head is worth, and how a grown run's heads came
about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from model.errors import UserError
from pretrain.checkpoint.finder import require_steps
from pretrain.config.command_line import CommandParser
from pretrain.runtime.command import run_command
from pretrain.utils.env_check import check_installed


def build_parser() -> CommandParser:
    """Build the parser of the command line."""
    parser = CommandParser(
        prog="head-schedules growth",
        description="Heads that grew, and what heads are worth.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    what = "the worth of every head of a run, and predicted head counts of a grown one"
    add("command", choices=["report"], metavar="report", help=what)
    add("run", type=Path, metavar="RUN", help="a run's folder, such as runs/NAME")
    add("--step", type=int, metavar="N", help="which checkpoint (default: the newest valid one)")
    add("--sequences", type=int, default=32, metavar="N", help="held-out windows (default: 32)")
    add("--out", type=Path, metavar="FOLDER", help="where to write (default: growth/ of the run)")
    return parser


def run_growth(arguments: Sequence[str]) -> None:
    """Measure the run of the command line, print the report and write it.

    Raises:
        UserError: bad input, a run that cannot be read, or no held-out text of it on this machine.
    """
    options = build_parser().parse_args(arguments)
    if options.sequences < 1:
        raise UserError(f"sequences: {options.sequences} is not valid; give a positive number")
    require_steps(options.run, options.step)
    # Imported here: it loads torch and DeepSpeed, and a mistyped flag should be answered at once.
    from pretrain.engine.deepspeed_logging import quiet_libraries

    quiet_libraries()
    from pretrain.growth.report.contents import write_report

    check_installed("matplotlib")  # it draws when all is measured
    write_report(options.run, options.step, options.sequences, options.out or options.run / "growth")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(run_growth, arguments)
