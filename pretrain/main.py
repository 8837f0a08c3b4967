"""Entry point: parse, open the session, train, sum up.

    deepspeed pretrain/main.py --ds_config ds_configs/zero2.json [--config RECIPE] [--FIELD VALUE …]
    deepspeed --module pretrain.main …          # from any folder; for one process also head-schedules train …

Every rank runs this file. Bad input ends with a one-line error on rank 0 and exit code 2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__" and __spec__ is None:
    # Running a file puts its folder first on sys.path, where pretrain/*.py could shadow libraries; the root
    # belongs there.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pretrain.config.command_line import parse_command_line
from pretrain.library import check_run, train_to_end
from pretrain.runtime.command import prepare_process
from pretrain.runtime.environment import environment_rank
from pretrain.runtime.exit import INTERRUPTED, end_after, leave
from pretrain.runtime.signals import StopListener, Stopped
from pretrain.utils.format import log_line
from pretrain.utils.stdio import outlive_output


def main(arguments: list[str], listener: StopListener, rank: int) -> None:
    """Run the training that *arguments* describe.

    Raises:
        UserError: bad input, a run folder that cannot be used, a checkpoint that cannot be written.
        Stopped: *listener* was asked to stop; what was trained is saved.
    """
    with listener.raising():  # bad input is answered before the ranks meet
        command = parse_command_line(arguments)
        run = command.run
        listener.limit(run.interruption.agreement_seconds, run.interruption.minutes)
        if command.plot_lr is not None:
            if rank == 0:
                from pretrain.plots.learning_rates import plot_learning_rates

                print("\n".join(plot_learning_rates(run, Path(command.plot_lr))))
            return
        ds_config = check_run(run, command.ds_config)
        from pretrain.assembly.preflight import check_settings, check_start

        if command.print_config:
            if rank == 0:
                check_settings(run)
                print(run.to_recipe(), end="")
            return
        check_start(run)
    train_to_end(run, ds_config, listener, arguments, verbose=command.verbose)


def start() -> NoReturn:
    """Train as the process's arguments say, and end the process with an exit code: 0, 2 for bad input, 75
    when asked to stop, 130 after Ctrl-C, 1 after any other error."""
    prepare_process()
    outlive_output()
    rank = environment_rank()
    listener = StopListener()
    try:
        main(sys.argv[1:], listener, rank)
        leave(rank, 0)
    except Stopped as stopped:
        if rank == 0:
            if stopped.exit_code == INTERRUPTED:
                listener.let_the_launcher_end()
            saved = "" if stopped.saved_step is None else f"; step {stopped.saved_step:,} is saved"
            print(
                log_line("stopped", f"({stopped.reason}){saved}; {stopped.resumes}"),
                file=sys.stderr,
                flush=True,
            )
        leave(rank, stopped.exit_code)
    except Exception as error:
        end_after(error, rank)


if __name__ == "__main__":
    start()
