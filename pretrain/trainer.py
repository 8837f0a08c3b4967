"""The training loop. Read ``fit`` from top to bottom: step, measure, save until the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.errors import DivergedError
from pretrain.checkpoint.loader import load_checkpoint
from pretrain.checkpoint.store import CheckpointStore
from pretrain.data.hashes import HashCheck, files_seen
from pretrain.data.loader import BatchPrefetcher
from pretrain.engine.build import (
    build_engine,
    build_network,
    build_run_optimizer,
    destroy_engine,
    free_memory,
)
from pretrain.engine.compiling import count_compiled_graphs
from pretrain.engine.patches import guard_updates
from pretrain.growth.edit import note_changed, open_changed
from pretrain.metrics.file import FILE_NAME, read_metrics
from pretrain.metrics.metrics import Metrics
from pretrain.metrics.step_log import StepLog
from pretrain.optim.spikes import SpikeGuard, global_loss
from pretrain.run.hooks import Hook, HookResult, check_result
from pretrain.run.session import Batch, Session
from pretrain.runtime.control import Control
from pretrain.runtime.environment import report_progress
from pretrain.runtime.signals import Stopped
from pretrain.utils.format import log_line


class Trainer:
    """Trains the model of a session.

    Args:
        session: the opened run.
        engine: DeepSpeed's, which holds the model as the last session left it.
        store: the run's checkpoints.
        hooks: in the order in which they are called.
        metrics: where values and messages go.
        control: passes requests to stop.
    """

    def __init__(
        self,
        session: Session,
        engine: Any,
        store: CheckpointStore,
        hooks: Sequence[Hook],
        metrics: Metrics,
        control: Control,
    ) -> None:
        self.session, self.engine, self.store = session, engine, store
        self.hooks, self.metrics, self.control = hooks, metrics, control
        self.run, self.state = session.run, session.state
        self.guard = SpikeGuard(self.run.skip_spikes, **self.state.recent)
        self.log = StepLog(
            metrics, session.world, session.tokens_per_step, self.state.seconds, self.state.step
        )
        self._next_model: ModelConfig | None = None
        self.hashes: Any = None
        """The HashCheck of the corpora, once fit has begun it."""
        self._data_checked = self._stopping = False
        self._saved_step = self.state.step  # the newest, finished
        self._may_prune = True  # once the checkpoint that is under way is finished
        self._earlier_graphs = count_compiled_graphs() if session.decisions.compile.value else 0
        self.graphs = 0
        """Graphs that torch.compile has made so far, as last printed."""
        self.data_share = 0.0
        """Share of the training time that was spent waiting for data."""

    def fit(self) -> Any:
        """Train to the last step, measuring and saving on the way. Collective.

        Returns:
            The engine, which holds the trained model.

        Raises:
            DivergedError: too many updates in a row were skipped.
            UserError: a checkpoint could not be written.
            Stopped: the session was asked to stop; a checkpoint of its last step was written.
        """
        session, run, state, control = self.session, self.run, self.state, self.control
        self.hashes = self._check_hashes()
        for hook in self.hooks:
            hook.begin(self.metrics.message)
        first_sequence = state.sequences
        with (
            BatchPrefetcher(lambda index: session.micro_batch(first_sequence, index), start=0) as batches,
            guard_updates(self.guard),
        ):
            stop: Stopped | None = None
            if state.pending:  # left by a session that was stopped
                stop = self._run_hooks()
                if not stop:
                    # A finished run is saved, or every session to come would find the same still pending.
                    self._save_and_change(stop, due=session.finished)
            while not (stop or session.finished):
                control.heartbeat(f"step {state.step + 1}")
                hook_values = self._before_step()
                control.start_vote(state.step, self.store.writing or self.hashes.running)
                rates = session.rates.write(self.engine.optimizer, state.step, state.released)
                losses = self._forward_backward(batches)
                self._count(applied=self.engine.was_step_applied())
                self._note(losses, rates, hook_values)
                self._check_skipped()
                stop, writing = control.vote_result()
                if not writing and (self.store.under_way or not self._data_checked):
                    with self.metrics.pause():
                        self._finish_checkpoint()
                state.pending = [hook.name for hook in self.hooks if hook.is_due(state.step)]
                stop = stop or self._run_hooks()
                if self._due(run.logging.every):
                    self.log.flush()
                self._save_and_change(stop, due=self._due(run.checkpoint.every))
            self.data_share = batches.wait_seconds / max(self.metrics.throughput.seconds, 1e-9)
            control.heartbeat("finishing the last checkpoint")
            self._finish_checkpoint()
            if problem := self.store.end_pruning():
                self.metrics.message(log_line("note", problem))
            for hook in self.hooks:

                def give_up(hook: Hook = hook) -> bool:
                    control.heartbeat(f"ending {hook.name}")  # a slow store is no hang
                    return stop is not None or control.has_request()

                control.heartbeat(f"ending {hook.name}")
                for line in hook.end(give_up):
                    self.metrics.message(line)
            if stop:
                stop.saved_step = state.step
                if run.resume == "never":
                    stop.resumes = "with --resume auto the same command continues the run"
                raise stop
        control.end_watch()  # what follows the last save must not fail the run
        return self.engine

    def close_hooks(self) -> None:
        """End what the hooks have started. Not collective."""
        for hook in self.hooks:
            hook.close()

    def close(self) -> None:
        """Let the engine go, and end the threads that fit has left, after an error above all. Not
        collective."""
        self.store.close()
        self.close_hooks()
        if self.hashes is not None:
            self.hashes.close()
        if self.engine is not None:
            engine, self.engine = self.engine, None
            destroy_engine(engine)
            del engine
            free_memory(compiled=bool(self.session.decisions.compile.value))

    def _check_hashes(self) -> HashCheck:
        """Begin to compare the corpora with their hashes, on one rank of those that see the same files."""
        world = self.session.world
        corpora = [corpus for corpus, _ in self.session.data.all_corpora()]
        seen = world.gather(files_seen(corpora))
        return HashCheck(corpora if seen.index(seen[world.rank]) == world.rank else [], self.run.folder)

    def _save_and_change(self, stop: Stopped | None, due: bool) -> None:
        """Begin a checkpoint if one is *due*, requested or needed; then continue with the model that a hook
        requested."""
        changed, self._stopping = self._next_model is not None, stop is not None
        if stop or changed or due:
            self._save(asked=bool(stop) or changed)
        if changed and not stop:  # else the next session changes it
            self._change_model()

    def _change_model(self) -> None:
        """Continue with the model that a hook requested, from the checkpoint of this step.

        A session that is killed at any moment of it finds that checkpoint, and does the same.
        """
        session, model = self.session, self._next_model
        assert model is not None
        self._next_model = None
        with self.metrics.pause():
            self.control.heartbeat(f"changing the heads at step {self.state.step}")
            self._finish_checkpoint()
            engine, self.engine = self.engine, None
            destroy_engine(engine)
            del engine  # or its memory would still be held while the next one is built
            free_memory()
            session.model_config, self.state.model = model, model.to_json()
            merged, grid = session.decisions.ds_config.value, session.world.grid
            network = build_network(self.run, model, merged, grid, **session.decisions.kernels())
            optimizer = build_run_optimizer(self.run, network, merged)
            self.engine = build_engine(self.run, network, optimizer, merged, grid)
            load_checkpoint(self.engine, self.store.path(self.state.step), session.world, open_changed)
            note_changed(self.state)
            for hook in self.hooks:
                hook.model_changed(model)
            self.metrics.throughput.change_model(model.flops_per_token())
            self.engine.train()

    def _before_step(self) -> dict[str, Any]:
        """Call the hooks before the next step, and return their values."""
        values: dict[str, Any] = {}
        with self.metrics.pause():
            for hook in self.hooks:
                result = check_result(hook, hook.before_step(self.engine, self.state))
                values |= result.values
                self._say(result)
        return values

    def _forward_backward(self, batches: BatchPrefetcher[Batch]) -> Tensor:
        """One optimizer step's micro-batches; DeepSpeed updates the weights after the last.

        Returns:
            This rank's mean cross-entropy, [1], and with a z loss what that adds, [2]; on the device.
        """
        engine, world, accumulation = self.engine, self.session.world, self.session.batch.accumulation
        total = torch.zeros(1 + bool(self.session.model_config.z_loss), device=world.device)
        for micro in range(accumulation):
            batch = next(batches)
            tensors = [tensor.to(world.device, non_blocking=True) for tensor in batch]
            with self.log.forward.measure():
                loss = engine(*tensors)
            terms = engine.module.loss_terms
            total += (loss if terms is None else terms).detach().float()
            # 1 + 0 * loss is exactly 1 for a finite loss and NaN for any other: a bad loss makes every
            # gradient NaN, and DeepSpeed skips the update on all ranks, without this rank having to look at
            # the loss.
            engine.backward(loss * (1 + 0 * loss.detach()))
            if self.guard.sigmas and micro == accumulation - 1:
                self.guard.expect(global_loss(total[0] / accumulation, world))
            engine.step()
        return total / accumulation

    def _count(self, applied: bool) -> None:
        """Advance the state by one attempted step. Data and learning rate advance even if the update was
        skipped."""
        state = self.state
        state.step += 1
        state.sequences += self.session.batch.sequences
        state.tokens += self.session.tokens_per_step
        state.skipped += not applied
        state.skipped_in_a_row = 0 if applied else state.skipped_in_a_row + 1
        state.spikes += self.guard.reason is not None

    def _note(self, losses: Tensor, rates: dict[str, float], hook_values: dict[str, Any]) -> None:
        """Note the step's values for metrics.jsonl; nothing is read from the device."""
        state, guard = self.state, self.guard
        row = {"tokens": state.tokens, "skipped": state.skipped}
        row |= {f"lr/{name}": rate for name, rate in rates.items()} | hook_values
        self.log.add(
            state.step, losses, guard.norm if guard.reason else self.engine.get_global_grad_norm(), row
        )
        if self.session.decisions.compile.value:
            graphs = count_compiled_graphs() - self._earlier_graphs
            if graphs != self.graphs:
                self.metrics.message(log_line("compile", f"step {state.step:,}: {graphs} graphs so far"))
                self.graphs = graphs
        if guard.reason:
            self.metrics.message(log_line("spike", f"step {state.step:,}: update skipped; {guard.reason}"))

    def _check_skipped(self) -> None:
        """Stop a run of which too many updates in a row were skipped."""
        state = self.state
        if state.skipped_in_a_row < self.run.max_skipped_steps:
            return
        self.log.flush()
        self._finish_checkpoint()
        raise DivergedError(
            f"max_skipped_steps: {state.skipped_in_a_row} updates in a row were skipped for a non-finite "
            f"loss or gradient, or as spikes, up to step {state.step}; checkpoints of steps "
            f"{self.store.steps()} are kept; a lower learning rate may help"
        )

    def _run_hooks(self) -> Stopped | None:
        """Run the pending hooks of this step, and take each off the list when it is done.

        Returns:
            A request to stop that came in the middle; the rest stays pending. Or None.
        """
        state = self.state
        hooks: dict[str, Hook] = {hook.name: hook for hook in self.hooks}
        row = self._read_row() if state.pending else {}
        while state.pending:
            if hook := hooks.get(state.pending[0]):  # one that this session has turned off is left out
                try:
                    with (
                        self.metrics.pause(),
                        self.control.allow_interruption(self.engine, f"{hook.name} at step {state.step}"),
                    ):
                        result = check_result(hook, hook.run(self.engine, state, row))
                except Stopped as stop:
                    return stop
                row |= result.values
                self.log.flush(result.values)
                self._say(result)
                self._next_model = result.model or self._next_model
            state.pending = state.pending[1:]
        return None

    def _read_row(self) -> dict[str, Any]:
        """The row of this step so far; of a step of an earlier session as metrics.jsonl has it."""
        row = self.log.read()
        if row is None:
            step, file = self.state.step, self.run.folder / FILE_NAME
            row = self.session.world.on_rank_zero(
                lambda: next((row for row in read_metrics(file) if row["step"] == step), {})
            )
        return row

    def _save(self, asked: bool = True) -> None:
        """Begin a checkpoint of this step.

        While updates are being skipped the weights may be beyond repair. Then only a last checkpoint is
        written (of a session that is *asked* to stop, or of the run), and it replaces no older one.
        """
        run, state = self.run, self.state
        self.log.flush()
        learning = state.skipped_in_a_row == 0
        if not (learning or asked or self.session.finished):
            self.metrics.message(
                log_line(
                    "note",
                    f"step {state.step:,}: no checkpoint, since the last {state.skipped_in_a_row} updates "
                    "were skipped",
                )
            )
            return
        state.seconds, state.recent = self.log.seconds, self.guard.recent()
        # Copies: they are written during the next steps, in which a hook may change its own.
        tensors = {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for hook in self.hooks
            for name, tensor in hook.state().items()
        }
        with self.metrics.pause():
            if self.store.under_way:
                self._finish_checkpoint()  # the one before
            self.control.heartbeat(f"saving step {state.step}")
            self.store.begin(
                self.engine,
                state,
                run.folder / "tokenizer",
                tensors,
                run.checkpoint.background,
            )
            self._may_prune = learning
            if not run.checkpoint.background:
                self._finish_checkpoint()

    def _finish_checkpoint(self) -> None:
        """Finish the checkpoint that is under way, if one is, once the corpora are known to be what their
        hashes say. A session that is asked to stop does not wait for that: the next one compares them again.
        Collective.

        Raises:
            UserError: a corpus is damaged; the checkpoint is not kept.
        """
        if not self._data_checked:
            while True:
                here = self.hashes.running, self.control.has_request()
                reading, asked = map(any, zip(*self.session.world.gather(here), strict=True))
                if not reading or asked or self._stopping:
                    break
                self.control.heartbeat("comparing the corpora with their hashes")
                self.hashes.wait(seconds=1)
            self._data_checked = not reading
            self.store.check_data(self.hashes.problem)
        step = self.store.finish()
        if step is None:
            return
        for hook in self.hooks:
            hook.checkpoint_saved(self.store.path(step))
        if self._may_prune:
            self.store.start_pruning(step, lambda folder: all(hook.may_prune(folder) for hook in self.hooks))
        if step > self._saved_step and self.session.world.is_main:
            self._saved_step = step
            report_progress()

    def _say(self, result: HookResult) -> None:
        for line in result.lines:
            self.metrics.message(line)

    def _due(self, every: int) -> bool:
        """Whether something done each *every* steps (0: only at the last) is due now."""
        return self.state.step >= self.run.steps or (every > 0 and self.state.step % every == 0)
