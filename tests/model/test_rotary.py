import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from model.presets import preset
from model.rotary import RotaryTables, rotate, rotate_by_swapping, rotate_plainly
from model.schedules import YarnScaling
from model.transformer import Transformer

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [rotate, rotate_by_swapping])
def test_bits_and_gradients_are_those_of_the_formula(dtype, way):
    """In bf16 the formula's gradient is rounded twice, rotate's once."""
    table = RotaryTables(32).get(8, 10000.0, 32, CPU, dtype)
    # A view of a wider tensor, as the parts of one projection are.
    x = torch.randn(2, 32, 3, 16).to(dtype)[..., 4:12].requires_grad_()
    weights = torch.randn(2, 32, 3, 8).to(dtype)
    expected, output = rotate_plainly(x, table), way(x, table)
    assert torch.equal(output, expected)
    [wanted] = torch.autograd.grad(expected, x, weights)
    [gradient] = torch.autograd.grad(output, x, weights)
    if dtype == torch.bfloat16:
        torch.testing.assert_close(gradient, wanted, rtol=2**-7, atol=2**-7)
    else:
        assert torch.equal(gradient, wanted)


def test_tables_are_the_ones_of_hugging_face_llama():
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, head_dim=64, max_position_embeddings=1024)
    x = torch.randn(1, 1024, 1, 64)
    cosines, sines = LlamaRotaryEmbedding(config)(x, torch.arange(1024)[None])
    expected, _ = apply_rotary_pos_emb(x, x, cosines, sines, unsqueeze_dim=2)
    output = rotate(x, RotaryTables(1024).get(64, 10000.0, 1024, CPU, torch.float32))
    assert (output - expected).abs().max() <= 2e-6  # the same fp32 angles; products may be fused or not


def test_yarn_whose_ramp_ends_beyond_a_heads_pairs():
    """As with a small base or a long original context: the ramp is cut at the dims, not at the pairs."""
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 32768}
    sizes = {"hidden_size": 16, "num_attention_heads": 1, "head_dim": 16}
    config = LlamaConfig(**sizes, max_position_embeddings=131072, rope_parameters=rope)
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    scaling = YarnScaling(type="yarn", factor=4.0, original_context_length=32768)
    cosines, sines = RotaryTables(8, scaling).get(16, 500.0, 8, CPU, torch.float64)
    found = torch.atan2(sines[1, 0], cosines[1, 0])  # the angles of position 1
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=0)


def test_a_cast_of_the_model_leaves_the_tables_in_fp32():
    model = Transformer(preset("prism-nano"))
    tokens = torch.arange(64)[None]
    model(tokens)
    before = {
        head_dim: model.rotary.get(head_dim, 10000.0, 64, CPU, torch.float32) for head_dim in (12, 16, 24)
    }
    model.bfloat16()
    model(tokens)
    for head_dim, table in before.items():
        after = model.rotary.get(head_dim, 10000.0, 64, CPU, torch.bfloat16)
        assert after[0].dtype == torch.float32 and torch.equal(after[0], table[0])
    assert not list(model.buffers()) and not [name for name in model.state_dict() if "rotary" in name]


def test_training_works_after_an_evaluation_in_inference_mode():
    model = Transformer(preset("prism-nano"))
    tokens = torch.arange(64)[None]
    with torch.inference_mode():
        model(tokens)
    model(tokens, tokens).backward()
