"""The training loop. Read from top to bottom: set up, resume, train, save."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError
from model.parallel_plan import check_tensor_parallel
from model.process_grid import grid
from pretrain.batch import BatchPlan, device_memory, plan_batch
from pretrain.checkpoint import CheckpointStore, TrainingState, has_engine_files, read_features
from pretrain.config import RunConfig
from pretrain.data.prefetch import BatchPrefetcher
from pretrain.diagnostics.in_loop import Diagnostics
from pretrain.engine import build_engine, merge_ds_config, resolve_bf16
from pretrain.footprint import EngineSettings
from pretrain.generate import generate
from pretrain.maturity import Maturity
from pretrain.metrics import Metrics
from pretrain.optimizer import GroupRates, run_groups
from pretrain.reshard import check_readable, load_resharded
from pretrain.resume import check_resume, regrouped, shape_change
from pretrain.run_folder import RunData, prepare_run_folder
from pretrain.step_log import StepLog
from pretrain.validation import Validation, ValidationResult
from pretrain.world import World

if TYPE_CHECKING:
    from pretrain.in_loop_evaluation import InLoopEvaluation

Batch = tuple[Tensor, Tensor]
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
        self.result: ValidationResult | None = None
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
        self.notes += self.diagnostics.notes
        self.evaluation = None if self.finished else self._evaluation()

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
            "offload": zero.get("offload_optimizer", {}).get("device", "none"),
            "partitioning": {key: zero[key] for key in PARTITIONING if key in zero},
        }

    @property
    def finished(self) -> bool:
        """Whether the run has all its steps."""
        return self.state.step >= self.run.steps

    @property
    def tokens_per_step(self) -> int:
        """Label tokens of all ranks in one optimizer step."""
        return self.plan.sequences * self.model_config.context_length

    def fit(self, metrics: Metrics) -> Any:
        """Train to the last step, validating and saving on the way. Collective.

        Returns:
            The engine, which holds the trained model.

        Raises:
            UserError: a checkpoint could not be written, or too many updates in a row were skipped.
        """
        run, state = self.run, self.state
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
        validation = self._validation()
        log = StepLog(metrics, self.world, self.tokens_per_step, state.seconds)
        base = state.sequences
        engine.train()

        with BatchPrefetcher(lambda index: self._micro_batch(base, index), start=0) as batches:
            while not self.finished:
                with metrics.pause():
                    early = self._before_step(engine, metrics)
                rates = self.rates.write(engine.optimizer, state.step, state.released)
                loss = self._forward_backward(engine, batches)
                self._count(applied=engine.was_step_applied())
                row: dict[str, Any] = {"tokens": state.tokens, "skipped": state.skipped}
                row |= {f"lr/{name}": rate for name, rate in rates.items()} | early
                log.add(state.step, loss, engine.get_global_grad_norm(), row)
                if state.skipped_in_a_row >= run.max_skipped_steps:
                    log.flush()
                    raise UserError(self._too_many_skips())

                if validation and self._due(run.validation.every):
                    with metrics.pause():
                        self.result = validation.run(engine)
                    log.flush({"val_loss": self.result.loss, "val_bpb": self.result.bpb})
                elif self._due(run.logging.every):
                    log.flush()
                if self.diagnostics.due(state.step):
                    log.flush()
                    with metrics.pause():
                        figures = self.diagnostics.measure(engine, state)
                    metrics.log(state.step, figures)
                if self.evaluation and self._due(run.evaluation.every):
                    log.flush()
                    with metrics.pause():
                        scores = self.evaluation.run(engine)
                    metrics.log(state.step, scores.figures)
                    metrics.message(f"scores   step {state.step:,}: {scores}")
                if self._due(run.checkpoint.every):
                    log.flush()
                    state.seconds = log.seconds
                    features = self.maturity.features() | self.diagnostics.features()
                    with metrics.pause():
                        self.store.save(engine, state, run.folder / "tokenizer", features)
            self.data_share = batches.wait_seconds / max(metrics.throughput.seconds, 1e-9)
        return engine

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
        return self.finished or (every > 0 and self.state.step % every == 0)

    def _micro_batch(self, base: int, index: int) -> Batch:
        """This rank's *index*-th micro-batch of the session: inputs and labels, int64 [B, T] each.

        A function of the number of sequences consumed before (*base*), so neither ranks nor restarts change the order.
        """
        B, ranks = self.plan.micro_batch, self.plan.data_parallel
        rows = self.sequences.batch(base + (index * ranks + self.world.data_rank) * B, B)
        tokens = torch.from_numpy(rows)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self.world.device.type == "cuda":
            inputs, labels = inputs.pin_memory(), labels.pin_memory()
        return inputs, labels

    def _forward_backward(self, engine: Any, batches: BatchPrefetcher[Batch]) -> Tensor:
        """One optimizer step's micro-batches; DeepSpeed updates the weights after the last.

        Returns:
            This rank's mean loss, on the device.
        """
        total = torch.zeros((), device=self.world.device)
        for _ in range(self.plan.accumulation):
            inputs, labels = next(batches)
            loss = engine(
                inputs.to(self.world.device, non_blocking=True),
                labels.to(self.world.device, non_blocking=True),
            )
            total += loss.detach().float()
            # 1 + 0 * loss is exactly 1 for a finite loss and NaN for any other: a bad loss makes every gradient NaN,
            # and DeepSpeed skips the update on all ranks, without this rank having to look at the loss.
            engine.backward(loss * (1 + 0 * loss.detach()))
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
            f"loss or gradient, up to step {self.state.step}; {kept}; a lower learning rate may help"
        )

    def _validation(self) -> Validation | None:
        if not self.run.validation.every:
            return None
        windows, label_bytes = self.data.validation_windows(
            self.model_config.context_length, self.run.validation.sequences
        )
        return Validation(windows, label_bytes, self.plan.micro_batch, self.world)

    def _evaluation(self) -> InLoopEvaluation | None:
        if not self.run.evaluation.every:
            return None
        from pretrain.in_loop_evaluation import InLoopEvaluation  # lm-eval takes seconds to import

        T = self.model_config.context_length
        return InLoopEvaluation(
            self.run.evaluation, self.data.tokenizer, T, self.plan.micro_batch * T, self.world
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
