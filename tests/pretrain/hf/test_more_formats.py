"""Folders that transformers has written, of every class and rotary scaling that is read: our network computes
what transformers computes from the folder, and what is exported again is of the same class."""

import json
from typing import Any

import pytest
import torch
import transformers

from model.transformer import Transformer
from pretrain.config.hf_config_file import MODEL_TYPES, read_model
from pretrain.hf.export_folder import write_description
from pretrain.hf.formats import ARCHITECTURES, choose_format
from pretrain.hf.import_folder import parameters
from pretrain.hf.open_model import load_as_written, load_exported
from tests.helpers.exports import write_folder
from tests.helpers.networks import CONFIGS, network
from tests.helpers.refusals import refused

SIZES: dict[str, Any] = {"vocab_size": 260, "hidden_size": 48, "intermediate_size": 96}
SIZES |= {"num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
SIZES |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
CASES = {
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
    "qwen2 with yarn": ("qwen2", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": 9, "head_dim": 16}),
    "mistral without windows": ("mistral", {"sliding_window": None}),
    "smollm3": ("smollm3", {}),
    "smollm3 with windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 9}),
    "smollm3 with its own layers": ("smollm3", {"no_rope_layers": [0, 1, 1, 0], "attention_bias": True}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "yarn in full": (
        "llama",
        {
            "rope_parameters": YARN
            | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}
        },
    ),
    "yarn with magnitudes": ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1}}),
    "qwen3 with yarn": ("qwen3", {"rope_parameters": YARN, "head_dim": 12}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 3.0}}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}}),
}
AGAIN = {"mistral without windows": "llama", "smollm3 with windows": "smollm3"}


def written(kind, changes, folder):
    """A folder of a model with random weights and biases, as transformers writes it."""
    network = getattr(transformers, ARCHITECTURES[kind])
    torch.manual_seed(0)
    theirs = network(network.config_class(**SIZES | {"attn_implementation": "eager"} | changes)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(folder)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, tmp_path):
    kind, changes = CASES[case]
    written(kind, changes, tmp_path / "in")
    theirs, described = load_as_written(tmp_path / "in"), read_model(tmp_path / "in")
    assert type(theirs).__name__ == ARCHITECTURES[kind] and described.format == kind
    ours = Transformer(described.model)
    values = dict(parameters(described.model, described.format, load_exported(tmp_path / "in").state_dict()))
    ids = torch.randint(0, 260, (2, 120))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(values[name])
        expected = theirs(ids).logits
        bound = 1e-5 * expected.abs().max()
        assert (ours(ids) - expected).abs().max() < bound
        assert (load_exported(tmp_path / "in")(ids).logits - expected).abs().max() < bound
        again = choose_format(described.model, "auto")
        assert again == AGAIN.get(case, kind)
        for chosen in {again, "native"}:
            write_folder(ours, tmp_path / chosen, chosen)
            assert read_model(tmp_path / chosen).model == described.model
            assert (load_as_written(tmp_path / chosen)(ids).logits - expected).abs().max() < bound


def test_the_z_loss_comes_back(tmp_path):
    """Of a native folder. No other has it, and none is rejected for it."""
    ours = network(CONFIGS["prism"].replace(z_loss=1e-4))
    write_folder(ours, tmp_path / "native")
    assert read_model(tmp_path / "native").model == ours.config
    write_folder(ours, tmp_path / "llama", "llama")
    assert read_model(tmp_path / "llama").model.z_loss == 0


def test_what_is_left_out_is_reported(tmp_path):
    written("llama", CASES["dynamic"][1], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 4096, "logit_scale": 1.0}))
    assert read_model(tmp_path).notes == [
        "dynamic RoPE scaling, which begins beyond 128 tokens, is left out",
        "sliding_window 4096 is left out: transformers reads none in a llama",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"original_max_position_embeddings": 0, "factor": None}, "original_max_position_embeddings: 0"),
        ({"mscale": "a", "mscale_all_dim": 1.0}, "mscale: 'a'"),
        ({"factor": "4", "mscale": 1.0, "mscale_all_dim": 1.0}, "factor: '4'"),
    ],
)
def test_a_damaged_scaling_is_one_line(changes, said, tmp_path):
    written("llama", {}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": YARN | changes}))
    with refused(f"{said} is not valid; give a positive number"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "missing"),
    {
        "olmo2": "norms after the sublayers",
        "gpt_neox": "attention and feed-forward in parallel",
        "mixtral": "experts",
        "unheard_of": "a reader of its settings and tensors",
    }.items(),
)
def test_a_missing_feature_is_named(kind, missing, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with refused(f"what is missing here: {missing}", f"valid: {', '.join(MODEL_TYPES)}"):
        read_model(tmp_path)


def test_other_programs_find_the_base_and_the_length_before_the_scaling(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    config = transformers.LlamaConfig(
        rope_parameters=rope, max_position_embeddings=128, architectures=["LlamaForCausalLM"], eos_token_id=0
    )
    write_description(tmp_path, config)
    found = json.loads((tmp_path / "config.json").read_text())
    assert (found["rope_theta"], found["original_max_position_embeddings"]) == (1e4, 32)
    assert transformers.LlamaConfig.from_pretrained(tmp_path).rope_parameters == rope


def test_the_valid_scalings_are_listed(tmp_path):
    written("qwen2", {}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for kind in ("default", "llama3", "linear", "yarn", "dynamic"):
        more = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        (tmp_path / "config.json").write_text(
            json.dumps(config | {"rope_parameters": {"rope_type": kind, **more}})
        )
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_type": "longrope"}}))
    with refused("rope_type 'longrope' is not supported", "valid: default, llama3, linear, yarn, dynamic"):
        read_model(tmp_path)
