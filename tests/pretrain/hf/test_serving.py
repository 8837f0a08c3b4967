"""What servers and transformers' own parallelism ask of the exported architecture.

vLLM itself is not installed here. What is checked is what its documentation ("Writing custom models",
Transformers modeling backend) asks for, and the way its 0.33 calls a model: see docs/huggingface.md.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModel, Qwen3Config

from pretrain.hf.configuration_head_schedule import HeadScheduleConfig
from pretrain.hf.modeling_head_schedule import HeadScheduleAttention, HeadScheduleForCausalLM
from tests.helpers.distributed import run_distributed
from tests.helpers.networks import CONFIGS, network, relative, tokens

FP32 = 1e-5


def plain_attention(query, key, value, scaling, allowed):
    """q [1, h, T, d_h], k and v [1, kv, T, d_h], allowed [T, T] -> [1, T, h, d_h], written out in fp64."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = (query.double() @ key.transpose(2, 3) * scaling).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).to(query.dtype)


def window_mask(length, window):
    places = torch.arange(length)
    distance = places[:, None] - places[None]
    return (distance >= 0) & (distance < (window or length))


@pytest.mark.parametrize("name", ["head_dim", "gptneo_windows"])
def test_a_plugged_in_attention_is_called_for_every_layer_with_its_own_heads(name, folders):
    """AttentionInterface.register, as a server does it; the model hands it no mask and the layer's own
    scale."""
    model, ids, calls = CONFIGS[name], tokens(1, 40), []

    def recorded(module, query, key, value, attention_mask, scaling, sliding_window=None, **kwargs):
        assert attention_mask is None and kwargs["tag"] == "passed down"
        heads = query.shape[1], key.shape[1], query.shape[3]
        calls.append((module.layer_idx, *heads, scaling, sliding_window))
        allowed = window_mask(query.shape[2], sliding_window)
        return plain_attention(query, key, value, scaling, allowed), None

    AttentionInterface.register("recorded", recorded)
    theirs = HeadScheduleForCausalLM.from_pretrained(folders(name), attn_implementation="recorded").eval()
    with torch.no_grad():
        assert relative(theirs(ids, tag="passed down").logits, network(name)(ids)) <= FP32
    expected = []
    for layer in range(model.num_layers):
        head_dim = model.layer_head_dim(layer)
        scale = 1.0 if model.attention_scale == "none" else head_dim**-0.5
        window = model.layer_window(layer)
        expected.append((layer, model.heads[layer], model.layer_kv_heads(layer), head_dim, scale, window))
    assert calls == expected


class PlayedAttention(torch.nn.Module):
    """Stands where vLLM puts its attention layer: flat q, k, v of several sequences in one row."""

    def __init__(self, heads, kv_heads, head_dim, scale, lengths):
        super().__init__()
        self.shapes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, head_dim)]
        self.scale, self.lengths = scale, lengths

    def forward(self, *flat):
        """q, k, v [tokens, heads * d_h] -> [tokens, heads * d_h]."""
        pairs = zip(flat, self.shapes, strict=True)
        parts = [x.unflatten(1, shape).transpose(0, 1)[None] for x, shape in pairs]
        outputs = []
        for query, key, value in zip(*(part.split(self.lengths, 2) for part in parts), strict=True):
            mask = window_mask(query.shape[2], None)
            outputs.append(plain_attention(query, key, value, self.scale, mask)[0].flatten(1))
        return torch.cat(outputs)


