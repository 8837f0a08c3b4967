"""What runs other kernels on a GPU: such tests also run on the CPU, so that the test itself is known to be
right."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.attention import Attention, local_mask
from model.blocks import block
from model.config import ModelConfig
from model.exchange import QueryForm
from model.initialization import initialize
from model.presets import preset, preset_names
from model.process_grid import ALONE
from model.rotary import RotaryTables
from model.transformer import Transformer
from pretrain.engine.compiling import compile_network
from tests.helpers.gpus import GPU, REHEARSED, needs_gpus

DEVICES = ["cpu", pytest.param(GPU, id="gpu", marks=needs_gpus(1))]
SHAPE = {"vocab_size": 260, "context_length": 32, "d_model": 48, "ffn_width": 64}
KINDS = {
    "llama": block("llama", **SHAPE, heads=(1, 2, 3, 6), kv_heads=(1, 1, 3, 2)),
    "gpt2": block("gpt2", **SHAPE, heads=(6, 3, 2, 1)),
    "gptneo": block("gptneo", **SHAPE, heads=(3, 4, 6), local_window=(None, 5, 31)),
}


def gradients(
    config: ModelConfig, device: str, dtype: torch.dtype, compiled: bool = False
) -> dict[str, torch.Tensor]:
    """Loss and all gradients of the seeded model on seeded tokens, on the CPU in fp64 afterwards."""
    model = Transformer(config)
    initialize(model, 0)
    model.to(device, dtype)
    if compiled:
        torch.compiler.reset()
        compile_network(model)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (2, config.context_length + 1), generator=generator)
    loss = model(tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device))
    loss.backward()
    found = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().double().cpu(), **found}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_fp64_on_the_cpu(kind, device, compiled=False):
    expected = gradients(KINDS[kind], "cpu", torch.float64)
    found = gradients(KINDS[kind], device, torch.float32, compiled)
    assert found.keys() == expected.keys()
    # A bias of the keys has no gradient but rounding, which is compared with the gradients that are there.
    floor = 1e-3 * max(value.abs().max() for name, value in expected.items() if name != "loss")
    for name, value in expected.items():
        # fp32, sums in another order: a few units of 1e-7 for each of the layers that a gradient passes.
        assert (found[name] - value).abs().max() <= 1e-4 * value.abs().max().clamp(min=floor), name


@pytest.mark.slow  # it compiles every shape of a block
@pytest.mark.parametrize(
    ("kind", "device"), [("gptneo", "cpu"), *(pytest.param(kind, GPU, marks=needs_gpus(1)) for kind in KINDS)]
)
def test_compiled_gradients_are_those_of_eager_fp64(kind, device):
    """Compiled code that slices a shared parameter has wrong gradients (pytorch issue 193061)."""
    try:
        test_loss_and_gradients_equal_fp64_on_the_cpu(kind, device, compiled=True)
    finally:
        torch.compiler.reset()


class OneRanksRows(QueryForm):
    """Stands for a head exchange in query form: rank *index* of *ranks* attends, the other rows are zero."""

    def __init__(self, ranks: int, index: int, length: int) -> None:
        super().__init__(ranks, index, None, 1, length)
        self.rows = torch.cat([torch.arange(start, stop) for start, stop in self.spans])

    def form(self, batch: int, length: int, *, packed: bool = False) -> OneRanksRows:
        self.batch = batch
        return self

    def scatter(self, query, key, value):
        return query[:, self.rows.to(query.device)], key, value

    def gather(self, output):
        whole = output.new_zeros(output.shape[0], self.length, output.shape[2])
        return whole.index_copy(1, self.rows.to(output.device), output)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_chunks_of_queries_equal_the_whole(device, dtype, window, ranks):
    """The query form: on GPUs chunks attend with causal_lower_right, on CPUs with a mask."""
    length = 48
    config = block("llama", **SHAPE, heads=(6,), kv_heads=(2,), local_window=(window,))
    torch.manual_seed(2)
    attention = Attention(config, 0, ALONE).to(device, dtype)
    hidden = torch.randn(2, length, config.d_model).to(device, dtype)
    mask = local_mask(length, window, torch.device(device))
    table = RotaryTables(length).get(attention.head_dim, config.rope_base, length, hidden.device, dtype)
    whole = attention(hidden, table, mask)
    parts = []
    for rank in range(ranks):
        attention.exchange = OneRanksRows(ranks, rank, length)
        parts.append(attention(hidden, table, mask))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(sum(parts), whole, rtol=tolerance, atol=tolerance)


@needs_gpus(1)
@pytest.mark.parametrize(("window", "dtype"), [(9, torch.bfloat16), (None, torch.float32)])
def test_grouped_queries_that_flash_does_not_take_have_a_fused_kernel(window, dtype):
    """Other kernels take no grouped queries; without them all logits would be in memory."""
    config = block("llama", **SHAPE, heads=(6,), kv_heads=(2,), local_window=(window,))
    attention = Attention(config, 0, ALONE).to(GPU, dtype)
    hidden = torch.randn(2, 48, config.d_model, device=GPU, dtype=dtype)
    table = RotaryTables(48).get(attention.head_dim, config.rope_base, 48, hidden.device, hidden.dtype)
    # A CPU has no such kernel.
    with sdpa_kernel(SDPBackend.MATH if REHEARSED else SDPBackend.EFFICIENT_ATTENTION):
        output = attention(hidden, table, local_mask(48, window, hidden.device))
    assert torch.isfinite(output).all()


# What torch's fused kernels take on a GPU (sdp_utils.cpp: check_head_dim_size_flash and _mem_efficient):
# flash attention ends at 256 and pads dims that 8 does not divide, the memory-efficient kernel takes wider
# heads.
FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
KERNELS = dict.fromkeys((8, 12, 16, 24, 32, 40, 60, 64, 80, 96, 100, 128, 192, 256), FLASH) | {384: EFFICIENT}
WIDER = {"config-5-124m": 1, "config-7-124m": 2}


def head_dims(name: str) -> list[int]:
    """Of the layers of a preset."""
    config = preset(name)
    return [config.layer_head_dim(layer) for layer in range(config.num_layers)]


def test_which_presets_have_heads_too_wide_for_flash():
    """No preset may fall back to a slower kernel unseen."""
    dims = {name: head_dims(name) for name in preset_names()}
    assert max(max(layers) for name, layers in dims.items() if name.startswith("waist-")) <= 256
    dims = {name: layers for name, layers in dims.items() if not name.startswith("waist-")}
    assert {dim for layers in dims.values() for dim in layers} == KERNELS.keys()
    wide = {name: sum(KERNELS[dim] != FLASH for dim in layers) for name, layers in dims.items()}
    assert {name: layers for name, layers in wide.items() if layers} == WIDER


def attend(dim: int, kernel: SDPBackend) -> None:
    """Forward and backward in bf16 with that kernel and no other."""
    heads = torch.randn(1, 2, 64, dim, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    with sdpa_kernel(kernel):
        output = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    output.sum().backward()
    assert heads.grad is not None and torch.isfinite(heads.grad).all()


@needs_gpus(1)
@pytest.mark.skipif(
    REHEARSED, reason="a CPU has a flash kernel for every head dim, and no memory-efficient one"
)
@pytest.mark.parametrize("dim", KERNELS)
def test_the_kernel_of_every_published_head_dim(dim):
    attend(dim, KERNELS[dim])
    if KERNELS[dim] != FLASH:
        with pytest.warns(UserWarning, match="less than or equal to 256"), pytest.raises(RuntimeError):
            attend(dim, FLASH)
