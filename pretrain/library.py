"""Training from your own Python program; ``pretrain`` exports these names.

    from pretrain import recipe, train

    run = recipe("modern-micro", heads="8x2,4,2", steps=200)
    trained = train(run)

``recipe`` gives the settings that a command with the same flags would have. ``train`` runs as the command
does, in this process, or in each rank that a launcher (torchrun, deepspeed, srun) has started: run folder,
checkpoints, metrics and what is printed are the same, and calling it again continues the run.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.config.sources import find_ds_config, flatten, load_recipe, make_run
from pretrain.run.process_state import (
    claim_process,
    preserve_environment,
    preserve_interpreter,
    preserve_torch,
)
from pretrain.runtime.environment import check_environment, environment_rank
from pretrain.runtime.exit import INTERRUPTED
from pretrain.runtime.signals import StopListener, Stopped
from pretrain.utils.format import log_line, print_lines

if TYPE_CHECKING:
    from pretrain.run.hooks import Hook
    from pretrain.run.saved import SavedRun
    from pretrain.run.session import Session

__all__ = ["RunConfig", "Stopped", "UserError", "recipe", "train"]


def recipe(name: str | None = None, /, **settings: Any) -> RunConfig:
    """The settings of a recipe, some of them replaced.

    Args:
        name: a recipe of pretrain/recipes/, or a YAML file; None: that of the default run.
        settings: fields of RunConfig, as in a recipe: ``heads=[2, 4, 8, 8]``, ``steps=100``; those of a
            section in a mapping, ``optimizer={"learning_rate": 1e-3}``, which replaces the fields that it
            names, or as an object, ``optimizer=other.optimizer``, which replaces all of them.

    Raises:
        UserError: no such recipe, an unknown setting, a value that is not valid. Whether heads fit the model
            and a schedule the run is checked when it is trained.
    """
    return make_run(load_recipe(name).merge(flatten(settings, "the settings")))


def train(
    run: RunConfig, ds_config: str = "zero2", hooks: Iterable[Callable[[Session], Hook]] = ()
) -> SavedRun:
    """Train *run* to its last step, or continue it there, and print what the command prints.

    To be called by every rank. A request to stop (Ctrl-C, SIGTERM, SIGUSR1) saves first; outside the main
    thread signals go to the program's own handlers.

    The process is left as it was, however the call ends: environment, signal handlers, warning filters, log
    levels, random generators and settings of torch are put back, threads are ended, and the process group is
    destroyed, unless it was there before. It may be called again, with any other settings. What stays is the
    libraries that it has imported, and on a CPU that glibc keeps freed memory (``keep_freed_memory``).

    Args:
        run: the settings, from ``recipe`` or RunConfig.
        ds_config: a DeepSpeed configuration: a file, or the name of one in ds_configs/.
        hooks: called with the session, each gives a Hook (pretrain/run/hooks.py): a class that takes a
            session will do. They come after those of ``run.hooks``, and a continued run needs them again.

    Returns:
        The newest checkpoint, opened for reading. ``.load_model()`` is the network with its weights,
        ``.tokenizer`` its tokenizer, ``.run_folder`` where everything is.

    Raises:
        UserError: bad input, a folder that cannot be used, a checkpoint that cannot be written.
        KeyboardInterrupt: Ctrl-C, after everything is saved.
        Stopped: another request to stop, after everything is saved. A program that does not catch it ends
            with its exit code, 75, after which slurm/launch.sh starts the job again.
    """
    try:
        with contextlib.ExitStack() as undo:
            undo.enter_context(claim_process())
            undo.enter_context(preserve_environment())
            listener = StopListener()
            undo.callback(listener.close)
            listener.limit(run.interruption.agreement_seconds, run.interruption.minutes)
            with listener.raising():
                check_environment()
                # What a library sets when it is imported stays; what this call sets does not.
                from pretrain.engine.patches import preserve_libraries

                undo.enter_context(preserve_libraries())
                undo.enter_context(preserve_interpreter())
                undo.enter_context(preserve_torch())
                checked = check_run(run, find_ds_config(ds_config))
                from pretrain.assembly.preflight import check_start
                from pretrain.run.saved import SavedRun

                check_start(run)
            folder = run.folder
            again = ["--config", str(folder / "config.yaml"), "--ds_config", str(folder / "ds_config.json")]
            train_to_end(run, checked, listener, again, hooks, process_ends=False)
    except Stopped as stopped:
        if stopped.exit_code == INTERRUPTED:
            raise KeyboardInterrupt(stopped.reason) from stopped
        raise
    # After the last step, when there was nothing left to stop.
    if listener.exit_code == INTERRUPTED:
        raise KeyboardInterrupt(listener.reason)
    if listener.signalled:
        raise Stopped(listener.reason or "")
    return SavedRun.open(folder)


def check_run(run: RunConfig, ds_config: str) -> dict[str, Any]:
    """The ds_config in a file, in which no setting contradicts another or the run's.

    Raises:
        UserError: what is set in the environment, the model, the ds_config, or both together.
    """
    check_environment()
    if run.checkpoint.mirror is not None:
        from pretrain.mirror.copies import fetch_initial_model

        fetch_initial_model(run)
    run.build_model_config()  # an unknown preset, or heads that do not divide
    from pretrain.engine.ds_config import check_against_run
    from pretrain.engine.ds_config_check import read_ds_config

    checked = read_ds_config(ds_config)
    check_against_run(checked, run)
    return checked


def train_to_end(
    run: RunConfig,
    ds_config: dict[str, Any],
    listener: StopListener,
    arguments: list[str],
    hooks: Iterable[Callable[[Session], Hook]] = (),
    process_ends: bool = True,
    verbose: bool = False,
) -> None:
    """Train to the last step of *run*, and print what is done. Collective.

    Args:
        ds_config: what check_run returned.
        arguments: of a command that would continue the run.
        hooks: see train.
        process_ends: whether the process ends after this. Else the engine is let go, and threads are ended.
        verbose: print all opening lines.

    Raises:
        UserError: as open_run and Trainer.fit.
        Stopped: *listener* was asked to stop; what was trained is saved.
    """
    with listener.raising():
        if environment_rank() == 0 and "deepspeed" not in sys.modules:
            print_lines(log_line("start", "loading PyTorch and DeepSpeed, which takes some seconds"))
        # DeepSpeed's own calls; nothing a user of this program could change.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        from pretrain.engine.deepspeed_logging import quiet_deepspeed

        quiet_deepspeed()  # before the modules below import it
        from pretrain.assembly.open_run import FinishedRun, open_run
        from pretrain.report import describe_closing, describe_finished

    with open_run(run, ds_config, listener, hooks, verbose=verbose) as opened:
        world = opened.session.world
        if isinstance(opened, FinishedRun):
            if world.is_main:
                world.print_rank_zero(*describe_finished(opened.session, arguments, opened.notes))
            if run.checkpoint.mirror:  # what its last session did not copy
                from pretrain.mirror.hook import MirrorHook

                mirror = MirrorHook(opened.session)
                mirror.begin(world.print_rank_zero)
                world.print_rank_zero(*mirror.end(lambda: listener.reason is not None))
            return
        try:
            opened.fit()
            world.print_rank_zero(*describe_closing(opened, arguments))
        finally:
            if process_ends:
                opened.close_hooks()
            else:
                opened.close()
