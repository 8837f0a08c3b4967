"""Opens a session of a run: joins the ranks, opens the data, and finds the checkpoint to continue from.

No model is built yet, and nothing is written. ``open_session`` does it all for main.py; ``build_session`` is the part
that needs no lock, for tests and benchmarks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError
from model.parallel_plan import check_tensor_parallel
from pretrain.checkpoint.reshard import check_readable
from pretrain.checkpoint.state import TrainingState, has_engine_files
from pretrain.checkpoint.store import CheckpointStore
from pretrain.config.run_config import RunConfig
from pretrain.data.labelled import LabelledSequences
from pretrain.data.sequences import TrainingSequences
from pretrain.diagnostics.in_loop import Diagnostics
from pretrain.diagnostics.maturity import Maturity
from pretrain.engine.batch import BatchPlan
from pretrain.engine.compiling import decide_attention, decide_compile, decide_fused
from pretrain.engine.ds_config import EngineSettings, merge_ds_config, resolve_bf16
from pretrain.engine.patches import prepare_deepspeed
from pretrain.evaluation.hooks import AccuracyHook, EvaluationHook, ValidationHook
from pretrain.growth.controller import GrowthState
from pretrain.growth.edit import checkpoint_of
from pretrain.growth.hook import Growth, KeptGrowth
from pretrain.growth.models import (
    check_every_split,
    check_kept_heads,
    continued_model,
    head_group_sizes_of,
    largest_model,
)
from pretrain.optim.groups import GroupRates, run_groups
from pretrain.plan.micro_batch import device_memory, plan_batch
from pretrain.run.context import RunContext
from pretrain.run.data import RunData, open_data
from pretrain.run.hooks import Hook
from pretrain.run.lock import RunLocks
from pretrain.run.resume import check_resume, regrouped, shape_change
from pretrain.runtime.same_code import check_agreement, code_hash
from pretrain.runtime.signals import StopListener
from pretrain.runtime.world import COLLECTIVE_TIMEOUT, World, start_world

Batch = list[Tensor]
"""Inputs and labels of a micro-batch, int64 [B, T] each; with a document mask also where documents begin."""
# Settings of zero_optimization that decide where in a rank's files a parameter lies.
PARTITIONING = ("round_robin_gradients", "parameter_alignment", "sub_group_size")


@dataclass(kw_only=True)
class Session(RunContext):
    """A run, and how this session continues it."""

    ds_config: dict[str, Any]
    """Complete: every "auto" is filled in."""
    dtype_reason: str
    """Why the model computes in bf16 or fp32, in a phrase."""
    compile_reason: str
    """Why the model is compiled or not, in a phrase."""
    sequences: TrainingSequences | LabelledSequences
    store: CheckpointStore
    state: TrainingState
    """Where the run stands; the trainer moves it on."""
    resumed_from: Path | None
    """The checkpoint that the session goes on from."""
    reshape: bool
    """Whether that checkpoint's files are of another shape, and are read parameter by parameter."""
    notes: list[str]
    """What the user should know about the resume, a line each."""
    hooks: list[Hook] = dataclasses.field(default_factory=list)
    """The hooks of the training loop, in the order in which they are called; empty in a run that is finished."""

    @property
    def finished(self) -> bool:
        """Whether the run has all its steps, and everything that was due at the last."""
        return self.state.step >= self.run.steps and not self.state.pending

    @property
    def validation(self) -> ValidationHook | AccuracyHook | None:
        """The run's validation, if it has one."""
        return next((hook for hook in self.hooks if isinstance(hook, ValidationHook | AccuracyHook)), None)

    def micro_batch(self, seen: int, index: int) -> Batch:
        """This rank's *index*-th micro-batch after *seen* sequences of the run, as Transformer.forward takes it.

        A function of the number of sequences, so neither ranks nor restarts change the order.
        """
        B = self.batch.micro_batch
        first = seen + (index * self.batch.data_parallel + self.world.data_rank) * B
        inputs_and_labels = self.sequences.inputs_and_labels(first, B)
        batch = [torch.from_numpy(part).contiguous() for part in inputs_and_labels]
        if self.run.document_mask:
            assert isinstance(self.sequences, TrainingSequences)
            batch.append(torch.from_numpy(self.sequences.document_offsets(first, B)))
        return [tensor.pin_memory() for tensor in batch] if self.world.device.type == "cuda" else batch


