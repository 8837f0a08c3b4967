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


@pytest.mark.parametrize("scale", ["sqrt_head_dim", "none"])
@pytest.mark.parametrize("window", [None, 5])
def test_core_against_an_explicit_softmax(scale, window):
    torch.manual_seed(0)
    attention = attention_of(attention_scale=scale, heads=(6,), kv_heads=(2,), positions="learned")
    hidden = torch.randn(2, 16, 24, dtype=torch.float64)
    output = attention(hidden, None, local_mask(16, window, CPU))
    query, key, value = attention.q(hidden), attention.k(hidden), attention.v(hidden)
    heads = []
    for head in range(6):
        group = head // 3  # three query heads share a key/value head
        q = query[..., 4 * head : 4 * head + 4]
        k, v = (x[..., 4 * group : 4 * group + 4] for x in (key, value))
        logits = q @ k.transpose(-1, -2) * (0.5 if scale == "sqrt_head_dim" else 1.0)
        for i in range(16):
            for j in range(16):
                if j > i or (window is not None and j <= i - window):
                    logits[:, i, j] = float("-inf")
        heads.append(logits.softmax(-1) @ v)
    torch.testing.assert_close(output, attention.o(torch.cat(heads, -1)), rtol=0, atol=1e-13)


def test_the_future_is_invisible():
    attention = attention_of(positions="learned")
    hidden = torch.randn(1, 16, 24, dtype=torch.float64)
    changed = hidden.clone()
    changed[:, 9:] += 1
    assert torch.equal(attention(hidden, None, None)[:, :9], attention(changed, None, None)[:, :9])
