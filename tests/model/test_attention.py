import pytest
import torch

from model.attention import Attention, local_mask
from model.config import block
from model.process_grid import ALONE

CPU = torch.device("cpu")


def test_local_mask_sees_the_window_itself_included():
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]).bool()
    assert torch.equal(local_mask(4, 2, CPU), expected)
    assert torch.equal(local_mask(4, 1, CPU), torch.eye(4).bool())
    assert local_mask(4, 4, CPU) is None and local_mask(4, None, CPU) is None


def attention_of(**changes):
    sizes = {"vocab_size": 5, "context_length": 16, "d_model": 24, "ffn_width": 8, "heads": (3,)}
    return Attention(block("llama", **{**sizes, **changes}), 0, ALONE).double()


@pytest.mark.parametrize("bias", ["none", "output", "all"])
def test_bias_switch(bias):
    attention = attention_of(attention_bias=bias)
    expected = {"none": [], "output": ["o.bias"], "all": ["q.bias", "k.bias", "v.bias", "o.bias"]}[bias]
    assert [name for name, _ in attention.named_parameters() if "bias" in name] == expected


def test_projection_shapes_follow_heads_and_head_dim():
    attention = attention_of(heads=(4,), kv_heads=(2,), head_dim=(10,))
    shapes = {name: tuple(getattr(attention, name).weight.shape) for name in "qkvo"}
    assert shapes == {"q": (40, 24), "k": (20, 24), "v": (20, 24), "o": (24, 40)}
