"""A classifier's accuracy and loss against those computed over all examples at once."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from pretrain.classification.hook import Accuracy, AccuracyHook, AccuracyResult
from pretrain.runtime.world import World
from tests.helpers.distributed import run_distributed
from tests.pretrain.test_report import closing_of

CLASSES = 3


class Engine(torch.nn.Module):
    """Stands for a DeepSpeed engine: logits of each position by its token and its place."""

    def __init__(self):
        super().__init__()
        self.table = torch.randn(6, 11, CLASSES, generator=torch.Generator().manual_seed(0)).double()
        self.calls = 0

    def forward(self, tokens):
        assert not self.training
        self.calls += 1
        return self.table[torch.arange(tokens.shape[1]), tokens]


def examples(count):
    """Inputs and labels [count, 6], each label at a place of its own."""
    generator = np.random.default_rng(1)
    inputs = generator.integers(0, 11, (count, 6))
    labels = np.full((count, 6), -100)
    for row in range(count):
        labels[row, generator.integers(0, 6)] = generator.choice(CLASSES, p=[0.2, 0.5, 0.3])
    return inputs, labels


def measure(count, micro_batch):
    world = World(dist.get_rank(), 0, dist.get_world_size(), 1, torch.device("cpu"))
    engine = Engine().train()
    result = Accuracy(*examples(count), micro_batch, world).run(engine)
    assert engine.training
    return result, engine.calls


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("count", "micro_batch"), [(8, 2), (9, 2), (1, 4), (5, 3)])
def test_every_example_counts_once(ranks, count, micro_batch):
    inputs, labels = (torch.from_numpy(part) for part in examples(count))
    rows, places = (labels != -100).nonzero(as_tuple=True)
    logits = Engine().table[places, inputs[rows, places]]
    classes = labels[rows, places]
    calls = set()
    for result, made in run_distributed(measure, ranks, count, micro_batch):
        assert result.loss == pytest.approx(F.cross_entropy(logits, classes).item(), rel=1e-12)
        assert result.accuracy == pytest.approx(
            (logits.argmax(1) == classes).double().mean().item(), rel=1e-12
        )
        assert result.examples == count
        assert result.most_frequent == classes.bincount().max().item() / count
        calls.add(made)
    assert calls == {math.ceil(count / (ranks * micro_batch))}  # as many forward passes on every rank


def test_the_end_of_a_classifier(tmp_path, monkeypatch):
    """Accuracy beside that of the most frequent class; no sample, no scores of language models."""
    hook = AccuracyHook.__new__(AccuracyHook)
    hook.result = AccuracyResult(0.5, 0.875, 1600, 0.25)
    lines, did = closing_of(tmp_path, monkeypatch, hook, is_text=False)
    assert did == ["count"]
    assert "result   accuracy 87.50%, validation loss 0.5000 nats per example" in lines
    assert "compare  always the most frequent class: accuracy 25.00% of the same 1,600 examples" in lines
    commands = [line.split()[0] for line in lines[lines.index("next") + 1 :]]
    assert "convert" in commands and "evaluate" not in commands
