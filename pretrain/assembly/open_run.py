"""Opens a run: everything that training consists of is made here, one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from model.errors import MachineError
from pretrain.assembly.data import open_data
from pretrain.assembly.hooks import build_hooks
from pretrain.assembly.loading import find_newest, next_state, plan_loading
from pretrain.assembly.machine import settle_machine
from pretrain.checkpoint.store import CheckpointStore
from pretrain.config.run_config import RunConfig
from pretrain.engine.build import build_engine, build_network, build_run_optimizer
from pretrain.engine.patches import prepare_deepspeed
from pretrain.growth.models import context_head_ranks, continue_model, head_group_sizes
from pretrain.metrics.build import build_metrics
from pretrain.optim.groups import GroupRates, run_groups
from pretrain.report import describe_opening
from pretrain.run.decisions import decide, gather_facts
from pretrain.run.folder import hold_run_folder, may_have_begun, prepare_run_folder
from pretrain.run.hooks import Hook, load_hooks
from pretrain.run.resume import compare_data_names
from pretrain.run.session import Session
from pretrain.runtime.control import Control
from pretrain.runtime.signals import StopListener
from pretrain.runtime.version_check import check_agreement
from pretrain.runtime.watchdog import start_watchdog
from pretrain.runtime.world import collective_timeout, start_world
from pretrain.trainer import Trainer


class FinishedRun(NamedTuple):
    """A run that has all its steps."""

    session: Session
    notes: Sequence[str]
    """On its newest checkpoint, and settings that have changed."""


MakeHook = Callable[[Session], Hook]
"""A class of hooks, or a function: called with the session, it gives a hook."""


@contextlib.contextmanager
def open_run(
    run: RunConfig,
    ds_config: dict[str, Any],
    listener: StopListener,
    hooks: Iterable[MakeHook] = (),
    load_finished: bool = False,
    verbose: bool = False,
) -> Iterator[Trainer | FinishedRun]:
    """Join the ranks, and make everything that training *run* needs. Inside the block no other job can use
    the run's folder. Collective.

    A run that has all its steps is opened without a model, and its folder does not change, unless
    *load_finished* is set.

    Args:
        ds_config: what read_ds_config returned.
        listener: may be asked to stop at any time.
        hooks: of the user's own, after those of the settings.
        verbose: print all opening lines.

    Raises:
        UserError: anything in the configuration or the run folder that cannot be used, nodes that differ, a
            folder that another job uses.
        Stopped: *listener* was asked to stop before training began.
    """
    with contextlib.ExitStack() as held:
        with listener.raising():  # nothing is there to be saved yet
            prepare_deepspeed()
            own_hooks: list[MakeHook] = [*load_hooks(run.hooks), *hooks]
            world = start_world(
                run.threads,
                run.deterministic,
                run.tensor_parallel,
                run.sequence_parallel,
                collective_timeout(run.interruption),
                head_group_sizes(run),
                run.context_parallel,
                context_head_ranks(run),
            )
            check_agreement(world, run.to_yaml())
            if begun := may_have_begun(run, world):  # nothing may be read while another job writes
                hold_run_folder(run, world, held)
            store = CheckpointStore(run.folder, run.checkpoint, world)
            newest = find_newest(run, store)
            compare_data_names(newest.state, run)
            data = open_data(run, world.print_rank_zero, world)
            asked_model = run.build_model_config(**data.model_fields())
            if newest.folder is None and run.init_from is not None:
                from pretrain.assembly.initial_weights import begin_from  # loads transformers

                newest = begin_from(run, asked_model, data.tokenizer, world)
            saved_model, model_config = continue_model(run, asked_model, newest.state)
            rates = GroupRates(run_groups(run, model_config), run)
            decisions = decide(run, ds_config, model_config, newest.state, gather_facts(run, world))
            notes = [*run.unused_settings(), *settle_machine(decisions, world)]
            state = next_state(newest.state, run, decisions, data, world)
            loading = plan_loading(newest, state, run, saved_model, data.tokenizer, world)
            session = Session(
                run=run,
                world=world,
                data=data,
                sequences=data.training_sequences(model_config.context_length, run.seed),
                decisions=decisions,
                model_config=model_config,
                rates=rates,
                state=state,
            )
            finished = session.finished and not load_finished
            all_hooks = [] if finished else build_hooks(session, own_hooks)
            if not begun:
                hold_run_folder(run, world, held)
                if world.broadcast(store.steps()):
                    raise MachineError(
                        f"name: another job has begun {run.folder} meanwhile; the same command continues it"
                    )
        if finished:
            yield FinishedRun(session, loading.notes)
            return
        if world.is_main:
            world.print_rank_zero(
                *describe_opening(session, all_hooks, loading.folder, [*notes, *loading.notes], verbose)
            )
        decided = decisions.to_dict()
        metrics = held.enter_context(build_metrics(run, world, state.step, model_config, decided, verbose))
        watchdog = held.enter_context(start_watchdog(run, world))
        with metrics.pause():
            prepare_run_folder(run, data, decisions, world)
            merged = decisions.ds_config.value
            network = build_network(run, model_config, merged, world.grid, **decisions.kernels())
            optimizer = build_run_optimizer(run, network, merged)
            engine = build_engine(run, network, optimizer, merged, world.grid)
            loading.load(engine, world, state, all_hooks)
        trainer = Trainer(session, engine, store, all_hooks, metrics, Control(world, listener, watchdog))
        del network, optimizer, engine  # the trainer alone holds them: it replaces them when heads change
        yield trainer
