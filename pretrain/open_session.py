"""Opens a session of a run: joins the ranks, opens the data, and finds the checkpoint to continue from.

No model is built yet, and nothing is written. ``open_session`` does it all for main.py; ``build_session`` is
the part that needs no lock, for tests and benchmarks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from model.config import ModelConfig
from model.errors import UserError
from model.parallel_plan import head_group_sizes
from pretrain.checkpoint.loader import check_readable
from pretrain.checkpoint.state import TrainingState, WorldRecord
from pretrain.checkpoint.store import CheckpointStore
from pretrain.config.run_config import RunConfig
from pretrain.engine.patches import prepare_deepspeed
from pretrain.extensions import extensions
from pretrain.optim.groups import GroupRates, run_groups
from pretrain.run.data import RunData, open_data
from pretrain.run.decisions import Decision, Decisions, decide, gather_facts
from pretrain.run.extension import open_checkpoint
from pretrain.run.lock import RunLock
from pretrain.run.resume import (
    IMPORT,
    begins_optimizer_anew,
    check_imported,
    check_records,
    check_resume,
    is_imported,
)
from pretrain.run.session import Session
from pretrain.runtime.same_code import check_agreement, code_hash
from pretrain.runtime.signals import StopListener
from pretrain.runtime.world import COLLECTIVE_TIMEOUT, World, start_world
from pretrain.utils.cache_folders import keep_compiled_code_private, private_cache
from pretrain.utils.variables import check_variables
from pretrain.validation.hook import ValidationHook


@contextlib.contextmanager
def open_session(run: RunConfig, ds_config: dict[str, Any], listener: StopListener) -> Iterator[Session]:
    """Join the ranks and open the run for this job alone. Inside, no other job can use the run's folder.
    Collective.

    A finished run is opened, too, but its folder does not change.

    Args:
        ds_config: what read_ds_config returned.
        listener: may be asked to stop at any time while the session is opened.

    Raises:
        UserError: anything in the configuration or the run folder that cannot be used, nodes that differ, a
            folder that another job uses. Nothing has been written then.
        Stopped: *listener* was asked to stop before the session had begun.
    """
    with listener.at_once():
        prepare_deepspeed()
        # Longer than the watchdog waits, or it could never name the rank that hangs.
        timeout = max(COLLECTIVE_TIMEOUT, timedelta(minutes=run.interruption.hang_minutes + 5))
        world = start_world(
            run.threads,
            run.deterministic,
            run.tensor_parallel,
            run.sequence_parallel,
            timeout,
            _head_group_sizes(run),
        )
        check_agreement(world, run.to_yaml())
    with contextlib.ExitStack() as held:

        def take() -> None:
            held.callback(RunLock(run.folder).release)

        with listener.at_once():
            exists = world.broadcast(os.path.isdir(run.folder))  # noqa: PTH112 — a name may be too long
            # Nothing in it may be read while another job writes, nor fetched from a mirror by two.
            taken = exists or run.checkpoint.mirror is not None
            if taken:
                world.once(take)
            session = build_session(run, ds_config, open_data(run, world.say, world), world)
            if not (taken or session.finished):
                world.once(take)
        yield session


def build_session(run: RunConfig, ds_config: dict[str, Any], data: RunData, world: World) -> Session:
    """Decide how *run* begins or continues in this *world*. Collective.

    Args:
        ds_config: contents of the ds_config file, its "auto" values still in place.
        data: the run's corpora.

    Raises:
        UserError: anything in the configuration or the run folder that cannot be used. Nothing has been
            written then.
    """
    store = CheckpointStore(run.folder, run.checkpoint, world)
    fetched = store.restore_lost() if run.resume == "auto" else []
    folder, saved, damaged = store.newest_valid() or (None, TrainingState(), [])
    if folder and run.resume == "never":
        other = f"import again ({IMPORT} runs/OTHER)" if is_imported(saved) else "give --name for a new run"
        raise UserError(
            f"resume: {run.folder} already holds a checkpoint ({folder.name}); {other}, or --resume auto to "
            "continue it"
        )
    if folder is None:
        check_imported(run)
    check_records(saved, folder)
    held, model = _continued_model(run, run.build_model_config(**data.model_fields()), saved)
    rates = GroupRates(run_groups(run, model.value), run)
    decisions = decide(run, ds_config, model, saved, gather_facts(run, world))
    caches = _settle_caches(decisions, world)
    torch.set_num_threads(decisions.threads.value)
    state = dataclasses.replace(
        saved,
        skipped_in_a_row=0,  # settings may have changed, so a run that had stopped learning gets a new chance
        run=run.to_dict(),
        decided=decisions.decided(),
        model=model.value.to_json(),
        data=data.identity(),
        world=_world_record(world, decisions, saved),
    )
    notes, anew = caches, False
    if folder:
        notes += [f"{line}; continuing from {folder.name}" for line in damaged]
        notes += fetched + check_resume(saved, state, run, held, (folder / "tokenizer", data.tokenizer))
        anew = begins_optimizer_anew(saved, run)
        check_readable(folder, world, open_checkpoint)
        if not saved.run:
            state.from_seed, state.imported = False, True  # a model that was made elsewhere
    session = Session(
        run=run,
        decisions=decisions,
        model=model.value,
        world=world,
        data=data,
        sequences=data.training_sequences(model.value.context_length, run.seed),
        rates=rates,
        store=store,
        state=state,
        resumed_from=folder,
        optimizer_anew=anew,
        notes=notes,
    )
    if not session.finished:
        _add_hooks(session)
    return session


def _settle_caches(decisions: Decisions, world: World) -> list[str]:
    """Where this run keeps compiled code, which only this user may have written; lines about it.

    Raises:
        UserError: a folder that the environment names for it, or for pictures, cannot be used.
    """
    compiled = ("compile", f"compile on {world.device.type}") if decisions.compile.value else ()
    zero = decisions.ds_config.value["zero_optimization"]
    offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    check_variables("plots", *compiled, *["extensions"] * offloads)
    notes = [keep_compiled_code_private()] if compiled else []
    if offloads and "TORCH_EXTENSIONS_DIR" not in os.environ:
        from torch.utils.cpp_extension import get_default_build_root

        folder, note = private_cache(get_default_build_root(), "torch_extensions")
        notes.append(note)
        if note is not None:
            os.environ["TORCH_EXTENSIONS_DIR"] = folder
    return [note for note in notes if note]


def _continued_model(
    run: RunConfig, asked: ModelConfig, saved: TrainingState
) -> tuple[ModelConfig, Decision[ModelConfig]]:
    """The model that a checkpoint must hold, and the one to go on with."""
    for extension in extensions():
        if models := extension.continued_model(run, asked, saved):
            return models[0], Decision(models[1], f"of the checkpoint, by {extension.name}")
    return asked, Decision(asked, "as asked for")


def _head_group_sizes(run: RunConfig) -> set[int]:
    """How many ranks may share heads at any time of the run; see head_group_sizes."""
    t = run.tensor_parallel
    if t > 1 and any(extension.varies_heads(run) for extension in extensions()):
        return {size for size in range(1, t + 1) if t % size == 0}
    return head_group_sizes(run.build_model_config(), t)


def _add_hooks(session: Session) -> None:
    """Add the hooks that the settings ask for, in the order in which they are called."""
    if session.run.validation.every:
        special = (extension.validation(session) for extension in extensions())
        session.hooks.append(next(filter(None, special), None) or ValidationHook(session))
    for extension in extensions():
        session.hooks += extension.hooks(session)


def _world_record(world: World, decisions: Decisions, saved: TrainingState) -> WorldRecord:
    """What a checkpoint's files, and the bits of its numbers, depend on; every code that took part."""
    zero = decisions.ds_config.value["zero_optimization"]
    code, now = saved.world.code if saved.world else [], code_hash()
    return WorldRecord(
        **world.record(),
        threads=decisions.threads.value,
        stage=zero["stage"],
        dtype=decisions.dtype.value,
        code=code if code[-1:] == [now] else [*code, now],
        offload=(zero.get("offload_optimizer") or {}).get("device", "none"),
    )
