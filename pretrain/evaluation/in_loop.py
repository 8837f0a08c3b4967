"""Scores the model zero-shot while it trains, on its own ranks, without changing the training numbers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.tasks import TaskManager

from model.attention import any_length
from model.errors import UserError
from pretrain.data.tokenizer import Tokenizer
from pretrain.evaluation.data_sets import existing_data_dir
from pretrain.evaluation.language_model import Share, ZeroShotModel
from pretrain.evaluation.scores import headline, load_tasks, resolve_tasks, score, task_manager
from pretrain.evaluation.settings import EvaluationConfig
from pretrain.runtime.world import World


@dataclass(frozen=True)
class Scores:
    """The results of one evaluation."""

    figures: dict[str, float]
    """``evaluation/TASK/METRIC`` -> value."""
    seconds: float

    def __str__(self) -> str:
        shown = [f"{name.removeprefix('evaluation/')} {value:.4f}" for name, value in self.figures.items()]
        return f"{', '.join(shown)} ({self.seconds:.1f} s)"


class InLoopEvaluation:
    """The tasks of a run, loaded once, to be scored while it trains.

    Args:
        config: which tasks, from where, and how many items of each.
        tokenizer: the run's.
        context_length: T, positions of the longest sequence.
        batch_tokens: tokens of a forward pass; as many as in training fit into memory.

    Raises:
        UserError: on every rank, for an unknown task (with the closest), one that lets the model write text,
            or a data set that some rank cannot read.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        tokenizer: Tokenizer,
        context_length: int,
        batch_tokens: int,
        world: World,
    ) -> None:
        self.config, self.tokenizer, self.world = config, tokenizer, world
        self.context_length, self.batch_tokens = context_length, batch_tokens
        # Rank 0 reads some ten thousand files for all.
        manager = world.once(task_manager)
        problem = None
        try:
            self._tasks = self._load(manager)
        except UserError as error:
            problem = (
                f"evaluation.{error}"  # "tasks: …" or "data_dir: …", which are fields of EvaluationConfig
            )
        problem = world.agree(problem)
        if problem:
            raise UserError(problem)

    def _load(self, manager: TaskManager) -> Any:
        data_dir = existing_data_dir(self.config.data_dir)
        return load_tasks(resolve_tasks(self.config.tasks.split(","), manager), manager, data_dir)

    def run(self, engine: Any) -> Scores:
        """Score the engine's model. Collective; weights, gradients and random states do not change.

        Each copy of the model scores its share of the requests, its tensor-parallel ranks the same ones;
        every rank makes the same number of forward passes (ZeRO-3 gathers weights in each).
        """
        began = time.monotonic()
        model = ZeroShotModel(
            engine,
            self.tokenizer,
            self.context_length,
            self.world.device,
            batch_tokens=self.batch_tokens,
            collective=True,
            share=Share(self.world.data_rank, self.world.data_parallel, self.world.grid.data_group),
        )
        with _evaluation_mode(engine):
            results = score(model, self._tasks, self.config.limit, bootstrap=0)
        figures = {f"evaluation/{name}": value for name, value in headline(results).items()}
        return Scores(figures, time.monotonic() - began)


@contextlib.contextmanager
def _evaluation_mode(engine: Any) -> Iterator[None]:
    was_training = engine.training
    engine.eval()
    try:
        # Batches come in every length; compiling each would take longer than scoring it.
        with torch.compiler.set_stance("force_eager"), any_length():
            yield
    finally:
        engine.train(was_training)
