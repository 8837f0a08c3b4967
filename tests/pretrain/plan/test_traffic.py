"""Bytes sent in a step, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from model.presets import preset
from pretrain.engine.ds_config import EngineSettings
from pretrain.plan.footprint import rank_parameters
from pretrain.plan.tensor_parallel import plan_tensor_parallel as tensor_plan
from pretrain.plan.traffic import traffic

PRISM = preset("prism-757m")
P = 756_819_456


def test_data_parallel_bytes_by_stage():
    once = 4 * P * 7 // 8
    first = traffic(PRISM, EngineSettings(stage=1), 8, 4, 16)
    second = traffic(PRISM, EngineSettings(stage=2), 8, 4, 16)
    assert first.gradients == 2 * once
    assert second.gradients == 16 * 2 * once  # every micro-batch
    assert first.parameters == second.parameters == 2 * P * 7 // 8
    reduced = traffic(PRISM, EngineSettings(stage=2, all_reduce_buckets=False), 8, 4, 16)
    assert reduced.gradients == 16 * once

    norms = 49 * 1536
    third = EngineSettings(stage=3, reuse_distance=4 * P)
    kept = traffic(PRISM, third, 8, 4, 16)  # nothing is released between forward and backward
    assert kept.gradients == 16 * once
    assert kept.parameters == 16 * (2 * (P - norms) * 7 // 8) + 2 * norms * 7 // 8
    released = traffic(PRISM, dataclasses.replace(third, reuse_distance=0), 8, 4, 16)
    assert kept.parameters < released.parameters < 2 * kept.parameters


def test_alone_nothing_is_sent():
    for stage in (1, 2, 3):
        sent = traffic(PRISM, EngineSettings(stage=stage), 1, 4, 16)
        assert sent.data_parallel == sent.tensor_parallel == sent.host == 0


def test_tensor_parallel_bytes_are_the_parallel_plans():
    sent = traffic(PRISM, EngineSettings(), 2, 4, 16, 4)
    plan = tensor_plan(PRISM, 4, 4)
    assert sent.tensor_all_reduces == 16 * plan.all_reduce_bytes
    assert sent.head_exchange == 16 * plan.exchange_bytes > 0
    again = traffic(PRISM, EngineSettings(checkpointing=True), 2, 4, 16, 4)
    assert again.head_exchange == 16 * (plan.exchange_bytes * 3 // 2)
    layers = sum(layer.all_reduce_bytes for layer in plan.layers)
    assert again.tensor_all_reduces == 16 * plan.outside_bytes + 16 * layers * 3 // 2


def test_offloading_moves_gradients_down_and_weights_up():
    offload = EngineSettings(stage=2, offload_optimizer=True)
    assert traffic(PRISM, offload, 8, 4, 1).host == (4 + 2) * P // 8
    # 16 micro-batches in bf16: 16 sums down, and 15 up again for the next.
    assert traffic(PRISM, offload, 8, 4, 16).host == (4 + 2 + 31 * 2) * P // 8
    third = dataclasses.replace(offload, stage=3)
    assert traffic(PRISM, third, 8, 4, 16).host == (4 + 2 + 32 * 4) * P // 8
    # Offloaded parameters: each part is uploaded for each of 16 forward and backward passes.
    both = dataclasses.replace(third, offload_parameters=True, persistence_threshold=0, reuse_distance=0)
    both = dataclasses.replace(both, prefetch_bucket=0)
    regathered = P - max(p.elements for p in rank_parameters(PRISM))
    assert traffic(PRISM, both, 8, 4, 16).host == (4 + 32 * 4) * P // 8 + 16 * 2 * (P + regathered) // 8
    assert traffic(PRISM, EngineSettings(), 8, 4, 16).host == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_in_bf16_are_half_the_bytes(stage):
    settings = (EngineSettings(stage=stage, communication_bytes=size) for size in (4, 2))
    wide, narrow = (traffic(PRISM, each, 8, 4, 16) for each in settings)
    assert wide.gradients == 2 * narrow.gradients > 0 and wide.parameters == narrow.parameters


def test_matrices_of_muon_travel_there_and_back():
    matrices = P - 50_304 * 1536 - 49 * 1536
    assert traffic(PRISM, EngineSettings(stage=2), 8, 4, 16).muon == 0
    for data_parallel, t in ((8, 1), (4, 2), (1, 8)):
        sent = traffic(PRISM, EngineSettings(stage=2, muon=True), data_parallel, 4, 16, t)
        assert sent.muon == 2 * 4 * matrices // 8 * 7 // 8
