import re

import pytest
import torch
from torch import nn

from model.parameters import ParameterRole, parameter_roles, parameter_specs
from model.presets import preset
from model.transformer import Transformer


def expected_role(name):
    """The role read from the name: independent of parameter_roles, which goes by module."""
    layer = re.match(r"layers\.(\d+)\.", name)
    number = int(layer[1]) if layer else None
    own = name.rsplit(".", 1)[1]
    if "norm" in name:
        return ParameterRole("norm" if own == "weight" else "bias", "norm", number)
    if "embedding" in name:
        return ParameterRole("embedding", "embedding", None)
    if name == "output.weight":
        return ParameterRole("matrix", "output", None)
    part = "ffn" if ".ffn." in name else name.split(".")[3]
    return ParameterRole("matrix" if own == "weight" else "bias", part, number)


EVERYTHING = preset("gpt2-nano").replace(ffn="swiglu", heads=(2, 3), tie_embeddings=False)


@pytest.mark.parametrize("config", [preset("prism-nano"), preset("gpt2-nano"), EVERYTHING])
def test_role_of_every_parameter(config):
    with torch.device("meta"):
        model = Transformer(config)
    roles = parameter_roles(model)
    names = [name for name, _ in model.named_parameters()]
    assert list(roles) == names
    assert roles == {name: expected_role(name) for name in names}


def test_parameter_names_are_the_published_ones():
    with torch.device("meta"):
        model = Transformer(EVERYTHING)
    names = ["token_embedding.weight", "position_embedding.weight"]
    for layer in range(2):
        parts = [*(f"attention.{x}" for x in "qkvo"), "ffn_norm", "ffn.gate", "ffn.up", "ffn.down"]
        for module in ["attention_norm", *parts]:
            names += [f"layers.{layer}.{module}.weight", f"layers.{layer}.{module}.bias"]
    names += ["final_norm.weight", "final_norm.bias", "output.weight"]
    assert [name for name, _ in model.named_parameters()] == names == list(model.state_dict())


def test_an_unknown_module_is_an_error():
    model = Transformer(preset("prism-nano"))
    model.layers[0].add_module("extra", nn.Linear(3, 3))
    with pytest.raises(TypeError, match=r"layers\.0\.extra\.weight: a Linear has no known role"):
        parameter_roles(model)


@pytest.mark.parametrize("name", ["prism-nano", "gpt2-nano", "gptneo-tiny"])
def test_specs_describe_the_whole_model(name):
    config = preset(name).replace(tie_embeddings=False)
    model = Transformer(config)
    specs = parameter_specs(config)
    assert {name: spec.role for name, spec in specs.items()} == parameter_roles(model)
    assert [(name, spec.shape) for name, spec in specs.items()] == [
        (name, tuple(parameter.shape)) for name, parameter in model.named_parameters()
    ]
    assert {name for name, spec in specs.items() if spec.vocabulary} == {
        name for name, spec in specs.items() if spec.shape[0] == config.padded_vocab_size()
    }
