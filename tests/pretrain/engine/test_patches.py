"""What is changed in DeepSpeed is changed where it is used, only as long as it is wanted, and put back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from deepspeed import accelerator
from deepspeed.accelerator import cuda_accelerator
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage3, stage_1_and_2

from pretrain.engine.patches import guard_updates, prepare_deepspeed
from pretrain.optim.spikes import LEAST, SpikeGuard
from pretrain.runtime.world import start_world
from tests.helpers.distributed import run_distributed

OPTIMIZERS = [bf16_optimizer, stage_1_and_2, stage3]


def shared_memory_operation():
    """What DeepSpeed's communication holds of its shared-memory all-reduce in a world that was started."""
    prepare_deepspeed()
    start_world(None, False)
    import deepspeed

    compatible = deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]
    return deepspeed.comm.comm.cdb.shm_comm_op is not None, compatible


def test_the_extension_is_not_compiled():
    assert run_distributed(shared_memory_operation, 1) == [(False, False)]


def calm(sigmas):
    """A guard that has seen enough steps to know their level."""
    guard = SpikeGuard(sigmas, *([1 + 0.01 * (step % 3) for step in range(LEAST)] for _ in range(2)))
    guard.expect(torch.tensor(1.0))
    return guard


@pytest.mark.parametrize("module", OPTIMIZERS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_spike_takes_the_way_of_an_invalid_norm(module):
    original = module.is_invalid_grad_norm
    with guard_updates(calm(6)):
        assert module.is_invalid_grad_norm(torch.tensor(100.0))
    with guard_updates(calm(6)):
        assert not module.is_invalid_grad_norm(torch.tensor(1.0))
        assert module.is_invalid_grad_norm(torch.tensor(float("nan")))
    assert module.is_invalid_grad_norm is original


def test_it_is_put_back_after_an_error():
    originals = [module.is_invalid_grad_norm for module in OPTIMIZERS]
    with pytest.raises(KeyError), guard_updates(calm(6)):
        raise KeyError
    assert [module.is_invalid_grad_norm for module in OPTIMIZERS] == originals


def test_a_guard_that_never_skips_is_not_asked():
    originals = [module.is_invalid_grad_norm for module in OPTIMIZERS]
    with guard_updates(calm(0)):
        assert [module.is_invalid_grad_norm for module in OPTIMIZERS] == originals


@pytest.mark.parametrize(
    ("devices", "asked"),
    [("", True), ("0", True), ("0,1", True), ("-1", True), ("GPU-8f1c", False), ("0,MIG-5a", False)],
)
def test_devices_that_are_named_are_not_asked_for_by_number(monkeypatch, devices, asked):
    """DeepSpeed takes every entry of CUDA_VISIBLE_DEVICES as a number where NVIDIA's library is installed."""
    library = object()
    monkeypatch.setattr(cuda_accelerator, "pynvml", library)
    monkeypatch.setattr(accelerator, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    prepare_deepspeed()
    assert cuda_accelerator.pynvml is (library if asked else None)
