"""States and peaks by hand, properties, and a real session."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import pytest

from benchmarks.memory import Case
from model.blocks import block
from model.parameters import parameter_specs
from model.presets import preset
from pretrain.config.sections import OptimizerConfig
from pretrain.engine.ds_config import EngineSettings
from pretrain.optim.groups import plan_groups
from pretrain.plan.footprint import activations, rank_parameters
from pretrain.plan.memory import largest_group, memory_plan, states

GIB = 1 << 30
PRISM = preset("prism-757m")
P = 756_819_456  # the paper's 756.8M, with 50,304 rows
BUCKET = 1536 * 4096 + 1536  # of "auto": a matrix of the feed-forward network, and the final norm
SHIPPED = {"reduce_bucket": BUCKET, "overlap": True}


def test_zero2_of_757m_on_8_ranks_by_hand():
    kept = states(rank_parameters(PRISM), EngineSettings(stage=2), data_parallel=8)
    assert kept.parameters == 2 * P == 1_513_638_912
    assert kept.master == 4 * P // 8 == 378_409_728
    assert kept.moments == 8 * P // 8 == 756_819_456
    assert (kept.gradients, kept.host) == (0, 0)
    plan = memory_plan(PRISM, EngineSettings(stage=2, **SHIPPED), 8, micro_batch=1)
    assert plan.gradients == 4 * P // 8
    # two buckets in bf16; the embedding is larger than a bucket, and copied in bf16 and in fp32 to be reduced
    embedding = 50_304 * 1536
    assert plan.buffers.bucket == 2 * 2 * BUCKET == 4 * 6_292_992
    assert plan.buffers.copies == (2 + 4) * embedding
    acts = activations(PRISM, 1, EngineSettings())
    # the fused loss takes all 1,024 tokens as one chunk: logits, and their softmax, which outweighs the
    # head's gradient
    assert (acts.logits, acts.head_gradient) == (0, 4 * embedding)
    assert plan.phases["loss"] == kept.device + acts.total + (2 + 4) * 1024 * 50_304
    plain = memory_plan(PRISM, EngineSettings(stage=2, fused="none", **SHIPPED), 8, micro_batch=1)
    acts = activations(PRISM, 1, EngineSettings(fused="none"))
    assert (acts.logits, acts.head_gradient) == (1024 * 50_304 * 2, 0)
    assert plain.phases["loss"] == kept.device + acts.total + acts.logits + 2 * 4 * 2**24


def test_reduction_in_bf16_copies_less_at_stages_2_and_3_and_more_at_stage_1():
    def copies(model, stage, communication):
        settings = EngineSettings(stage=stage, communication_bytes=communication, **SHIPPED)
        return memory_plan(preset(model), settings, 8, micro_batch=1).buffers.copies

    embedding = 50_304 * 1536
    # The widened copy is not made.
    assert copies("prism-757m", 2, 4) - copies("prism-757m", 2, 2) == 4 * embedding
    assert copies("prism-757m", 3, 4) == 2 * copies("prism-757m", 3, 2) == 4 * embedding
    # Stage 1 has fp32 gradients: one copy of them, and for bf16 a narrow one besides.
    everything = 353_944_576
    assert copies("prism-354m", 1, 4) == 4 * everything and copies("prism-354m", 1, 2) == (4 + 2) * everything


def test_stages_of_a_small_model_by_hand():
    config = block("llama", vocab_size=128, context_length=8, d_model=8, heads="1", ffn_width=16)
    elements = 128 * 8 + 4 * 64 + 3 * 128 + 3 * 8
    assert sum(p.elements for p in rank_parameters(config)) == elements == 1688
    sizes = {}
    for stage in (1, 2, 3):
        for bf16 in (False, True):
            settings = EngineSettings(stage=stage, bf16=bf16, persistence_threshold=0)
            kept = states(rank_parameters(config), settings, 4)
            sizes[stage, bf16] = (kept.parameters, kept.master, kept.moments, kept.gradients)
    assert sizes[1, False] == sizes[2, False] == (4 * 1688, 1688, 2 * 1688, 0)
    assert sizes[1, True] == (2 * 1688, 1688, 2 * 1688, 4 * 1688)  # BF16_Optimizer: whole fp32 gradients
    assert sizes[2, True] == (2 * 1688, 1688, 2 * 1688, 0)
    assert sizes[3, False] == (1688, 1688, 2 * 1688, 1688)
    assert sizes[3, True] == (2 * 1688 // 4, 1688, 2 * 1688, 1688)


@pytest.mark.parametrize("bf16", [False, True])
def test_optimizer_state_over_all_ranks_depends_on_nothing(bf16: bool):
    for t in (1, 2, 4):
        parameters = rank_parameters(PRISM, t)
        elements = sum(p.elements for p in parameters)
        for ranks in (1, 2, 8, 32):
            for stage in (1, 2, 3):
                settings = EngineSettings(stage=stage, bf16=bf16)
                kept = states(parameters, settings, ranks)
                assert 0 <= ranks * (kept.master + kept.moments) - 12 * elements < 12 * ranks
                offloaded = states(parameters, dataclasses.replace(settings, offload_optimizer=True), ranks)
                assert offloaded.master == offloaded.moments == 0
                assert ranks * offloaded.host >= 16 * elements
                if ranks == 8 and t == 1:  # one more copy of a part, in the compute precision
                    offload = dataclasses.replace(settings, offload_optimizer=True)
                    more = states(parameters, offload, ranks, accumulation=4).host - offloaded.host
                    assert more == (0 if stage == 3 else (2 if bf16 else 4) * -(-elements // 8))


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_makes_a_peak_smaller(device, bf16: bool, accumulation: int):
    def peak(stage=2, ranks=8, micro_batch=8, t=1, **changes):
        settings = EngineSettings(stage=stage, bf16=bf16, **SHIPPED, **changes)
        return memory_plan(PRISM, settings, ranks, micro_batch, accumulation, t, device).peak

    less = ("micro_batch", 4), ("checkpointing", True), ("t", 2), ("ranks", 16), ("offload_optimizer", True)
    assert all(peak(**{name: value}) < peak() for name, value in less) and peak() < peak(micro_batch=16)
    assert peak(t=4, sequence_parallel=True) < peak(t=4)
    assert peak(stage=2) <= peak(stage=1)
    assert peak(stage=3, reuse_distance=0, prefetch_bucket=0) < peak(stage=2)


def test_stage_3_gathers_what_its_reuse_distance_keeps():
    near = memory_plan(PRISM, EngineSettings(stage=3, reuse_distance=0, prefetch_bucket=0), 8, 1)
    far = memory_plan(PRISM, EngineSettings(stage=3, reuse_distance=4 * P), 8, 1)
    embedding = 50_304 * 1536
    assert near.gathered == 2 * embedding
    assert far.gathered == 2 * (P - 49 * 1536)  # all but the norms
    assert far.phases["loss"] - near.phases["loss"] == far.gathered - near.gathered


def test_a_bucket_that_cannot_fill_takes_no_memory_on_a_cpu():
    tiny = preset("prism-tiny")
    settings = EngineSettings(stage=2, bf16=False, reduce_bucket=500_000_000)
    gpu, cpu = (memory_plan(tiny, settings, 1, 1, device=device).buffers.bucket for device in ("cuda", "cpu"))
    assert gpu == 4 * 500_000_000 and cpu == 4 * tiny.num_parameters(padded=True)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("parametrization", ["standard", "mup"])
def test_largest_group_is_that_of_the_optimizer(kind: Literal["adamw", "muon"], parametrization: str):
    model = dataclasses.replace(preset("prism-micro"), tie_embeddings=False, attention_scale="none")
    if parametrization == "mup":
        model = dataclasses.replace(model, parametrization="mup", base_width=64)
    optimizer = OptimizerConfig(kind=kind, decay_embeddings=False)
    specs = parameter_specs(model)
    groups = plan_groups({name: spec.role for name, spec in specs.items()}, optimizer, [], model)
    sizes = [sum(math.prod(specs[name].shape) for name in group.parameters) for group in groups]
    settings = EngineSettings(muon=kind == "muon")
    assert largest_group(rank_parameters(model), settings) == max(sizes)


def test_plan_is_a_plain_record():
    plan = memory_plan(PRISM, EngineSettings(), 1, 1)
    assert plan.peak == max(plan.phases.values()) == plan.phases[plan.peak_phase]
    assert dataclasses.asdict(plan)["states"]["parameters"] == 2 * P


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (2, "bf16"), (3, "fp32")])
def test_real_session_takes_what_is_predicted(stage: int, precision: str):
    """Growth of resident memory of a fresh process; docs/log/memory.md has the whole table."""
    case = Case(stage, precision)
    measured = case.measured()[0]
    predicted = case.predicted("cuda" if "device" in measured else "cpu").peak
    assert predicted == pytest.approx(measured["peak"], rel=0.15)
