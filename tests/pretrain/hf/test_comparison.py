"""The comparison passes what is equal and stops what is not."""

import numpy as np
import pytest
import torch

from model.errors import UserError
from pretrain.hf.comparison import compare, folder_logits, kept_positions, our_logits
from tests.helpers.exports import write_folder
from tests.helpers.networks import network, tokens


@pytest.fixture(scope="module")
def rows():
    return tokens(3, 64).numpy().astype(np.int64)


@pytest.mark.parametrize("chosen", ["native", "llama"])
def test_a_right_folder_passes(chosen, rows, tmp_path):
    ours = network("prism")
    folder = write_folder(ours, tmp_path / "hf", chosen)
    comparison = compare(our_logits(ours, rows), folder_logits(folder, rows), torch.float32)
    assert comparison.problem is None
    assert comparison.maximum < 1e-6 and comparison.equal_argmax == 1.0
    assert comparison.positions == 3 * 64


def test_one_wrong_weight_is_found(rows, tmp_path):
    ours = network("prism")
    folder = write_folder(ours, tmp_path / "hf")
    with torch.no_grad():
        ours.layers[2].attention.v.weight[5, 5] += 0.05
    comparison = compare(our_logits(ours, rows), folder_logits(folder, rows), torch.float32)
    assert comparison.problem and "logits differ" in comparison.problem


def test_an_argmax_that_differs_beyond_a_tie():
    ours = torch.zeros(1, 1, 3)
    ours[0, 0] = torch.tensor([1.0, 1.0 - 8e-5, 0.0])
    theirs = ours.clone()
    theirs[0, 0, 1] = 1.0 + 1e-5
    comparison = compare(ours, lambda window: theirs[window].clone(), torch.float32)
    assert comparison.maximum < 1e-4 and comparison.problem and "most likely token" in comparison.problem
    ours[0, 0, 1] = theirs[0, 0, 1] - 1.1e-5  # a tie
    assert compare(ours, lambda window: theirs[window].clone(), torch.float32).problem is None


def test_nan_never_passes():
    ours = torch.ones(1, 2, 3)
    theirs = ours.clone()
    theirs[0, 1, 1] = float("nan")
    assert compare(ours, lambda window: theirs[window].clone(), torch.float32).problem
    with pytest.raises(UserError, match="not finite"):
        compare(theirs, lambda window: ours[window].clone(), torch.float32)


def test_positions_include_both_ends():
    kept = kept_positions(1024)
    assert kept[0] == 0 and kept[-1] == 1023 and len(kept) == 64
    assert kept_positions(10).tolist() == list(range(10))
