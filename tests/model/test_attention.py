import pytest
import torch
import torch.nn.functional as F

from model import attention
from model.attention import local_mask, visibility_mask

CPU = torch.device("cpu")


def test_local_mask_sees_the_window_itself_included():
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]).bool()
    assert torch.equal(local_mask(4, 2, CPU), expected)
    assert torch.equal(local_mask(4, 1, CPU), torch.eye(4).bool())
    assert local_mask(4, 4, CPU) is None and local_mask(4, None, CPU) is None


@pytest.mark.parametrize("window", [None, 5, 13, 30])
@pytest.mark.parametrize("span", [(0, 8), (0, 21), (20, 41), (37, 48)])
def test_gathered_keys_in_blocks_of_queries(monkeypatch, span, window):
    """Several blocks, of which the last is smaller, against a whole mask."""
    monkeypatch.setattr(attention, "BLOCK_ROWS", 8)
    generator, rows = torch.Generator().manual_seed(0), span[1] - span[0]
    query, key, value = (torch.randn(1, 2, n, 4, generator=generator).double() for n in (rows, 48, 48))
    found = attention._attend_gathered(query, key, value, None, span, None, window)
    seen = visibility_mask(span, (0, 48), window, CPU)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
