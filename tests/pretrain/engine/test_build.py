"""Engines: every stage and number of ranks trains the same model, sums gradients in fp32, skips the same
updates."""

import pytest
import torch

from model.initialization import initialize
from model.transformer import Transformer
from tests.helpers.distributed import run_distributed
from tests.helpers.marks import slow
from tests.pretrain.engine.ds_configs import shipped
from tests.pretrain.engine.engines import batches, nano_engine, set_rate


def curve(ds_config, precision, steps=6, poison_at=None):
    """Losses (mean over ranks), gradient norms, and skipped updates."""
    engine, config, plan = nano_engine(shipped(ds_config), precision=precision)
    world, last = torch.distributed.get_world_size(), torch.distributed.get_world_size() - 1
    losses, norms = [], []
    for step, micro_batches in enumerate(batches(config, plan, steps)):
        set_rate(engine)
        total = torch.zeros(())
        for micro, (inputs, labels) in enumerate(micro_batches):
            loss = engine(inputs, labels)
            if step == poison_at and torch.distributed.get_rank() == last and micro == 0:
                loss = loss * float("nan")
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / plan.accumulation / world
        torch.distributed.all_reduce(total)
        losses.append(total.item())
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms, engine.skipped_steps


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_same_curve_at_every_stage_and_world(precision):
    reference, norms, _ = run_distributed(curve, 1, "zero2", precision, timeout=120)[0]
    assert reference[-1] < reference[0]
    tolerance = {"fp32": 1e-6, "bf16": 1e-3}[precision]  # the design's bounds across stages and ranks
    for stage in ("zero1", "zero2", "zero3"):
        for world in (1, 2):
            for losses, other_norms, skipped in run_distributed(curve, world, stage, precision, timeout=120):
                assert losses == pytest.approx(reference, rel=tolerance), (stage, world)
                assert other_norms == pytest.approx(norms, rel=tolerance if precision == "fp32" else 1e-2)
                assert skipped == 0


CASES = [("zero2", "fp32"), ("zero3", "fp32"), ("zero1", "bf16")]


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_a_bad_gradient_on_one_rank_skips_the_update_on_all(stage, precision):
    for losses, norms, skipped in run_distributed(curve, 2, stage, precision, poison_at=2, timeout=120):
        assert skipped == 1
        assert all(torch.isfinite(torch.tensor(losses[:2] + losses[3:])))
        assert not torch.isfinite(torch.tensor(norms[2]))
        assert torch.isfinite(torch.tensor(norms[3]))


@pytest.mark.slow  # DeepSpeed's CPU optimizer is compiled at its first use, which takes a minute
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_offloading_on_two_ranks_in_bf16(stage):
    """DeepSpeedCPUAdam against torch's fused AdamW."""
    plain = run_distributed(curve, 2, stage, "bf16", timeout=120)[0]
    for losses, norms, skipped in run_distributed(curve, 2, f"{stage}_offload", "bf16", timeout=300):
        assert losses == pytest.approx(plain[0], rel=1e-3)
        assert norms == pytest.approx(plain[1], rel=1e-2) and skipped == 0


def distances(ds_config, accumulation):
    """How far the engine's gradient in bf16 is from one summed in fp32, and how far one summed in bf16 is,
    relative."""
    from deepspeed.utils import safe_get_full_grad

    given = {"precision": "bf16", "tokens": 64 * accumulation, "micro_batch": 1}
    engine, config, plan = nano_engine(shipped(ds_config), **given)
    assert plan.accumulation == accumulation
    network = Transformer(config)
    initialize(network, seed=1)
    network.bfloat16()
    in_fp32, in_bf16 = {}, {}
    for micro, (tokens, labels) in enumerate(next(batches(config, plan, 1))):
        engine.backward(engine(tokens, labels))
        if micro < accumulation - 1:
            engine.step()
        network.zero_grad()
        (network(tokens, labels) / accumulation).backward()
        for name, parameter in network.named_parameters():
            in_fp32[name] = in_fp32.get(name, 0) + parameter.grad.float()
            in_bf16[name] = in_bf16.get(name, 0) + parameter.grad

    def whole(gradients):
        return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])

    expected = whole(in_fp32)
    found = whole({name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()})
    return [((other - expected).norm() / expected.norm()).item() for other in (found, whole(in_bf16))]


@pytest.mark.parametrize("stage", ["zero2", *slow(["zero1", "zero3"])])
def test_gradients_of_micro_batches_are_summed_in_fp32(stage):
    ours, of_bf16_sums = run_distributed(distances, 1, stage, 16, timeout=120)[0]
    assert ours <= 1e-6 and of_bf16_sums >= 1e-3
