"""Which of its attention kernels torch takes on a GPU.

From the source of torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, for what this model gives
them: equal head dims of q, k and v, no dropout, causal attention of as many queries as keys, or a mask.
cuDNN's kernel is switched off (pretrain/runtime/world.py).
"""

from __future__ import annotations

from typing import Literal

GpuKernel = Literal["flash", "memory-efficient", "math"]
Capability = tuple[int, int]
"""Compute capability of a GPU: (9, 0) is an H100's."""

FLASH_LARGEST = 256
FLASH_NARROWEST_GAP, FLASH_WIDEST_GAP = 192, 224
"""In this range of head dims, the first excluded, flash has no backward pass on GPUs with less shared memory:
check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120."""


def flash_supports(element_bytes: int, head_dim: int, capability: Capability | None = None) -> bool:
    """Whether flash trains heads of that dtype and size, if there is no mask.

    Args:
        capability: of the GPU; None asks for every GPU that has flash (Ampere and newer).
    """
    if element_bytes != 2 or head_dim > FLASH_LARGEST:
        return False
    if not FLASH_NARROWEST_GAP < head_dim <= FLASH_WIDEST_GAP:
        return True
    return capability is not None and not (8, 6) <= capability <= (8, 9) and capability[0] != 12


def gpu_kernel(element_bytes: int, head_dim: int, masked: bool, capability: Capability) -> GpuKernel:
    """The kernel that torch takes on an Ampere or newer GPU. ``math`` holds the logits of all heads in
    memory."""
    if not masked and flash_supports(element_bytes, head_dim, capability):
        return "flash"
    return "math" if head_dim % (16 // element_bytes) else "memory-efficient"
