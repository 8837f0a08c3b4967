"""Says which attention kernel torch takes for each head dim of a model."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from model.attention import flash_takes, local_mask
from model.config import ModelConfig
from model.documents import PackedDocuments, has_varlen_kernel

BATCH = 2  # the kernel does not depend on more
NAMES = {
    SDPBackend.MATH: "plain products",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}


def attention_kernels(
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    document_mask: bool,
    attention: str = "torch",
) -> dict[str, list[int]]:
    """The head dims of a model by the kernel that their attention runs on in training, that of most head dims
    first.

    torch is asked with the run's shapes, on its device; a head dim whose layers run on two kernels is listed
    with both. Tensor-parallel ranks that share heads by queries may take others. *attention* is the model's.
    """
    if attention == "blocks" and not document_mask:
        dims = {model.layer_head_dim(layer) for layer in range(model.num_layers)}
        return {"products over blocks of queries": sorted(dims)}
    kernels: dict[str, set[int]] = {}
    T = model.context_length
    for layer in range(model.num_layers):
        head_dim, window = model.layer_head_dim(layer), model.layer_window(layer)
        heads, kv_heads = model.heads[layer], model.layer_kv_heads(layer)
        query = torch.empty(BATCH, heads, T, head_dim, device=device, dtype=dtype)
        if document_mask and has_varlen_kernel(query, head_dim):
            kernels.setdefault("flash of variable length", set()).add(head_dim)
            continue
        mask = None if document_mask else local_mask(T, window, device)
        if document_mask:
            starts = torch.arange(BATCH + 1, device=device, dtype=torch.int32) * T
            mask = PackedDocuments(starts, BATCH, T, dtype).mask(window)
        if query.is_cuda and (mask is not None or not flash_takes(dtype.itemsize, head_dim)):
            kv_heads = heads  # as model.attention repeats them
        key = torch.empty(BATCH, kv_heads, T, head_dim, device=device, dtype=dtype)
        choice = torch._fused_sdp_choice(
            query.requires_grad_(), key, key, mask, is_causal=mask is None, enable_gqa=kv_heads != heads
        )
        kernels.setdefault(NAMES.get(SDPBackend(choice), "unknown"), set()).add(head_dim)
    return {name: sorted(dims) for name, dims in sorted(kernels.items(), key=lambda item: -len(item[1]))}


def kernel_line(kernels: dict[str, list[int]]) -> str:
    """Them in one line, such as "flash (head dim 64, 96), memory-efficient (head dim 384)"."""
    return ", ".join(f"{name} (head dim {', '.join(map(str, dims))})" for name, dims in kernels.items())
