"""A config.json from elsewhere: each value of each field is taken for what it is, or refused in one line at
once, before anything is made of it."""

import json
import math
import time

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from model.blocks import block
from model.transformer import Transformer
from pretrain.config.hf_config_file import read_model
from pretrain.hf.configuration_head_schedule import HeadScheduleConfig
from pretrain.hf.export_folder import special_ids
from pretrain.hf.formats import folder_config
from pretrain.hf.import_folder import parameters
from pretrain.hf.model_folder import check_folder
from pretrain.hf.open_model import load_exported
from tests.helpers.exports import write_folder
from tests.helpers.networks import CONFIGS, LLAMA, network
from tests.helpers.refusals import refused

FORMATS = {"native": "gptneo_windows", "llama": "uniform", "qwen3": "qwen3", "gpt2": "gpt2"}
KINDS: dict[str, object] = {
    "null": None,
    "true": True,
    "text": "evil",
    "negative": -1,
    "zero": 0,
    "billion": 10**9,
    "beyond 64 bits": 10**30,
    "fraction": 1.5,
    "NaN": math.nan,
    "infinity": math.inf,
    "empty list": [],
    "mapping": {"0": {"num_attention_heads": "x"}},
}
NUMBERS = "norm_eps rms_norm_eps layer_norm_epsilon rope_theta initializer_range "
DROPOUTS = "attention_dropout resid_pdrop embd_pdrop attn_pdrop z_loss "
IDS = "bos_token_id eos_token_id pad_token_id pretraining_tp "
GPT2_ONLY = "add_cross_attention scale_attn_by_inverse_layer_idx "
SCHEDULES = "head_dim num_key_value_heads per_layer_config layer_types sliding_window "
NOTES = "architectures auto_map dtype use_cache transformers_version reorder_and_upcast_attn "
SWITCHES = "attention_scale_base base_width block_width final_logit_softcapping logit_scale rotary_scaling "
# The fields that take a value of the kind; for all others it is refused.
TAKEN = {
    "null": SCHEDULES + SWITCHES + "n_inner n_ctx rope_parameters " + NOTES + IDS + GPT2_ONLY,
    "true": "tie_word_embeddings attention_bias mlp_bias norm_bias scale_attn_weights use_cache "
    "reorder_and_upcast_attn use_sliding_window",
    "text": "dtype transformers_version",
    "negative": IDS,
    "zero": DROPOUTS + IDS + GPT2_ONLY + "max_window_layers",
    "billion": NUMBERS + DROPOUTS + IDS + "n_ctx sliding_window final_logit_softcapping max_window_layers",
    "fraction": NUMBERS + DROPOUTS + "final_logit_softcapping",
    "empty list": "architectures eos_token_id",
    "mapping": "auto_map rope_parameters",
}
NONE_OF_IT = {("zero", "intermediate_size", "native")}  # a model without feed-forward networks
NEEDED = {("true", "attention_bias", "native")}
NEEDED |= {("null", "head_dim", "qwen3"), ("null", "sliding_window", "qwen3")}
# There the base is also in rope_parameters.
NEEDED |= {(kind, "rope_theta", name) for kind in ("billion", "fraction") for name in ("llama", "qwen3")}


@pytest.fixture(scope="module", params=FORMATS)
def exported(request, tmp_path_factory):
    """A folder of the format, and its configuration."""
    folder = tmp_path_factory.mktemp("exported") / request.param
    write_folder(network(FORMATS[request.param]), folder, request.param)
    return folder, json.loads((folder / "config.json").read_text())


def checked(folder, text):
    """What a configuration with this text describes; the time that it takes is bounded."""
    (folder / "config.json").write_text(text)
    began = time.process_time()
    try:
        return check_folder(folder)
    finally:
        assert time.process_time() - began < 3


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_is_checked_for_each_kind_of_value(exported, kind):
    folder, config = exported
    for name in [name for name in config if not name.startswith("summary_")]:
        text = json.dumps(config | {name: KINDS[kind]})
        taken = name in TAKEN.get(kind, "").split() and (kind, name, folder.name) not in NEEDED
        if taken or (kind, name, folder.name) in NONE_OF_IT:
            checked(folder, text)
            continue
        with refused(begins=f"model: {folder}/config.json"):
            checked(folder, text)
            pytest.fail(f"{name}: {KINDS[kind]!r} was taken")


