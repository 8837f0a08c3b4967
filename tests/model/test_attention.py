import torch

from model.attention import local_mask

CPU = torch.device("cpu")


def test_local_mask_sees_the_window_itself_included():
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]).bool()
    assert torch.equal(local_mask(4, 2, CPU), expected)
    assert torch.equal(local_mask(4, 1, CPU), torch.eye(4).bool())
    assert local_mask(4, 4, CPU) is None and local_mask(4, None, CPU) is None
