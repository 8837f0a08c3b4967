"""The attention kernel of every head dim, dtype, mask and GPU, and what attention asks torch for there."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.backends import cuda

from model.attention import Heads, attend, visibility_mask
from model.documents import has_varlen_kernel
from model.kernels import gpu_kernel
from tests.helpers.fake_gpu import GPU, fake_gpu, run_with_fake_gpu
from tests.helpers.gpus import REHEARSED, needs_gpus

F_, E, M = "flash", "memory-efficient", "math"
AMPERE, GAMING, ADA, HOPPER, BLACKWELL = (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)
# By torch's source. A row for each head dim; bf16 on 8.0, 9.0 and 10.0, on 8.6 and 8.9, with a mask; fp32.
TABLE = {
    16: (F_, F_, E, E),
    20: (F_, F_, M, E),
    24: (F_, F_, E, E),
    30: (F_, F_, M, M),
    64: (F_, F_, E, E),
    96: (F_, F_, E, E),
    128: (F_, F_, E, E),
    192: (F_, F_, E, E),
    196: (F_, M, M, E),
    200: (F_, E, E, E),
    224: (F_, E, E, E),
    232: (F_, F_, E, E),
    256: (F_, F_, E, E),
    260: (M, M, M, E),
    264: (E, E, E, E),
    384: (E, E, E, E),
    510: (M, M, M, M),
    512: (E, E, E, E),
}
CASES = [
    (capability, dtype, masked, dim, row[3 if dtype.itemsize == 4 else 2 if masked else column])
    for column, capabilities in enumerate([(AMPERE, HOPPER, BLACKWELL), (GAMING, ADA)])
    for capability in capabilities
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for masked in (False, True)
    for dim, row in TABLE.items()
]


def test_the_table():
    for capability, dtype, masked, dim, kernel in CASES:
        found = gpu_kernel(dtype.itemsize, dim, masked, capability)
        assert found == kernel, (capability, dtype, masked, dim)


def heads_of(dim: int, dtype: torch.dtype, device: torch.device, length: int = 16) -> list[torch.Tensor]:
    """q of four heads, k and v of two."""
    shapes = [(2, length, heads, dim) for heads in (4, 2, 2)]
    return [torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


ASKED = [
    case
    for case in CASES
    if case[0] in (GAMING, HOPPER) and case[1] != torch.float16 and case[3] in (20, 64, 200, 232, 384)
]


def requests() -> list[tuple[int, bool, bool]]:
    """Of every case: heads of the keys, causal, masked, as attention asks torch."""
    asked = []

    def record(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
        assert enable_gqa == (key.shape[1] != query.shape[1])
        asked.append((key.shape[1], is_causal, attn_mask is not None))
        return query

    with mock.patch.object(F, "scaled_dot_product_attention", record):
        for capability, dtype, masked, dim, _ in ASKED:
            with fake_gpu(capability):
                mask = visibility_mask((0, 16), (0, 16), 5, GPU) if masked else None
                query, key, value = heads_of(dim, dtype, GPU)
                attend(Heads(query, key, value, mask), None, 5 if masked else None)
    return asked


@pytest.mark.slow
def test_only_flash_is_given_grouped_queries():
    """Where no fused kernel takes a request, torch takes the one that holds all logits."""
    for case, asked in zip(ASKED, run_with_fake_gpu(requests), strict=True):
        capability, dtype, masked, dim, kernel = case
        keys, causal, has_mask = asked
        assert (causal, has_mask) == (not masked, masked)
        assert keys == 4 or kernel == F_, (capability, dtype, dim)
        # Copies are made where they are needed alone: of dims that flash takes on some GPUs, on all.
        assert keys == (2 if kernel == F_ and not 192 < dim <= 224 else 4), (capability, dtype, dim)


def offsets_taken() -> list[list[int]]:
    """Head dims whose documents a kernel keeps apart: of bf16 by GPU, and of fp32."""
    found = []
    for capability in (AMPERE, GAMING, ADA, HOPPER, BLACKWELL, (7, 5)):
        with fake_gpu(capability):
            has_varlen_kernel.__globals__["_capability"].cache_clear()
            hidden = torch.zeros(1, dtype=torch.bfloat16, device=GPU)
            found.append([dim for dim in TABLE if has_varlen_kernel(hidden, dim)])
            assert not any(has_varlen_kernel(hidden.float(), dim) for dim in TABLE)
            assert not any(has_varlen_kernel(hidden.cpu(), dim) for dim in TABLE)
    return found


def test_documents_are_kept_apart_by_flash_where_it_trains():
    narrow, wide = [16, 24, 64, 96, 128, 192], [232, 256]
    whole, gap = [*narrow, 200, 224, *wide], [*narrow, *wide]
    assert run_with_fake_gpu(offsets_taken) == [whole, gap, gap, whole, whole, []]


@needs_gpus(1)
@pytest.mark.skipif(REHEARSED, reason="a CPU has other kernels")
def test_torch_chooses_as_the_table_says():
    """Asked on the GPU that is there."""
    capability = torch.cuda.get_device_capability()
    for dtype in (torch.bfloat16, torch.float32):
        for masked in (False, True):
            for dim in TABLE:
                query = heads_of(dim, dtype, torch.device("cuda"))[0].transpose(1, 2)
                mask = visibility_mask((0, 16), (0, 16), 5, query.device) if masked else None
                given = cuda.SDPAParams(query, query, query, mask, 0.0, not masked, False)
                flash, efficient = (
                    cuda.can_use_flash_attention(given),
                    cuda.can_use_efficient_attention(given),
                )
                found = F_ if flash else E if efficient else M
                assert found == gpu_kernel(dtype.itemsize, dim, masked, capability), (dtype, masked, dim)
