"""The training loop. Read from top to bottom: set up, resume, train, save."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError
from model.parallel_plan import check_tensor_parallel
from model.process_grid import grid
from pretrain.checkpoint.reshard import check_readable, load_resharded
from pretrain.checkpoint.state import TrainingState, has_engine_files, read_features
from pretrain.checkpoint.store import CheckpointStore
from pretrain.config.run_config import RunConfig
from pretrain.data.loader import BatchPrefetcher
from pretrain.diagnostics.in_loop import Diagnostics
from pretrain.diagnostics.maturity import Maturity
from pretrain.engine.batch import BatchPlan
from pretrain.engine.build import build_engine
from pretrain.engine.ds_config import EngineSettings, merge_ds_config, resolve_bf16
from pretrain.generate import generate
from pretrain.measurements import Measurements
from pretrain.metrics.session import Metrics
from pretrain.metrics.step_log import StepLog
from pretrain.optim.groups import GroupRates, run_groups
from pretrain.optim.spikes import SpikeGuard, global_loss
from pretrain.plan.micro_batch import device_memory, plan_batch
from pretrain.run.data import RunData
from pretrain.run.folder import prepare_run_folder
from pretrain.run.resume import check_resume, regrouped, shape_change
from pretrain.runtime.control import Control
from pretrain.runtime.world import World

Batch = list[Tensor]
# Settings of zero_optimization that decide where in a rank's files a parameter lies.
PARTITIONING = ("round_robin_gradients", "parameter_alignment", "sub_group_size")


class Trainer:
    """One session of a run: from a checked configuration to a trained, saved model.

    Args:
        run: the run's configuration.
        ds_config: contents of the ds_config file, its "auto" values still in place.
        data: the run's corpora.
        world: this process among the others.

    Raises:
        UserError: anything in the configuration or the run folder that cannot be used. Nothing has been written then.
    """

    def __init__(self, run: RunConfig, ds_config: dict[str, Any], data: RunData, world: World) -> None:
        self.run, self.data, self.world = run, data, world
        self.model_config: ModelConfig = run.build_model_config(data.tokenizer.vocab_size)
        self.rates = GroupRates(run_groups(run, self.model_config), run)
        check_tensor_parallel(
            self.model_config, world.tensor_parallel, sequence_parallel=grid().sequence_parallel
        )
        self.sequences = data.training_sequences(self.model_config.context_length, run.seed)
        self.bf16, self.dtype_reason = resolve_bf16(run, ds_config, world.device)
        self.store = CheckpointStore(run.folder, run.checkpoint, world)
        self.guard = SpikeGuard(0)
        self.data_share = 0.0

        found = self.store.newest_sound()
        if found and run.resume == "never":
            raise UserError(
                f"resume: {run.folder} already holds a checkpoint ({found[0].name}); give --name for a new run, "
                "or --resume auto to continue it"
            )
        self.resumed_from: Path | None = found[0] if found else None
        saved = found[1] if found else TrainingState()
        self.world = world = _keep_threads(world, run, saved)
        self.plan = self._plan(saved, EngineSettings.of(run, ds_config, self.bf16))
        self.ds_config = merge_ds_config(ds_config, run, self.plan, self.bf16)
        identity: dict[str, Any] = {
            "run": run.to_dict(),
            "model": self.model_config.to_json(),
            "data": data.fingerprint(),
            "world": self._world_record(),
            "micro_batch": self.plan.micro_batch,
        }
        self.notes = [f"{line}; continuing from {found[0].name}" for line in found[2]] if found else []
        self.reshape = False
        if found:
            self.notes += check_resume(saved, run, self.model_config, identity["data"], identity["world"])
            changed = shape_change(saved.world, identity["world"]) is not None
            changed = changed or regrouped(saved, run, self.model_config) is not None
            self.reshape = changed or not has_engine_files(found[0])
            if self.reshape:
                check_readable(found[0], world)
        if found and not saved.run:
            identity["from_seed"] = False  # a model that was made elsewhere
        self.state = dataclasses.replace(saved, **identity)
        self.maturity = Maturity(run, self.model_config, data, self.plan, world, self.rates)
        self.diagnostics = Diagnostics(run, self.model_config, data, self.plan, world, self.rates, self.bf16)
        if not self.finished:
            self.measurements = Measurements(run, self.model_config, data, self.plan, world, self.diagnostics)
        self.notes += self.diagnostics.notes

    def _plan(self, saved: TrainingState, settings: EngineSettings) -> BatchPlan:
        """The batch plan; a micro-batch chosen by an earlier session is kept, so that its numbers go on.

        Unless it was chosen for another tensor-parallel degree, or does not divide what a rank has per step now.
        """
        sequences = self.run.global_batch_tokens // self.model_config.context_length
        per_rank = sequences // self.world.data_parallel
        same_degree = saved.world.get("tensor_parallel", 1) == self.world.tensor_parallel
        fits = bool(saved.micro_batch) and same_degree and per_rank % saved.micro_batch == 0
        return plan_batch(
            self.run.global_batch_tokens,
            self.run.micro_batch or (saved.micro_batch if fits else None),
            self.model_config,
            self.world.data_parallel,
            device_memory(self.world.device, self.world.local_size),
            self.world.device.type,
            self.world.tensor_parallel,
            settings,
        )

    def _world_record(self) -> dict[str, Any]:
        zero = self.ds_config["zero_optimization"]
        return self.world.record() | {
            "stage": zero["stage"],
            "dtype": "bf16" if self.bf16 else "fp32",
            "offload": (zero.get("offload_optimizer") or {}).get("device", "none"),
            "partitioning": {key: zero[key] for key in PARTITIONING if key in zero},
        }

    @property
    def finished(self) -> bool:
        """Whether the run has all its steps, and everything that was due at the last."""
        return self.state.step >= self.run.steps and not self.state.owed

    @property
    def tokens_per_step(self) -> int:
        """Label tokens of all ranks in one optimizer step."""
        return self.plan.sequences * self.model_config.context_length

    def fit(self, metrics: Metrics, control: Control | None = None) -> Any:
        """Train to the last step, validating and saving on the way. Collective.

        Args:
            control: what may ask the session to stop; without it nothing does.

        Returns:
            The engine, which holds the trained model.

        Raises:
            UserError: a checkpoint could not be written, or too many updates in a row were skipped.
            Stopped: the session was asked to stop; a checkpoint of its last step was written.
        """
        run, state = self.run, self.state
        control = control or Control(self.world)
        prepare_run_folder(run, self.data, self.ds_config, self.world)
        engine = build_engine(run, self.model_config, self.ds_config, self.world.device)
        if self.resumed_from and self.reshape:
            load_resharded(engine, self.resumed_from, self.world, self.world.say)
        elif self.resumed_from:
            self.store.load(engine, self.resumed_from)
        if self.resumed_from:
            features = read_features(self.resumed_from)
            self.maturity.restore(features)
            self.diagnostics.restore(features)
        log = StepLog(metrics, self.world, self.tokens_per_step, state.seconds, state.step)
        self.guard = guard = SpikeGuard(run.skip_spikes, **state.recent)
        base = state.sequences
        engine.train()

        with (
            BatchPrefetcher(lambda index: self._micro_batch(base, index), start=0) as batches,
            guard.installed(),
        ):
            stop = 0
            if state.owed:
                stop = self.measurements.run(engine, state, metrics, log, control)
                if self.finished:  # or every session to come would find the same still owed
                    self._save(engine, metrics, log, control)
            while not (stop or self.finished):
                control.beat(f"step {state.step + 1}")
                with metrics.pause():
                    early = self._before_step(engine, metrics)
                control.cast(self.store.writing)
                rates = self.rates.write(engine.optimizer, state.step, state.released)
                loss = self._forward_backward(engine, batches)
                self._count(applied=engine.was_step_applied())
                state.spikes += guard.reason is not None
                row: dict[str, Any] = {"tokens": state.tokens, "skipped": state.skipped}
                row |= {f"lr/{name}": rate for name, rate in rates.items()} | early
                log.add(state.step, loss, guard.norm if guard.reason else engine.get_global_grad_norm(), row)
                if guard.reason:
                    metrics.message(f"spike    step {state.step:,}: update skipped; {guard.reason}")
                if state.skipped_in_a_row >= run.max_skipped_steps:
                    log.flush()
                    self.store.finish()
                    raise UserError(self._too_many_skips())
                stop, writing = control.read()
                if self.store.under_way and not writing:
                    with metrics.pause():
                        self.store.finish()

                state.owed = due = self.measurements.due(state.step)
                stop = stop or self.measurements.run(engine, state, metrics, log, control)
                if not due and self._due(run.logging.every):
                    log.flush()
                if stop or self._due(run.checkpoint.every):
                    log.flush()
                    self._save(engine, metrics, log, control)
            self.data_share = batches.wait_seconds / max(metrics.throughput.seconds, 1e-9)
            control.beat("finishing the last checkpoint")
            self.store.finish()
            if stop:
                raise control.stopped(stop)
        return engine

    def _save(self, engine: Any, metrics: Metrics, log: StepLog, control: Control) -> None:
        """Begin a checkpoint of this step. Collective."""
        run, state = self.run, self.state
        state.seconds, state.recent = log.seconds, self.guard.recent()
        features = self.maturity.features() | self.diagnostics.features()
        with metrics.pause():
            control.beat(f"saving step {state.step}")
            self.store.begin(engine, state, run.folder / "tokenizer", features, run.checkpoint.background)
            if not run.checkpoint.background:
                self.store.finish()

    def _before_step(self, engine: Any, metrics: Metrics) -> dict[str, float]:
        """Release rules whose time has come, and keep the weights they are released at. Collective.

        Returns:
            Figures of a probe, if there was one.
        """
        early, lines = self.maturity.before_step(engine, self.state)
        kept = self.diagnostics.before_step(engine, self.state)
        for line in [*lines, *([kept] if kept else [])]:
            metrics.message(line)
        return early

    def _due(self, every: int) -> bool:
        """Whether something done every so many steps (0: at the last only) is to be done now."""
        return self.state.step >= self.run.steps or (every > 0 and self.state.step % every == 0)

    def _micro_batch(self, base: int, index: int) -> Batch:
        """This rank's *index*-th micro-batch of the session: inputs and labels, int64 [B, T] each.

        With a document mask also where documents begin, as Transformer.forward takes it. A function of the number of
        sequences consumed before (*base*), so neither ranks nor restarts change the order.
        """
        B, ranks = self.plan.micro_batch, self.plan.data_parallel
        first = base + (index * ranks + self.world.data_rank) * B
        tokens = torch.from_numpy(self.sequences.batch(first, B))
        batch = [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]
        if self.run.document_mask:
            batch.append(torch.from_numpy(self.sequences.document_offsets(first, B)))
        return [tensor.pin_memory() for tensor in batch] if self.world.device.type == "cuda" else batch

    def _forward_backward(self, engine: Any, batches: BatchPrefetcher[Batch]) -> Tensor:
        """One optimizer step's micro-batches; DeepSpeed updates the weights after the last.

        Returns:
            This rank's mean loss, on the device.
        """
        total = torch.zeros((), device=self.world.device)
        for micro in range(self.plan.accumulation):
            batch = next(batches)
            loss = engine(*(tensor.to(self.world.device, non_blocking=True) for tensor in batch))
            total += loss.detach().float()
            # 1 + 0 * loss is exactly 1 for a finite loss and NaN for any other: a bad loss makes every gradient NaN,
            # and DeepSpeed skips the update on all ranks, without this rank having to look at the loss.
            engine.backward(loss * (1 + 0 * loss.detach()))
            if self.guard.sigmas and micro == self.plan.accumulation - 1:
                self.guard.expect(global_loss(total / self.plan.accumulation, self.world))
            engine.step()
        return total / self.plan.accumulation

    def _count(self, applied: bool) -> None:
        """Move the state past one attempted step. Data and learning rate go on even if the update was skipped."""
        state = self.state
        state.step += 1
        state.sequences += self.plan.sequences
        state.tokens += self.tokens_per_step
        state.skipped += not applied
        state.skipped_in_a_row = 0 if applied else state.skipped_in_a_row + 1

    def _too_many_skips(self) -> str:
        steps = self.store.steps()
        kept = f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no checkpoint yet"
        return (
            f"max_skipped_steps: {self.state.skipped_in_a_row} updates in a row were skipped for a non-finite "
            f"loss or gradient, or as spikes, up to step {self.state.step}; {kept}; a lower learning rate may help"
        )

    def sample(self, engine: Any, tokens: int = 96) -> str:
        """A document the trained model makes up from nothing (temperature 0.8, top-p 0.95). Collective."""
        engine.eval()
        # Every length is another shape; compiling each would take longer than sampling.
        with torch.compiler.set_stance("force_eager" if self.run.compile else "default"):
            ids = generate(
                engine,
                [self.data.tokenizer.end_of_document],
                min(tokens, self.model_config.context_length),
                self.model_config.context_length,
                temperature=0.8,
                top_p=0.95,
                seed=self.run.seed,
                device=self.world.device,
            )
        return self.data.tokenizer.decode(ids)


def _keep_threads(world: World, run: RunConfig, saved: TrainingState) -> World:
    """The thread count a CPU run was started with, unless the user asks for another: the bits depend on it.

    With another number of ranks they differ anyway, and the cores are shared anew.
    """
    threads = saved.world.get("threads")
    asked = run.threads is not None or "OMP_NUM_THREADS" in os.environ
    if saved.world.get("ranks") != world.size:
        return world
    if asked or threads in (None, world.threads) or world.device.type != "cpu":
        return world
    torch.set_num_threads(threads)
    return dataclasses.replace(world, threads=threads)
