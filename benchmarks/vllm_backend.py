"""Exported folders in vLLM's Transformers modeling backend, without a GPU: do its logits equal transformers'?

    python benchmarks/vllm_backend.py hf/NAME [hf/OTHER …]     # in an environment that has vLLM; this project's has not

Everything but the attention kernel is vLLM's own: it resolves the architecture, reads every layer's heads from the
configuration, builds the model from the folder's code, fuses projections and norms, loads the weights, and calls it
with two sequences in one row. Kernels of a wheel for GPUs do not run on a CPU, so that linear layers and norms take
vLLM's PyTorch versions, and its attention layers are replaced by attention written out with the geometry and scale that
vLLM gave them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

LENGTHS = [23, 11]


class WrittenOut(nn.Module):
    """Causal attention of several sequences in one row, as *layer* (vLLM's) was told to compute it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.shapes = [(heads, layer.head_size) for heads in (layer.num_heads, *[layer.num_kv_heads] * 2)]
        self.scale, self.window = float(layer.impl.scale), layer.sliding_window

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """q, k, v [tokens, heads x d_h] -> [tokens, heads x d_h]."""
        flat = zip((query, key, value), self.shapes, strict=True)
        parts = [tensor.unflatten(1, shape).transpose(0, 1).split(LENGTHS, 1) for tensor, shape in flat]
        outputs = []
        for q, k, v in zip(*parts, strict=True):  # each [heads, T, d_h]
            k, v = (tensor.repeat_interleave(len(q) // len(k), 0) for tensor in (k, v))
            places = torch.arange(q.shape[1])
            distance = places[:, None] - places
            hidden = (distance < 0) | (distance >= (self.window or q.shape[1]))
            weights = (q @ k.transpose(1, 2) * self.scale).masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append((weights @ v).transpose(0, 1).flatten(1))
        return torch.cat(outputs)


def build(folder: Path) -> tuple[Any, Any]:
    """vLLM's model of a folder with its weights, and its VllmConfig."""
    from safetensors.torch import load_file
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models.transformers import TransformersForCausalLM
    from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR

    model_config = ModelConfig(
        model=str(folder),
        trust_remote_code=True,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    assert model_config.architecture == "TransformersForCausalLM", model_config.architecture
    config = VllmConfig(model_config=model_config, device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            method = f"file://{tempfile.mktemp()}"
            init_distributed_environment(1, 0, distributed_init_method=method, local_rank=0, backend="gloo")
            initialize_model_parallel(1, 1)
        model = TransformersForCausalLM(vllm_config=config)
    loaded = model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    missing = {name for name, _ in model.named_parameters()} - loaded
    assert not missing, f"vLLM loaded nothing into {missing}"
    for module in list(model.modules()):
        if hasattr(module, VLLM_ATTN_ATTR):
            layer = module._modules.pop(VLLM_ATTN_ATTR)
            print(f"  {layer.num_heads} heads, {layer.num_kv_heads} key/value, of dim {layer.head_size}, "
                  f"scale {layer.impl.scale:.4f}, window {layer.sliding_window}")  # fmt: skip
            module.add_module(VLLM_ATTN_ATTR, WrittenOut(layer))
        if hasattr(module, "quant_method"):
            module.cpu_linear = nn.functional.linear
        if hasattr(module, "_forward_method"):
            module._forward_method = module.forward_native
    return model, config


@torch.no_grad()
def compare(folder: Path) -> float:
    """Largest difference of logits, relative to the largest logit."""
    from vllm.forward_context import set_forward_context

    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, theirs.config.vocab_size, (length,), generator=generator) for length in LENGTHS]
    expected = torch.cat([theirs(text[None]).logits[0] for text in texts])
    torch.set_default_dtype(torch.float32)
    model, config = build(folder)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with set_forward_context(None, config):
        logits = model.compute_logits(model(torch.cat(texts), positions))
    return float((logits - expected).abs().max() / expected.abs().max())


def main() -> None:
    """Print a line for each layer and each folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="written by python -m pretrain.convert")
    folders = parser.parse_args().folders
    import transformers

    try:
        import vllm
    except ModuleNotFoundError as error:
        parser.exit(2, f"error: no module {error.name!r} here; run it in an environment that has vLLM\n")
    for folder in folders:
        print(f"{folder}: vLLM {vllm.__version__}, transformers {transformers.__version__}")
        print(f"  largest difference of logits {compare(Path(folder)):.1e} of the largest logit")


if __name__ == "__main__":
    main()
