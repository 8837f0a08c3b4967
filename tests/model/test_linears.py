import torch
from torch import nn

from model.linears import (
    column_linear,
    is_embedding,
    is_linear,
    position_embedding,
    row_linear,
    token_embedding,
)
from model.process_grid import ALONE


def test_linears_have_the_parameters_they_are_asked_for():
    for build in (column_linear, row_linear):
        assert {name: tuple(p.shape) for name, p in build(3, 5, True, ALONE).named_parameters()} == {
            "weight": (5, 3),
            "bias": (5,),
        }
        assert [name for name, _ in build(3, 5, False, ALONE).named_parameters()] == ["weight"]


def test_token_embedding_is_input_and_output():
    embedding = token_embedding(7, 4, ALONE)
    tokens = torch.tensor([[1, 6]])
    assert torch.equal(embedding(tokens), embedding.weight[tokens])
    hidden = torch.randn(2, 3, 4)
    torch.testing.assert_close(embedding(hidden, as_output=True), hidden @ embedding.weight.T)


def test_kinds_are_told_by_type():
    assert is_linear(column_linear(3, 5, True, ALONE)) and is_linear(row_linear(3, 5, True, ALONE))
    assert is_embedding(token_embedding(3, 5, ALONE)) and is_embedding(position_embedding(3, 5, ALONE))
    assert not is_linear(token_embedding(3, 5, ALONE)) and not is_embedding(nn.LayerNorm(3))
