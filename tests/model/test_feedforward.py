import math

import pytest
import torch

from model.config import block
from model.feedforward import FeedForward
from model.process_grid import ALONE

SIZES = {"vocab_size": 5, "context_length": 16, "d_model": 24, "ffn_width": 40, "heads": (3,)}

FORMULAS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("ffn", ["swiglu", "mlp"])
@pytest.mark.parametrize("activation", list(FORMULAS))
@pytest.mark.parametrize("bias", [False, True])
def test_feedforward_against_its_formula(ffn, activation, bias):
    torch.manual_seed(0)
    network = FeedForward(
        block("llama", **SIZES, ffn=ffn, activation=activation, ffn_bias=bias), ALONE
    ).double()
    parameters = dict(network.named_parameters())
    names = ["gate", "up", "down"] if ffn == "swiglu" else ["up", "down"]
    kinds = ["weight", "bias"] if bias else ["weight"]
    assert set(parameters) == {f"{name}.{kind}" for name in names for kind in kinds}

    def linear(name, x):
        y = x @ parameters[f"{name}.weight"].T
        return y + parameters[f"{name}.bias"] if bias else y

    x = torch.randn(2, 5, 24, dtype=torch.float64)
    inner = FORMULAS[activation](linear("gate" if ffn == "swiglu" else "up", x))
    if ffn == "swiglu":
        inner = inner * linear("up", x)
    torch.testing.assert_close(network(x), linear("down", inner), rtol=0, atol=1e-13)
