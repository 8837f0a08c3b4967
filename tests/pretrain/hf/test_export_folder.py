"""Files that the safetensors library reads back to the bit, in every dtype."""

import pytest
import torch
from safetensors.torch import load_file

from model.errors import UserError
from pretrain.hf.export_folder import describe_gguf, describe_padding, list_parameters, write_weights
from pretrain.hf.formats import folder_config, folder_weights
from tests.helpers.networks import CONFIGS, network

SCALING = {"type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_context_length": 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_written_to_the_bit(dtype, tmp_path):
    ours = network("prism")
    weights = folder_weights(ours.config, "native", list_parameters(ours))
    expected = {name: weight.to(dtype) for name, weight in weights.items()}
    write_weights(tmp_path, weights, dtype)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        ("tapered", "4 heads (4 key/value) of dim 48 and FFNs of width 192"),
        ("uniform", "FFNs of width 256"),
        ("prism", "4 heads (4 key/value) of dim 48"),
    ],
)
def test_the_padding_that_is_printed_is_that_of_the_parts(name, padded):
    model = CONFIGS[name]
    if name == "uniform":
        model = model.replace(ffn_width=(256, 128, 0))
    found = describe_padding(model, folder_config(model, "llama", {}), 1000, 200)
    assert found == f"padded to {padded} in every layer: 1,000 parameters, 200 of them padding"


def test_weights_that_are_not_finite_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"layers\.1\.q is not finite in torch\.float16"):
        write_weights(tmp_path, {"layers.1.q": torch.tensor([1e6])}, torch.float16)


FOURTH = "which layers have positions (it leaves out every fourth)"
GPT2 = {"activation": "gelu_tanh", "attention_scale": "none"}
YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 32}


@pytest.mark.parametrize(
    ("chosen", "changes", "expected"),
    [
        ("llama", {}, ""),
        ("llama", {"activation": "relu2"}, "the activation relu2 (it computes silu)"),
        ("gpt2", {"activation": "gelu_tanh"}, ""),
        ("gpt2", {"activation": "relu2"}, "the activation relu2 (it computes gelu_tanh)"),
        ("llama", {"rope_scaling": SCALING}, ""),
        ("qwen3", {"rope_scaling": SCALING}, "the scaling of positions"),
        ("qwen3", {"local_window": "8x4"}, "attention windows"),
        ("smollm3", {"rope_base": "1e4x3,null"}, ""),
        ("smollm3", {"rope_base": "1e4,null,1e4,null"}, FOURTH),
        ("smollm3", {}, FOURTH),
        ("gpt2", GPT2, "attention_scale none (it divides by sqrt(d_h))"),
        ("llama", {"rope_scaling": YARN}, ""),
        ("llama", {"rope_scaling": YARN | {"truncate": False}}, "YaRN's attention_factor and truncate"),
        ("llama", {"rope_scaling": YARN | {"attention_factor": 1.0}}, "YaRN's attention_factor and truncate"),
    ],
)
def test_what_llama_cpp_would_leave_out_is_said(chosen, changes, expected):
    found = describe_gguf(CONFIGS["prism"].replace(**changes), chosen)
    assert found == (f"llama.cpp ignores {expected}" if expected else "")
