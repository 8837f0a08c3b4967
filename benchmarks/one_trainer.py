"""The trainer of pretrain/main.py in this process, ready to step, for benchmarks that time its parts.

Import it before torch: waiting threads of OpenMP sleep, as in main.py, unless OMP_WAIT_POLICY is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from benchmarks.helpers import command_line_of, seconds_of  # noqa: E402
from model.config import ModelConfig  # noqa: E402
from pretrain.assembly.open_run import open_run  # noqa: E402
from pretrain.data.loader import BatchPrefetcher  # noqa: E402
from pretrain.engine.deepspeed_logging import quiet_deepspeed  # noqa: E402
from pretrain.engine.ds_config_check import read_ds_config  # noqa: E402
from pretrain.run.session import Session  # noqa: E402
from pretrain.runtime.signals import StopListener  # noqa: E402
from pretrain.trainer import Trainer  # noqa: E402

ZERO2 = str(ROOT / "ds_configs/zero2.json")


@dataclass(frozen=True)
class OneTrainer:
    """A trainer whose engine is built, and its batches."""

    session: Session
    trainer: Trainer
    batches: BatchPrefetcher[Any]

    def step(self) -> None:
        """One optimizer step. On a GPU its work continues after this returns; see seconds."""
        self.trainer._forward_backward(self.batches)
        self.trainer._count(True)

    seconds = staticmethod(seconds_of)


@contextlib.contextmanager
def trainer_of(model: ModelConfig, micro_batch: int, *flags: str) -> Iterator[OneTrainer]:
    """one_trainer of *model*, a micro-batch a step, without validation; compiled only if *flags* ask for
    it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        path.write_text(json.dumps(model.to_json()))
        settings = {
            "model": path,
            "vocab_size": model.vocab_size,
            "micro_batch": micro_batch,
            "global_batch_tokens": micro_batch * model.context_length,
            "validation.every": 0,
            "diagnostics_every": 0,
            "compile": "false",
        }
        with one_trainer(*(f"--{name}={value}" for name, value in settings.items()), *flags) as one:
            yield one


@contextlib.contextmanager
def one_trainer(*flags: str) -> Iterator[OneTrainer]:
    """Build it from *flags* of pretrain/main.py; ZeRO 2 unless they name a ds_config. Its run folder is
    temporary."""
    with tempfile.TemporaryDirectory() as folder:
        command = command_line_of(
            "--ds_config", ZERO2, *flags, "--runs_dir", folder, "--logging.wandb", "disabled"
        )
        run = command.run
        quiet_deepspeed()
        listener = StopListener()
        with open_run(run, read_ds_config(command.ds_config), listener) as trainer:
            assert isinstance(trainer, Trainer)
            session = trainer.session
            trainer._data_checked = True  # its saves do not wait for the corpora's hashes
            with BatchPrefetcher(lambda index: session.micro_batch(0, index), start=0) as batches:
                yield OneTrainer(session, trainer, batches)
