import math

import numpy as np
import pytest
import torch

from model.loss import IGNORED_LABEL
from model.process_grid import ProcessGrid
from pretrain.data.held_out import HeldOutBatches
from pretrain.runtime.world import World

T = 5


def world(rank, ranks, tensor_parallel=1):
    return World(rank, 0, ranks, 1, torch.device("cpu"), grid=ProcessGrid(tensor_parallel=tensor_parallel))


def windows(count):
    """Window w is w * 100 + 0 … T."""
    return (np.arange(count)[:, None] * 100 + np.arange(T + 1)).astype(np.uint16)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("count", "micro_batch"), [(8, 2), (9, 2), (1, 4), (5, 3)])
def test_every_window_is_read_once_in_as_many_batches_on_every_rank(ranks, count, micro_batch):
    seen: list[int] = []
    for rank in range(ranks):
        batches = HeldOutBatches(windows(count), micro_batch, world(rank, ranks))
        assert (batches.count, batches.length) == (count, T)
        made = list(batches)
        assert len(made) == len(batches) == math.ceil(count / (ranks * micro_batch))
        for batch in made:
            assert batch.inputs.shape == batch.labels.shape == (micro_batch, T)
            assert batch.inputs.dtype == batch.labels.dtype == torch.int64 and batch.inputs.is_contiguous()
            assert torch.equal(batch.inputs[:, 0], batch.rows * 100) and not batch.rows[~batch.present].any()
            whole = batch.inputs + 1
            assert torch.equal(batch.labels[batch.present], whole[batch.present])
            filled = batch.labels[~batch.present]
            if batch.present.any():
                assert (filled == IGNORED_LABEL).all()
            else:  # a loss over ignored labels alone would be 0 / 0
                assert torch.equal(filled, whole)
            seen += batch.rows[batch.present].tolist()
    assert sorted(seen) == list(range(count))


def test_ranks_of_a_tensor_group_read_the_same():
    read = [
        [batch.rows.tolist() for batch in HeldOutBatches(windows(7), 2, world(rank, 4, tensor_parallel=2))]
        for rank in range(4)
    ]
    assert read == [[[0, 1], [4, 5]]] * 2 + [[[2, 3], [6, 0]]] * 2