@pytest.mark.parametrize("name", ["grouped", "gpt2_prism"])
def test_the_way_vllm_runs_a_model(name, folders):
    """Its 0.33 sets the implementation on the configuration, builds AutoModel from it on the meta device,
    reads every layer's geometry from per_layer_config, attaches an attention layer to each module and calls
    the bare decoder with several sequences in one row, each with positions from 0."""
    lengths = [11, 7]
    first, second = tokens(1, lengths[0], seed=1), tokens(1, lengths[1], seed=2)

    def dispatch(module, query, key, value, attention_mask, **kwargs):
        flat = (x.transpose(1, 2).reshape(x.shape[2], -1) for x in (query, key, value))
        return module.server_attention(*flat), None

    AttentionInterface.register("played_server", dispatch)
    config = AutoConfig.from_pretrained(folders(name), trust_remote_code=True)
    config._attn_implementation = "played_server"
    with torch.device("meta"):
        theirs = AutoModel.from_config(config, trust_remote_code=True, dtype=torch.float32)
    assert theirs.is_backend_compatible()
    weights = HeadScheduleForCausalLM.from_pretrained(folders(name))
    theirs.load_state_dict(weights.model.state_dict(), assign=True)
    if theirs.rotary_emb is not None:  # vLLM leaves buffers where they were made
        theirs.rotary_emb = weights.model.rotary_emb
    for module in theirs.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "q_proj"):
            layer = config.per_layer_config[module.layer_idx]
            assert module.head_dim == layer.head_dim  # what its fused projections take the head size from
            shape = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
            module.server_attention = PlayedAttention(*shape, module.scaling, lengths)
    row = torch.cat([first, second], 1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        hidden = theirs.eval()(input_ids=row, use_cache=False, position_ids=positions, return_dict=False)[0]
        logits = weights.lm_head(hidden)
        assert relative(logits[:, : lengths[0]], network(name)(first)) <= FP32
        assert relative(logits[:, lengths[0] :], network(name)(second)) <= FP32


def test_the_source_says_which_attention_is_called():
    """vLLM 0.33 finds the module that attends by reading its source: one look-up in ALL_ATTENTION_FUNCTIONS,
    one call of what was found, with a scaling that it can evaluate on the module."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(HeadScheduleAttention.forward)))
    found = {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and "ALL_ATTENTION_FUNCTIONS" in ast.unparse(node.value)
    }
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", None) in found]
    assert len(calls) == 1
    scalings = [ast.unparse(word.value) for word in calls[0].keywords if word.arg == "scaling"]
    assert scalings == ["self.scaling"]


def test_what_servers_look_for(folders):
    """A plan for every projection, a pipeline plan over real modules, causal attention, readable global
    settings."""
    model = HeadScheduleForCausalLM.from_pretrained(folders("head_gate"))
    assert model._supports_attention_backend and model._supports_flash_attn and model._supports_sdpa
    assert model.is_backend_compatible() and model.supports_pp_plan
    assert all(module.is_causal for module in model.modules() if isinstance(module, HeadScheduleAttention))
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    linears = {"layers.*." + name.split(".", 3)[3] for name in names if ".layers." in name}
    plan = set(model.config.base_model_tp_plan) - {"embed_tokens"}  # transformers 5.19 adds it
    assert linears == plan
    # Whose gradient is a sum over the ranks, as of Qwen3's.
    normed = HeadScheduleConfig(qk_norm="weighted").base_model_tp_plan
    theirs = Qwen3Config.base_model_tp_plan
    for name in ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm"):
        assert normed.get(name) == theirs.get(name) and name not in plan
    # The plan's modules are all that have parameters, but for learned positions.
    children = dict(model.model.named_children())
    bare = {name for name, child in children.items() if next(child.parameters(), None) is not None}
    assert bare == set(model.config.base_model_pp_plan)
    assert [layer.num_attention_heads for layer in model.config.per_layer_config] == [2, 3, 4]
    with pytest.raises(RuntimeError):
        _ = model.config.num_attention_heads
    # vLLM 0.33 reads the window of sliding layers from the whole configuration: fine where they share one.
    assert AutoConfig.from_pretrained(folders("gptneo"), trust_remote_code=True).sliding_window == 16


# ---------------------------------------------------------------------- transformers' own tensor parallelism


def tensor_parallel_logits(folder, ids):
    """Logits of a model that this rank has a part of, how many rows its first q_proj has, and its greedy
    text."""
    from transformers.distributed import DistributedConfig

    torch.distributed.barrier()
    shared = DistributedConfig(tp_size=torch.distributed.get_world_size())
    model = HeadScheduleForCausalLM.from_pretrained(folder, distributed_config=shared).eval()
    with torch.no_grad():
        logits = model(ids).logits
        text = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=1)
    weight = model.model.layers[0].self_attn.q_proj.weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    return logits, local.shape[0], text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "grouped"])
def test_tensor_parallel_logits_equal_ours(name, folders):
    """Two gloo ranks, every head count even: each has half of every layer's heads."""
    ids = tokens(1, 24)
    whole = HeadScheduleForCausalLM.from_pretrained(folders(name)).eval()
    text = whole.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=1)
    for logits, rows, found in run_distributed(tensor_parallel_logits, 2, folders(name), ids, timeout=120):
        assert relative(logits, network(name)(ids)) <= FP32
        assert 2 * rows == whole.model.layers[0].self_attn.q_proj.weight.shape[0]
        assert found.tolist() == text.tolist()


def refused(folder, ids):
    with pytest.raises(Exception, match="heads") as caught:
        tensor_parallel_logits(folder, ids)
    return str(caught.value)


def test_heads_that_do_not_divide_are_refused_by_name(folders):
    """Three heads on two ranks: an error that names the layer, not numbers from inside a view."""
    for message in run_distributed(refused, 2, folders("prism"), tokens(1, 24), timeout=120):
        assert "must divide the heads of layer 1" in message
