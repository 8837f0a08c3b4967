"""What a probe measures against the same figures worked out by layer in float64, and through engines of any
shape."""

import json

import numpy as np
import pytest
import torch

from model.initialization import initialize
from model.presets import preset
from model.transformer import Transformer
from pretrain import prepare_measurement
from pretrain.diagnostics.forward import ForwardProbe, feature_drift, lower_layers, normalize
from tests.helpers.distributed import run_distributed
from tests.helpers.shapes import Shape, build
from tests.helpers.training import alone, nano_run
from tests.pretrain.diagnostics.test_attention import by_loops


def small(name, **changes):
    """A preset with 12 positions, in float64, with weights so large that attention is far from uniform."""
    config = preset(name).replace(context_length=12, vocab_size=50, **changes)
    network = Transformer(config).double()
    initialize(network, 1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter *= 8 if parameter.ndim > 1 else 1
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return config, network


def windows_of(config, count):
    return np.random.default_rng(0).integers(0, config.vocab_size, (count, config.context_length + 1))


def rotated(heads, base):
    """Rotary positions by complex numbers: pair (i, i + d/2) of position p turned by p base^(-2i/d)."""
    length, half = heads.shape[1], heads.shape[-1] // 2
    pairs = torch.complex(heads[..., :half], heads[..., half:])
    angles = torch.outer(torch.arange(length).double(), base ** (-torch.arange(half).double() / half))
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


GATES: dict[int, torch.Tensor] = {}


def direct(config, network, tokens):
    """Every figure from matrices that are written out: attention of all heads, writes, features."""
    hidden = network.token_embedding.weight[tokens]
    if config.positions == "learned":
        hidden = hidden + network.position_embedding.weight
    stream = torch.nn.functional.pad(hidden, (0, config.stream_width - config.d_model))
    heads, layers, features, path = [], [], {}, 0.0
    for layer, block in enumerate(network.layers):
        entering = stream[..., : config.layer_width(layer)]
        inputs = block.attention_norm(entering)
        q, k, v = (getattr(block.attention, part)(inputs) for part in "qkv")
        h, kv, d_h = config.heads[layer], config.layer_kv_heads(layer), config.layer_head_dim(layer)
        q, k, v = q.unflatten(2, (h, d_h)), k.unflatten(2, (kv, d_h)), v.unflatten(2, (kv, d_h))
        if config.positions == "rope":
            q, k = rotated(q, config.rope_base), rotated(k, config.rope_base)
        window = config.layer_window(layer) or config.context_length
        scale = d_h**-0.5 if config.attention_scale == "sqrt_head_dim" else 1.0
        visible = lambda t, s, window=window: t - window < s <= t  # noqa: E731
        sums = by_loops(q, k, scale, visible, range(config.context_length), [True] * len(tokens))
        heads.append(sums[:, :4] / sums[:, 4:])
        T = config.context_length
        seen = torch.tensor([[visible(t, s) for s in range(T)] for t in range(T)])
        logits = torch.einsum("bthc,bshc->bhts", q, k.repeat_interleave(h // kv, 2)) * scale
        A = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        output = torch.einsum("bhts,bshc->bthc", A, v.repeat_interleave(h // kv, 2)).flatten(2)
        if config.attention_gate == "head":
            gates = torch.einsum("btd,hd->bth", inputs, block.attention.head_gate.weight).sigmoid()
            output = (output.unflatten(2, (h, d_h)) * gates[..., None]).flatten(2)
            GATES[layer] = gates[:, T // 2 :].mean((0, 1))
        write = block.attention.o(output)
        middle = entering + write
        ffn = block.ffn(block.ffn_norm(middle))
        energy = [tensor.square().sum().item() for tensor in (entering, write, middle, ffn, stream)]
        layers.append([energy[1] / energy[0], energy[3] / energy[2], path / energy[4]])
        path += energy[1] + energy[3]
        stream = torch.cat((middle + ffn, stream[..., config.layer_width(layer) :]), -1)
        features[layer] = stream
    return heads, torch.tensor(layers, dtype=torch.float64), features


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("prism-nano", {}),
        ("prism-nano", {"kv_heads": (1, 3, 2, 4), "attention_gate": "head"}),
        ("gpt2-nano", {"local_window": (None, 5, None, 3)}),
        ("gpt2-nano", {"attention_scale": "none"}),
        ("prism-nano", {"block_width": (64, 24, 40, 48)}),
    ],
)
def test_equals_the_direct_computation(name, changes):
    config, network = small(name, **changes)
    windows = windows_of(config, 3)
    with torch.no_grad():
        heads, layers, features = direct(config, network, torch.from_numpy(windows[:, :-1]))
    probe = ForwardProbe(config, windows, 2, alone(), positions=4)
    result = probe.run(network, features=[0, 2])
    for found, expected in zip(result.heads, heads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(result.layers, layers, rtol=1e-9, atol=1e-9)
    assert probe.positions.tolist() == [2, 5, 8, 11] and sorted(result.features) == [0, 2]
    for layer, found in result.features.items():
        kept = features[layer][:, [2, 5, 8, 11]]
        if config.norm == "layernorm":
            kept = kept - kept.mean(-1, keepdim=True)
        expected = kept / kept.square().mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    row = result.row({})
    assert row["diagnostics/attention_distance/layer_1"] == pytest.approx(heads[1][:, 0].mean().item())
    assert row["diagnostics/logit_spread/heads"][3] == pytest.approx(heads[3][:, 3].tolist())
    assert row["diagnostics/path_energy/layer_0"] == 0
    if config.attention_gate == "head":
        for layer, gates in GATES.items():
            assert row["diagnostics/attention_gate/heads"][layer] == pytest.approx(gates.tolist())
            assert row[f"diagnostics/attention_gate/layer_{layer}"] == pytest.approx(gates.mean().item())
    else:
        assert not any("gate" in key for key in row)
    json.dumps(row)


def test_layers_without_a_part_and_gates_of_elements():
    schedules = {"heads": (0, 3, 2, 4), "ffn_width": (96, 0, 48, 64)}
    config, network = small("prism-nano", **schedules, attention_gate="element")
    windows = windows_of(config, 3)
    row = ForwardProbe(config, windows, 2, alone()).run(network).row({})
    of_first = {f"diagnostics/{name}/layer_0" for name in ("ffn_write", "path_energy")}
    assert {key for key in row if "layer_0" in key} == of_first
    assert "diagnostics/ffn_write/layer_1" not in row and row["diagnostics/attention_write/layer_1"] > 0
    assert [len(heads) for heads in row["diagnostics/attention_gate/heads"]] == [0, 3, 2, 4]
    logits = []
    network.layers[2].attention.gate.register_forward_hook(lambda _, given, output: logits.append(output))
    with torch.no_grad():
        network(torch.from_numpy(windows[:, :-1]))
    expected = logits[0].sigmoid()[:, 6:].unflatten(2, (2, -1)).mean((0, 1, 3))
    assert row["diagnostics/attention_gate/heads"][2] == pytest.approx(expected.tolist())
    json.dumps(row, allow_nan=False)


def test_what_a_norm_above_does_not_see_is_no_drift():
    config = preset("gpt2-nano")
    features = torch.randn(2, 5, config.d_model, generator=torch.Generator().manual_seed(0))
    before = normalize(features, config)
    assert feature_drift(normalize(3 * features + 7, config), before) == pytest.approx(0, abs=1e-5)
    assert feature_drift(normalize(-features, config), before) == pytest.approx(2, rel=1e-5)
    assert feature_drift(torch.roll(before, 1, dims=-1), before) == pytest.approx(2**0.5, rel=0.2)
    llama = preset("prism-nano")
    assert feature_drift(normalize(features + 7, llama), normalize(features, llama)) > 0.5


def test_lower_half():
    assert [lower_layers(count) for count in (1, 2, 5, 6)] == [[0], [0], [0, 1, 2], [0, 1, 2]]


def test_a_hook_of_a_user_reads_activations():
    """In a compiled block, which is not compiled again; and nothing is left behind, also after an error."""
    _, network = small("prism-nano")
    tokens, seen, graphs, before = torch.arange(12)[None], [], [], hooks(network)
    block = network.layers[0]
    block.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    network.train()
    network(tokens)
    with pytest.raises(ZeroDivisionError), prepare_measurement(network) as (given, ending):
        assert given is network and not block.training
        handle = block.attention.q.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))
        ending.callback(handle.remove)
        network(tokens)
        raise ZeroDivisionError
    assert len(graphs) == 1
    assert torch.equal(seen[0], block.attention_norm(network.token_embedding.weight[tokens]))
    assert network.training and block.training and hooks(network) == before


def hooks(network):
    """How many hooks every module has."""
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in network.modules()]


def look_in_engine(run, shape):
    """The figures of a freshly built engine; also that a second pass finds the same and leaves the mode
    alone."""
    opened = build(run, shape)
    engine = opened.trainer.engine
    windows = windows_of(opened.model_config, 5)
    probe = ForwardProbe(opened.model_config, windows, opened.batch.micro_batch, opened.world, positions=4)
    engine.train()
    before = hooks(engine.module)
    result = probe.run(engine, lower_layers(4))
    assert engine.training and all(module.training for module in engine.module.modules())
    again = probe.run(engine, [1], attention=False)
    assert torch.equal(again.features[1], result.features[1])
    assert hooks(engine.module) == before
    features = {layer: tensor.numpy() for layer, tensor in result.features.items()}
    return result.row({}), features


def look(data, runs, ranks=1, stage=2, flags="--compile false"):
    """The figures of an engine of this shape."""
    small = f"--architecture.context_length 16 --architecture.attention_gate head {flags}"
    small += " --global_batch_tokens 192"
    run = nano_run(data, runs, *small.split())
    return run_distributed(look_in_engine, ranks, run, Shape(ranks, stage), timeout=240)


@pytest.fixture(scope="module")
def reference(small_folder, tmp_path_factory):
    return look(small_folder, tmp_path_factory.mktemp("runs"))[0]


@pytest.mark.parametrize(
    ("ranks", "stage", "flags"),
    [
        (2, 3, ""),
        (2, 2, "--tensor_parallel 2"),  # three heads over two ranks: batch form
        (2, 3, "--tensor_parallel 2 --sequence_parallel true --micro_batch 3"),  # query form
        pytest.param(4, 3, "--tensor_parallel 2 --sequence_parallel true", marks=pytest.mark.slow),
        pytest.param(1, 2, "--compile true", marks=pytest.mark.slow),
    ],
)
def test_the_same_in_every_shape(small_folder, tmp_path, reference, ranks, stage, flags):
    expected, features = reference
    for row, found in look(small_folder, tmp_path, ranks, stage, flags):
        assert row.keys() == expected.keys()
        for key, value in expected.items():
            parts = zip(row[key], value, strict=True) if isinstance(value, list) else [(row[key], value)]
            assert all(part == pytest.approx(whole, rel=1e-5, abs=1e-9) for part, whole in parts), key
        for layer, tensor in features.items():
            np.testing.assert_allclose(found[layer], tensor, rtol=1e-4, atol=1e-5)
