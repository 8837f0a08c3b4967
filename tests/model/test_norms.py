import pytest
import torch

from model.norms import LayerNorm, RMSNorm, build_norm
from model.presets import preset
from model.process_grid import ALONE


def reference(kind, x, weight, bias, eps):
    x = x.double()
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double() + bias.double()


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_against_its_formula_in_fp64(kind, with_bias, dtype):
    torch.manual_seed(0)
    config = preset("prism-nano").replace(norm=kind, norm_bias=with_bias, norm_eps=1e-3)
    norm = build_norm(config, config.d_model, ALONE)
    assert isinstance(norm, RMSNorm if kind == "rmsnorm" else LayerNorm)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_(1.0, 0.5)
    norm.to(dtype)
    x = (torch.randn(3, 7, 48) * 2 + 0.5).to(dtype)
    output = norm(x)
    bias = norm.bias if with_bias else torch.zeros(48)
    expected = reference(kind, x, norm.weight, bias, 1e-3)
    # One rounding to the dtype (two with an rmsnorm's bias): eps/2 relative each, at magnitudes below 8.
    tolerance = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 8 * 2**-8}[dtype]
    assert output.dtype == dtype
    assert (output.double() - expected).abs().max() <= tolerance
