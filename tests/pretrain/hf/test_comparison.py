"""The comparison passes what is equal and stops what is not."""

import pytest
import torch

from model.errors import UserError
from pretrain.hf.comparison import compare, kept_positions, our_logits, their_logits
from pretrain.hf.modeling_head_schedule import HeadScheduleForCausalLM
from tests.helpers.networks import network, tokens


def test_a_right_folder_passes_and_one_wrong_weight_is_found(folders):
    ours, rows = network("prism"), tokens(3, 64).numpy()
    theirs = their_logits(HeadScheduleForCausalLM.from_pretrained(folders("prism")), rows)
    assert "equal argmax 100.00% of 192 positions" in compare(our_logits(ours, rows), theirs, torch.float32)
    with torch.no_grad():
        ours.layers[2].attention.v.weight[5, 5] += 0.05
    with pytest.raises(UserError, match="logits differ by"):
        compare(our_logits(ours, rows), theirs, torch.float32)


def test_nan_never_passes():
    ours = torch.ones(1, 2, 3)
    theirs = ours.clone()
    theirs[0, 1, 1] = float("nan")
    for pair in ((ours, theirs), (theirs, ours)):
        with pytest.raises(UserError, match="logits differ by nan"):
            compare(*pair, torch.float32)


def test_positions_include_both_ends():
    kept = kept_positions(1024)
    assert kept[0] == 0 and kept[-1] == 1023 and len(kept) == 64
    assert kept_positions(10).tolist() == list(range(10))
