"""An engine is let go before the next one is built: heads that grow must not keep the memory of every model
before."""

import weakref
from unittest import mock

import pytest

from pretrain import trainer
from pretrain.assembly import open_run
from tests.helpers.distributed import run_distributed
from tests.helpers.marks import slow
from tests.helpers.training import nano_run, session

GROWING = (
    *("--growth.criterion", "schedule", "--growth.schedule", '{1: 2x4, 2: "3x4", 3: "4x4"}'),
    *("--growth.head_dim", "16", "--growth.maximum", "4", "--steps", "4", "--validation.every", "0"),
)


def left_alive(run, stage):
    """What is still there of earlier engines when another one is built: parameters, modules and
    optimizers."""
    parts, alive, original = [], [], trainer.build_engine

    def built(*given, **chosen):
        alive.append([name for name, reference in parts if reference() is not None])
        engine = original(*given, **chosen)
        parts.extend((name, weakref.ref(parameter)) for name, parameter in engine.module.named_parameters())
        parts.extend([("module", weakref.ref(engine.module)), ("engine", weakref.ref(engine))])
        parts.append(("optimizer", weakref.ref(engine.optimizer)))
        return engine

    with (
        mock.patch.object(trainer, "build_engine", built),
        mock.patch.object(open_run, "build_engine", built),
    ):
        session(run, stage)
    return alive


@pytest.mark.parametrize(("stage", "precision"), [(2, "fp32"), *slow([(3, "bf16")])])
def test_an_engine_is_gone_before_the_next_is_built(small_folder, tmp_path, stage, precision):
    run = nano_run(small_folder, tmp_path, *GROWING, "--precision", precision)
    alive = run_distributed(left_alive, 1, run, stage)[0]
    assert alive == [[]] * 4
