"""No parameter is used in slices: compiled code may give such a parameter wrong gradients, without an error
(pytorch issue 193061)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.blocks import block
from model.initialization import initialize
from model.transformer import Fused, Transformer

SHAPE = {"vocab_size": 260, "context_length": 32, "d_model": 48, "ffn_width": 64}
SLICING = {"as_strided", "narrow", "select", "slice", "split", "split_with_sizes", "unbind"}


class Slices(TorchDispatchMode):
    """Collects the names of parameters that are sliced in the block, themselves or views of them."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.names = {p.untyped_storage().data_ptr(): name for name, p in network.named_parameters()}
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operator.overloadpacket.__name__ in SLICING and isinstance(args[0], Tensor):
            self.found |= {self.names.get(args[0].untyped_storage().data_ptr(), "")} - {""}
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gptneo"])
@pytest.mark.parametrize("fused", ["all", "loss", "none"])
def test_no_parameter_is_sliced(kind: str, fused: Fused) -> None:
    network = Transformer(block(kind, **SHAPE, heads=(1, 2, 3)), fused=fused)
    initialize(network, 0)
    tokens = torch.randint(0, 260, (2, 33))
    with Slices(network) as slices:
        network(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
    assert slices.found == set()


def test_a_slice_is_noticed() -> None:
    network = torch.nn.Linear(8, 6)
    for use in (lambda w: w[:3], lambda w: w.t()[2:], lambda w: w.view(2, 3, 8)[0], lambda w: w.chunk(2)[1]):
        with Slices(network) as slices:
            use(network.weight).sum().backward()
        assert slices.found == {"weight"}