def test_the_rotary_base_may_be_written_twice(exported):
    folder, config = exported
    if "rope_parameters" not in config:
        return
    base = config["rope_parameters"]["rope_theta"]
    assert config["rope_theta"] == base
    once = {name: value for name, value in config.items() if name != "rope_theta"}
    assert checked(folder, json.dumps(config)).model == checked(folder, json.dumps(once)).model
    with refused("rope_theta 5000 contradicts the 10000.0", begins=f"model: {folder}/config.json"):
        checked(folder, json.dumps(config | {"rope_theta": 5000}))


@pytest.mark.parametrize("text", ["[" * 10**5, "{", "[]", "null", '{"a": 1, "a": 2}', "\0", "{}", "9" * 5000])
def test_what_is_no_configuration_is_refused(exported, text):
    with refused(begins=f"model: {exported[0]}/config.json"):
        checked(exported[0], text)
    deep = json.dumps(exported[1])[:-1] + ', "more": ' + '{"a":' * 10**5 + "1" + "}" * (10**5 + 1)
    with refused(begins=f"model: {exported[0]}/config.json"):
        checked(exported[0], deep)


@pytest.mark.parametrize("name", [*CONFIGS])
def test_what_is_read_is_what_transformers_reads(name, tmp_path):
    """The configuration made from ours is the one that transformers makes of the file."""
    classes = {"native": HeadScheduleConfig, "llama": LlamaConfig, "qwen3": Qwen3Config, "gpt2": GPT2Config}
    for chosen in ["native", *(kind for kind, family in FORMATS.items() if family == name)]:
        folder = write_folder(network(name), tmp_path / chosen, chosen)
        described = read_model(folder)
        assert (described.model, described.format, described.notes) == (CONFIGS[name], chosen, [])
        theirs = classes[chosen].from_pretrained(folder)
        ours = folder_config(described.model, chosen, special_ids(1) | {"dtype": "float32"})
        assert ours.to_json_string() == theirs.to_json_string()


