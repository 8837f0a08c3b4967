"""Scores the model zero-shot while it trains, on its own ranks, without changing the training numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from model.attention import allow_any_length
from model.errors import UserError
from pretrain.checkpoint.state import TrainingState
from pretrain.evaluation.checks import check_data_dir, resolve_tasks
from pretrain.evaluation.language_model import ZeroShotModel
from pretrain.evaluation.scores import check_answers, headline, load_tasks, score, task_manager
from pretrain.run.hooks import HookResult, IntervalHook
from pretrain.run.session import Session
from pretrain.utils.format import log_line


class EvaluationHook(IntervalHook):
    """Scores through lm-eval, every ``evaluation.every`` steps and at the last.

    Raises:
        UserError: on every rank, for an unknown task (with the closest), one that needs more than text, or a
            data set that some rank cannot read.
    """

    name = "evaluation"

    def __init__(self, session: Session) -> None:
        self._session, self._settings = session, session.run.evaluation
        super().__init__(self._settings.every, session.run.steps)
        # Rank 0 reads lm-eval's files for all.
        tasks, include_path = self._settings.tasks, self._settings.include_path
        manager = session.world.on_rank_zero(lambda: task_manager(tasks, include_path))
        problem = None
        try:
            names = resolve_tasks(tasks.split(","), manager.all_tasks)
            self._tasks = load_tasks(names, manager, check_data_dir(self._settings.data_dir))
            check_answers(self._tasks, session.model_config.context_length)
        except UserError as error:
            problem = f"evaluation.{error}"  # "tasks: …" or "data_dir: …", which are fields there
        problem = session.world.first_problem(problem)
        if problem:
            raise UserError(problem)

    def run(self, engine: Any, state: TrainingState, row: Mapping[str, Any]) -> HookResult:
        """Return ``evaluation/TASK/METRIC`` of each task, and a line with them.

        Collective; weights, gradients and random states do not change. Each copy of the model scores its
        share of the requests, its tensor-parallel ranks the same ones; every rank makes the same number of
        forward passes (ZeRO-3 gathers weights in each).
        """
        began, was_training = time.monotonic(), engine.training
        session, T = self._session, self._session.model_config.context_length
        # As many tokens as in training fit into memory.
        batch_tokens = session.batch.micro_batch * T
        model = ZeroShotModel(engine, session.data.tokenizer, T, session.world, batch_tokens)
        engine.eval()
        try:
            # Batches come in every length; compiling each would take longer than scoring it.
            with torch.compiler.set_stance("force_eager"), allow_any_length():
                limit, shots = self._settings.limit, self._settings.num_fewshot
                results = score(model, self._tasks, limit, bootstrap=0, shots=shots)
        except UserError as error:  # of an item, on every rank: no reason to end a training
            left_out = f"scores of step {state.step:,} are left out ({error})"
            return HookResult({}, [log_line("note", left_out)])
        finally:
            engine.train(was_training)
        scores = headline(results)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
        line = f"step {state.step:,}: {shown} ({time.monotonic() - began:.1f} s)"
        values = {f"evaluation/{name}": value for name, value in scores.items()}
        return HookResult(values, [log_line("scores", line)])