@contextlib.contextmanager
def open_session(run: RunConfig, ds_config: dict[str, Any], listener: StopListener) -> Iterator[Session]:
    """Join the ranks and open the run for this job alone. Inside, no other job can use the run's folder. Collective.

    A finished run is opened, too, but its folder does not change.

    Args:
        ds_config: what read_ds_config returned.
        listener: may be asked to stop at any time while the session is opened.

    Raises:
        UserError: anything in the configuration or the run folder that cannot be used, nodes that differ, a folder
            that another job uses. Nothing has been written then.
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
            head_group_sizes_of(run),
        )
        check_agreement(world, run.to_yaml())
        locks = RunLocks(run.folder, world)
    with locks:
        with listener.at_once():
            locks.take_existing()
            session = build_session(run, ds_config, open_data(run, world.say, world), world)
            if not session.finished:
                locks.take()
        yield session


def build_session(run: RunConfig, ds_config: dict[str, Any], data: RunData, world: World) -> Session:
    """Decide how *run* begins or continues in this *world*. Collective.

    Args:
        ds_config: contents of the ds_config file, its "auto" values still in place.
        data: the run's corpora.

    Raises:
        UserError: anything in the configuration or the run folder that cannot be used. Nothing has been written then.
    """
    store = CheckpointStore(run.folder, run.checkpoint, world)
    newest = store.newest_valid()
    folder, saved, damaged = newest or (None, TrainingState(), [])
    classes = len(data.classes) if data.classes else None
    saved_model, model = continued_model(
        run.build_model_config(data.tokenizer.vocab_size, classes), saved, run.growth.active
    )
    check_kept_heads(run, saved, model)
    rates = GroupRates(run_groups(run, model), run)
    largest = largest_model(run, model)
    check_tensor_parallel(model, world.tensor_parallel, sequence_parallel=world.grid.sequence_parallel)
    sequences = data.training_sequences(model.context_length, run.seed)
    bf16, dtype_reason = resolve_bf16(run, ds_config, world.device)
    if folder and run.resume == "never":
        raise UserError(
            f"resume: {run.folder} already holds a checkpoint ({folder.name}); give --name for a new run, "
            "or --resume auto to continue it"
        )
    world = _keep_threads(world, run, saved)
    stage = ds_config["zero_optimization"]["stage"]
    compiled, compile_reason = decide_compile(
        run, model, stage, world.device, world.data_parallel, saved.run, saved.world.get("device")
    )
    fused = decide_fused(run.fused, stage, world.device.type, compiled, saved.run)
    attention = decide_attention(run.attention, world.device.type, bf16, model.context_length, saved.run)
    run = dataclasses.replace(run, compile=compiled, fused=fused, attention=attention)
    batch = _plan_batch(run, largest, saved, world, EngineSettings.of(run, ds_config, bf16, largest))
    check_every_split(run, model, batch.micro_batch)
    ds_config = merge_ds_config(ds_config, run, batch, bf16, largest)
    identity: dict[str, Any] = {
        "run": run.to_dict(),
        "model": model.to_json(),
        "data": data.fingerprint(),
        "world": _world_record(world, ds_config, bf16, saved),
        "micro_batch": batch.micro_batch,
    }
    notes, reshape = [], False
    if folder:
        notes = [f"{line}; continuing from {folder.name}" for line in damaged]
        tokenizers = (folder / "tokenizer", data.tokenizer)
        notes += check_resume(saved, run, saved_model, identity["data"], identity["world"], tokenizers)
        other_shape = shape_change(saved.world, identity["world"]) or regrouped(saved, run, model)
        reshape = other_shape is not None or not has_engine_files(folder) or model != saved_model
        if reshape:
            check_readable(folder, world, checkpoint_of)
        if not saved.run:
            identity |= {"from_seed": False, "imported": True}  # a model that was made elsewhere
    session = Session(
        run=run,
        model=model,
        data=data,
        world=world,
        batch=batch,
        rates=rates,
        bf16=bf16,
        ds_config=ds_config,
        dtype_reason=dtype_reason,
        compile_reason=compile_reason,
        sequences=sequences,
        store=store,
        # The settings may have changed, so a run that had stopped learning gets a new chance.
        state=dataclasses.replace(saved, skipped_in_a_row=0, **identity),
        resumed_from=folder,
        reshape=reshape,
        notes=notes,
    )
    if not session.finished:
        session.hooks = _build_hooks(session)
    return session


def _build_hooks(session: Session) -> list[Hook]:
    """The hooks that the configuration asks for, in the order in which they are called."""
    run = session.run
    hooks: list[Hook] = [Maturity(session)]
    if run.validation.every:
        hooks.append(AccuracyHook(session) if session.data.labelled else ValidationHook(session))
    if run.evaluation.every:
        hooks.append(EvaluationHook(session))
    diagnostics = Diagnostics(session)
    session.notes += diagnostics.notes
    hooks.append(diagnostics)
    if run.growth.active:  # the last: the others measure the model that the step has trained
        growth = Growth(session, lambda seen: session.micro_batch(seen, 0))
        session.notes += growth.notes
        hooks.append(growth)
        # Written down before the first check: a run that goes on without growth keeps the heads that it has.
        session.state.growth = session.state.growth or GrowthState.begin(session.model.heads).to_json()
    elif session.state.growth:
        hooks.append(KeptGrowth())
    return hooks


def _plan_batch(
    run: RunConfig, model: ModelConfig, saved: TrainingState, world: World, settings: EngineSettings
) -> BatchPlan:
    """The batch plan of all ranks, which the smallest device decides. Collective.

    A micro-batch chosen by an earlier session is kept, so that its numbers go on; unless it was chosen for another
    tensor-parallel degree, or does not divide what a rank has per step now.

    Raises:
        UserError: see plan_batch; or the ranks do not come to the same plan.
    """
    memory = min(world.gather(device_memory(world.device, world.local_size)))
    per_rank = run.global_batch_tokens // model.context_length // world.data_parallel
    same_degree = saved.world.get("tensor_parallel", 1) == world.tensor_parallel
    fits = bool(saved.micro_batch) and same_degree and per_rank % saved.micro_batch == 0
    batch = plan_batch(
        run.global_batch_tokens,
        run.micro_batch or (saved.micro_batch if fits else None),
        model,
        world.data_parallel,
        memory,
        world.device.type,
        world.tensor_parallel,
        settings,
    )
    plans = world.gather(batch)
    for rank, other in enumerate(plans):
        if other != plans[0]:
            raise UserError(
                f"micro_batch: rank 0 would take {plans[0].micro_batch} sequences at a time and rank {rank} "
                f"{other.micro_batch}; give one for all with --micro_batch"
            )
    return batch


def _world_record(
    world: World, ds_config: dict[str, Any], bf16: bool, saved: TrainingState
) -> dict[str, Any]:
    """The settings that a checkpoint's files, and the bits of its numbers, depend on; every code that took part."""
    zero = ds_config["zero_optimization"]
    code, now = list(saved.world.get("code", [])), code_hash()
    return world.record() | {
        "stage": zero["stage"],
        "dtype": "bf16" if bf16 else "fp32",
        "code": code if code[-1:] == [now] else [*code, now],
        "offload": (zero.get("offload_optimizer") or {}).get("device", "none"),
        "partitioning": {key: zero[key] for key in PARTITIONING if key in zero},
    }


def _keep_threads(world: World, run: RunConfig, saved: TrainingState) -> World:
    """Keep the thread count a CPU run was started with, unless the user sets another: the bits depend on it.

    With another number of ranks they differ anyway, and the cores are shared anew.
    """
    threads = saved.world.get("threads")
    user_set_threads = run.threads is not None or "OMP_NUM_THREADS" in os.environ
    if saved.world.get("ranks") != world.size:
        return world
    if user_set_threads or threads in (None, world.threads) or world.device.type != "cpu":
        return world
    torch.set_num_threads(threads)
    return dataclasses.replace(world, threads=threads)