def test_the_factor_on_the_logits_is_the_one_of_our_network(tmp_path):
    folder = write_folder(network("modern"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for factor in (None, 32 / 48):
        assert checked(folder, json.dumps(config | {"logit_scale": factor})).model == CONFIGS["modern"]
    with refused("logit_scale: 0.5 is not supported with base_width 32; valid: 0.666666"):
        checked(folder, json.dumps(config | {"logit_scale": 0.5}))
    with refused("logit_scale: 0.5 is not supported with base_width None; valid: 1.0"):
        checked(
            folder,
            json.dumps(config | {"parametrization": "standard", "base_width": None, "logit_scale": 0.5}),
        )


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Qwen3ForCausalLM])
def test_llama_3s_wavelengths_come_in_and_go_out(kind, tmp_path):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **scaling, "original_max_position_embeddings": 32}
    sizes = {"vocab_size": 260, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
    torch.manual_seed(0)
    theirs = kind(kind.config_class(**sizes, **heads, rope_parameters=rope)).eval()
    theirs.save_pretrained(tmp_path / "in")
    described = read_model(tmp_path / "in")
    assert described.model.rope_scaling is not None and described.model.rope_base == 5e5
    ids = torch.randint(0, 260, (2, 120))
    ours = Transformer(described.model)
    loaded = load_exported(tmp_path / "in", torch.float32)
    values = dict(parameters(described.model, described.format, loaded.state_dict()))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.zero_()[: len(values[name])] = values[name]
        expected = theirs(ids).logits
        assert (ours(ids) - expected).abs().max() < 1e-5
        for chosen in (theirs.config.model_type, "native"):
            write_folder(ours, tmp_path / chosen, chosen)
            assert read_model(tmp_path / chosen).model == described.model
            assert (load_exported(tmp_path / chosen)(ids).logits - expected).abs().max() < 1e-5
        again = kind.from_pretrained(tmp_path / theirs.config.model_type).eval()
        assert (again(ids).logits - expected).abs().max() < 1e-5


LEFT_OUT = """rope_parameters layer_types head_dim num_key_value_heads mlp_bias attention_bias hidden_act
    rope_theta n_inner scale_attn_weights activation_function dtype"""


@pytest.mark.parametrize("older", [{}, {"rope_theta": 10000.0, "rope_scaling": None}])
def test_older_names_and_what_older_folders_leave_out(exported, older, tmp_path):
    kept = {"native": LEFT_OUT, "qwen3": "head_dim num_key_value_heads"}.get(exported[0].name, "").split()
    left_out = set(LEFT_OUT.split()) - set(kept)
    config = {name: value for name, value in exported[1].items() if name not in left_out}
    (tmp_path / "config.json").write_text(json.dumps(config | older))
    assert read_model(tmp_path).model == CONFIGS[FORMATS[exported[0].name]]


QWEN3: dict[str, object] = {"vocab_size": 260, "hidden_size": 48, "intermediate_size": 96}
QWEN3 |= {"model_type": "qwen3", "max_position_embeddings": 64}
QWEN3 |= {"num_hidden_layers": 3, "num_attention_heads": 64}
WINDOWS = [
    {},
    {"use_sliding_window": True},
    {"use_sliding_window": True, "max_window_layers": 1},
    {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8, "num_key_value_heads": 4},
    {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1, "head_dim": 24},
    {"sliding_window": 8, "max_window_layers": 1, "attention_bias": True, "rope_theta": 1e6},
    {"use_sliding_window": True, "layer_types": ["sliding_attention"] + ["full_attention"] * 2},
]


@pytest.mark.parametrize("change", WINDOWS)
def test_a_qwen3s_windows_and_defaults_are_those_of_transformers(change, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | change))
    model, theirs = read_model(tmp_path).model, Qwen3Config.from_pretrained(tmp_path)
    windows = [theirs.sliding_window if kind[0] == "s" else None for kind in theirs.layer_types]
    assert [model.layer_window(layer) for layer in range(3)] == windows
    ours = folder_config(model, "qwen3", {"architectures": None}).to_dict()
    derived = ("sliding_window", "use_sliding_window", "max_window_layers", "architectures")
    expected = theirs.to_dict()
    assert {name for name in expected if expected[name] != ours[name]} <= {*derived, "_name_or_path"}


def test_a_window_that_is_not_given_is_missed(tmp_path):
    kinds = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | kinds))
    with refused("layer_types: 'sliding_attention' has no window; set use_sliding_window"):
        read_model(tmp_path)


LACKING = {
    "RoPE scaling": {"rope_scaling": {"rope_type": "su", "factor": 8.0, "rope_theta": 5e5}},
    "RoPE scaling;": {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}},
    "quantized weights": {"quantization_config": {"quant_method": "fp8"}},
    "experts": {"model_type": "mixtral"},
    "scaled by the root": {"model_type": "gemma"},
    "in parallel": {"model_type": "phi"},
}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(("words", "change"), LACKING.items())
def test_what_is_missing_is_named(words, change, kind, tmp_path):
    config = folder_config(CONFIGS[FORMATS[kind]], kind, {}).to_dict() | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused("what is missing here:", words, begins=f"model: {tmp_path}/config.json"):
        read_model(tmp_path)


def test_a_long_context_that_fits_comes_in(tmp_path):
    config = folder_config(CONFIGS["uniform"], "llama", {}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131072}))
    assert read_model(tmp_path).model.context_length == 131072


@pytest.mark.parametrize("chosen", ["native", "smollm3"])
def test_a_model_without_positions_in_any_layer(tmp_path, chosen):
    config = block("llama", **LLAMA, heads=(4, 4), rope_base=None, norm_eps=1e-6)
    write_folder(network(config), tmp_path, chosen)
    assert read_model(tmp_path).model == config
