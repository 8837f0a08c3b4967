"""Updates out of line are skipped before they are applied, at every stage."""

from __future__ import annotations

import random
import statistics
from unittest import mock

import pytest
import torch

from pretrain.checkpoint.state import read_state
from pretrain.optim.spikes import LEAST, WINDOW, SpikeGuard
from tests.helpers.distributed import run_distributed
from tests.helpers.marks import slow
from tests.helpers.training import curve, nano_run, session


def offered(guard, loss, norm):
    guard.expect(torch.tensor(loss, dtype=torch.float64))
    return guard.spike(norm)


def test_against_the_rule_by_hand():
    generator = random.Random(0)
    guard = SpikeGuard(3)
    losses, norms = [], []
    for step in range(400):
        loss, norm = generator.gauss(5, 0.2), generator.gauss(1, 0.1)
        if step % 37 == 36:
            loss += generator.choice([0, 0.5, 1])
            norm += generator.choice([0, 0.3, 1])
        expected = step >= LEAST and any(
            value > statistics.fmean(seen[-WINDOW:]) + 3 * statistics.stdev(seen[-WINDOW:])
            for value, seen in ((loss, losses), (norm, norms))
        )
        assert offered(guard, loss, norm) == expected, step
        assert (guard.reason is not None) == expected
        losses.append(loss)
        norms.append(norm)


def test_a_new_level_is_accepted():
    guard = SpikeGuard(6)
    for step in range(WINDOW):
        offered(guard, 5 + 0.01 * (step % 3), 1.0 + 0.01 * (step % 2))
    skipped = [offered(guard, 9.0 + 0.01 * (step % 3), 1.0) for step in range(10)]
    assert skipped[0] and not skipped[-1]


def test_values_that_are_no_numbers_are_left_to_others():
    guard = SpikeGuard(6)
    assert not offered(guard, float("nan"), 1.0) and not offered(guard, 1.0, float("inf"))
    assert not guard.losses and not guard.norms


def test_it_goes_on_in_another_session():
    one = SpikeGuard(6)
    for step in range(100):
        offered(one, 5 + 0.1 * (step % 5), 1 + 0.1 * (step % 3))
    other = SpikeGuard(6, **one.recent())
    for value in (5.2, 7.0, 5.3, 9.0):
        assert offered(one, value, 1.1) == offered(other, value, 1.1)
    assert one.recent() == other.recent()


def session_with_a_spike(run, stage, spike_at):
    """A session in which, at a step, the loss or the gradient of one rank is a hundred times as large."""
    from pretrain import trainer
    from pretrain.optim import spikes

    original = trainer.Trainer._forward_backward

    def forward_backward(self, batches):
        world = self.session.world
        if self.state.step == spike_at and world.rank == world.size - 1:
            hook = self.engine.module.register_forward_hook(lambda module, inputs, loss: 100 * loss)
            try:
                return original(self, batches)
            finally:
                hook.remove()
        return original(self, batches)

    patched = mock.patch.object(trainer.Trainer, "_forward_backward", forward_backward)
    with patched, mock.patch.object(spikes, "LEAST", 4):
        return session(run, stage)


CASES = [(2, "fp32"), *slow([(1, "bf16"), (3, "bf16")])]


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_the_update_is_not_applied(small_folder, tmp_path, stage, precision):
    """After the spike the loss goes on at its level; without the guard the run with the spike is another
    one."""
    rows = {}
    for name, sigmas in (("guarded", "6"), ("open", "0")):
        settings = f"--name {name} --skip_spikes {sigmas} --precision {precision} --steps 10"
        run = nano_run(small_folder, tmp_path, settings, "--optimizer.gradient_clipping 0")
        ended = run_distributed(session_with_a_spike, 2, run, stage, 7, timeout=120)
        assert ended == [([], None)] * 2
        rows[name] = curve(run.folder)
    guarded, unguarded = rows["guarded"], rows["open"]
    assert guarded[:7] == unguarded[:7], "until then nothing differs"
    assert [row["skipped"] for row in guarded] == [0] * 7 + [1] * 3
    assert [row["skipped"] for row in unguarded] == [0] * 10
    # The figures of the skipped step are there, and are its own.
    assert guarded[7]["train_loss"] == unguarded[7]["train_loss"] > 100
    assert guarded[7]["grad_norm"] == pytest.approx(unguarded[7]["grad_norm"], rel=1e-6)
    assert guarded[8]["train_loss"] < 7


def test_the_guard_compares_the_reported_loss(small_folder, tmp_path):
    """With a z loss, too: what its message names is found in the run's metrics."""
    settings = "--skip_spikes 6 --steps 3 --validation.every 0 --architecture.z_loss 0.1"
    run = nano_run(small_folder, tmp_path, settings)
    assert run_distributed(session, 2, run) == [([], None)] * 2
    losses = read_state(run.folder / "checkpoints/step_000003").recent["losses"]
    assert losses == [row["train_loss"] for row in curve(run.folder)]
