"""What follows from a request: a table over presets, ZeRO stages, devices and what was saved."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest

from model.errors import UserError
from pretrain.checkpoint.state import Decided, TrainingState, WorldRecord
from pretrain.config.run_config import RunConfig
from pretrain.run.decisions import AS_BEGUN, Decision, Decisions, Facts, decide
from tests.helpers.refusals import refused

CPU = Facts("cpu", 16 << 30, bf16=(True, "AMX"), threads=4)
OLD_CPU = Facts("cpu", 16 << 30, threads=4)
GPU = Facts("cuda", 79 << 30, ranks=8, bf16=(True, "a GPU"), threads=2)
NEW = TrainingState()
LONG = 10**7  # steps: enough to be compiled on a CPU


def ds_config(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "bf16": {"enabled": "auto"}}


def saved(facts: Facts, stage: int = 2, ranks: int | None = None, **decided: Any) -> TrainingState:
    """The state of a run that an engine wrote, with other decisions than a new run would make."""
    before: dict[str, Any] = {"compile": False, "fused": "none", "attention": "torch", "micro_batch": 2}
    world = WorldRecord(ranks=ranks or facts.ranks, threads=3, device=facts.device, stage=stage)
    return TrainingState(decided=Decided(**(before | decided)), world=world)


def decided(
    facts: Facts, stage: int = 2, before: TrainingState = NEW, model: str = "prism-124m", **asked: Any
) -> Decisions:
    values: dict[str, Any] = {"model": model, "global_batch_tokens": 65536} | asked
    run = RunConfig(**values)
    chosen = run.build_model_config(600)
    return decide(run, ds_config(stage), chosen, before, facts)


def values(made: Decisions) -> tuple[Any, ...]:
    return made.dtype.value, made.compile.value, made.fused.value, made.attention.value, made.threads.value


ASKED: dict[str, Any] = {"compile": False, "fused": "none", "attention": "blocks", "precision": "fp32"}
SHORT = "uniform-micro"


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        # a new run, by device and stage; 124m has a context of 1,024, micro one of 256
        (decided(GPU, 1, steps=LONG), ("bf16", True, "all", "torch", 2)),
        (decided(GPU, 2), ("bf16", True, "all", "torch", 2)),
        (decided(GPU, 3), ("bf16", False, "loss", "torch", 2)),
        (decided(GPU, 2, model="prism-micro"), ("bf16", True, "all", "torch", 2)),
        (decided(CPU, 2, steps=LONG), ("bf16", True, "loss", "torch", 4)),
        (decided(CPU, 2, model="prism-micro", steps=1), ("bf16", False, "loss", "blocks", 4)),
        (decided(CPU, 3, model="prism-micro", steps=LONG), ("bf16", False, "loss", "blocks", 4)),
        (decided(CPU, 3, model="prism-micro", document_mask=True), ("bf16", False, "loss", "torch", 4)),
        (decided(OLD_CPU, 2, model="prism-micro", steps=LONG), ("fp32", True, "loss", "torch", 4)),
        # what was asked for holds on every device
        (decided(GPU, 2, **ASKED), ("fp32", False, "none", "blocks", 2)),
        (decided(GPU, 2, compile=False), ("bf16", False, "loss", "torch", 2)),
        (decided(OLD_CPU, 2, precision="bf16", model=SHORT, steps=1), ("bf16", False, "loss", "blocks", 4)),
        # a run goes on as it began, but for what its device or stage cannot do
        (decided(CPU, 2, saved(CPU), "prism-micro", steps=LONG), ("bf16", False, "none", "torch", 3)),
        (decided(GPU, 3, saved(GPU, fused="all", compile=True)), ("bf16", False, "loss", "torch", 2)),
        (decided(GPU, 2, saved(CPU, ranks=8, attention="blocks")), ("bf16", True, "none", "torch", 2)),
        (decided(CPU, 2, saved(GPU), "prism-micro", steps=1), ("bf16", False, "none", "torch", 4)),
        (decided(CPU, 2, saved(CPU, ranks=2), "prism-micro", steps=1), ("bf16", False, "none", "torch", 4)),
    ],
)
def test_every_choice(made: Decisions, expected: tuple[Any, ...]) -> None:
    assert values(made) == expected


@pytest.mark.parametrize("setting", ["as set", "OMP_NUM_THREADS"])
def test_threads_that_were_asked_for_are_not_those_of_the_checkpoint(setting: str) -> None:
    asked = dataclasses.replace(CPU, threads_by=setting)
    assert decided(asked, 2, saved(CPU), "prism-micro").threads == Decision(4, setting)


def test_a_missing_compiler_is_the_reason() -> None:
    bare = dataclasses.replace(CPU, missing_compiler="no compiler here")
    assert decided(bare, 2, steps=LONG).compile == Decision(False, "no compiler here")
    # The next session compiles again.
    assert decided(bare, 2, saved(CPU, compile=True)).compile == Decision(False, "no compiler here", True)
    elsewhere = decided(GPU, 2, saved(CPU, attention="blocks")).attention
    assert elsewhere == Decision("torch", AS_BEGUN, "blocks")
    assert decided(bare, 2, saved(CPU)).compile == Decision(False, AS_BEGUN)
    assert decided(CPU, 2, model="prism-micro", steps=1).compile.reason.endswith("too few to gain by it")
    assert decided(CPU, 2, compile=True).compile == Decision(True, "as set")
    with refused("compile: true cannot be: no compiler here; install it, or leave compile out"):
        decided(bare, 2, compile=True)


LARGEST = "the largest micro-batch that fits into 16.0 GiB"
MICRO_BATCHES = [
    (1, saved(CPU), 2, AS_BEGUN),
    (1, saved(CPU, micro_batch=3), 4, LARGEST),  # 3 divides no batch
    (2, saved(CPU, ranks=2), 4, LARGEST),  # chosen for t = 1
    (1, NEW, 4, LARGEST),
]


@pytest.mark.parametrize(("degree", "before", "micro_batch", "reason"), MICRO_BATCHES)
def test_the_micro_batch(degree: int, before: TrainingState, micro_batch: int, reason: str) -> None:
    facts = dataclasses.replace(CPU, ranks=degree)
    given = (facts, 2, before, "uniform-124m")
    made = decided(*given, tensor_parallel=degree)
    assert (made.batch.value.micro_batch, made.batch.reason) == (micro_batch, reason)
    assert decided(*given, tensor_parallel=degree, micro_batch=1).batch.value.micro_batch == 1


@pytest.mark.parametrize("asked", [{"compile": True}, {"fused": "all"}])
def test_what_stage_3_cannot_do_is_refused(asked: dict[str, Any]) -> None:
    decided(GPU, 2, **asked)
    with pytest.raises(UserError, match="not valid at ZeRO stage 3"):
        decided(GPU, 3, **asked)


def test_a_contradiction_of_precision_is_refused() -> None:
    run = RunConfig(model="prism-micro", precision="fp32", global_batch_tokens=65536)
    config = ds_config(2) | {"bf16": {"enabled": True}}
    with pytest.raises(UserError, match="precision: fp32 contradicts"):
        decide(run, config, run.build_model_config(600), NEW, CPU)


def test_nothing_that_is_given_changes_and_the_result_is_plain() -> None:
    run, before, config = RunConfig(model="prism-micro", global_batch_tokens=65536), saved(CPU), ds_config(2)
    given = copy.deepcopy((run, before, config))
    made = decide(run, config, run.build_model_config(600), before, CPU)
    assert (run, before, config) == given
    plain = json.loads(json.dumps(made.to_dict()))
    assert " ".join(plain) == "model dtype threads compile fused attention batch ds_config"
    assert all(entry["reason"] for entry in plain.values())
    assert plain["ds_config"]["value"]["bf16"]["enabled"] is True
    assert made.to_record() == Decided(False, "none", "torch", 2)
    before = saved(GPU, fused="all", compile=True)
    at_3 = decided(GPU, 3, before)
    assert (at_3.compile.value, at_3.fused.value) == (False, "loss")
    assert before.decided is not None and at_3.to_record() == before.decided  # back at stage 2 it goes on so
