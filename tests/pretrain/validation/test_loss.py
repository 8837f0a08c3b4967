"""The held-out loss against one computed over all windows at once."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from pretrain.runtime.world import World
from pretrain.validation.loss import Validation
from tests.helpers.distributed import run_distributed

VOCABULARY = 11


class Engine(torch.nn.Module):
    """Stands for a DeepSpeed engine: the mean loss of a bigram table over the labels that count."""

    def __init__(self):
        super().__init__()
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)).double()
        self.calls = 0

    def forward(self, tokens, labels):
        assert not self.training
        self.calls += 1
        return F.cross_entropy(self.table[tokens].flatten(0, 1), labels.flatten(), ignore_index=-100)


def windows(count):
    return np.random.default_rng(1).integers(0, VOCABULARY, (count, 6))


def validate(count, micro_batch):
    world = World(dist.get_rank(), 0, dist.get_world_size(), 1, torch.device("cpu"))
    engine = Engine().train()
    result = Validation(windows(count), 77, micro_batch, world).run(engine)
    assert engine.training
    return result.loss, result.bpb, engine.calls


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("count", "micro_batch"), [(8, 2), (9, 2), (1, 4), (5, 3)])
def test_every_window_counts_once(ranks, count, micro_batch):
    tokens = torch.from_numpy(windows(count))
    losses = F.cross_entropy(
        Engine().table[tokens[:, :-1]].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    calls = set()
    for loss, bpb, made in run_distributed(validate, ranks, count, micro_batch):
        assert loss == pytest.approx(losses.mean().item(), rel=1e-12)
        assert bpb == pytest.approx(losses.sum().item() / math.log(2) / 77, rel=1e-12)
        calls.add(made)
    assert calls == {math.ceil(count / (ranks * micro_batch))}  # as many forward passes on every rank
