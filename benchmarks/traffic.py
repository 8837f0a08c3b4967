"""Bytes that a training step moves per token, by operator, and what follows for a GPU: counted, without one.

    python benchmarks/traffic.py prism-124m [--fused all] [--compiled] [--micro_batch 16] [--context 1024]

Forward and backward run on meta tensors, in bf16, with each operator's inputs and outputs counted as read and
written once; views move nothing. Attention and RMSNorm count as the single kernels that they are on a GPU.
Time is estimated as the larger of the products' FLOPs / peak and their bytes / bandwidth, and after it all
other bytes / bandwidth; launches and idle time are not in it, so real steps are slower. Without --compiled
this is the model as written. With it, rotary positions, SwiGLU and a chunk's loss are single kernels, too, as
torch.compile makes them (benchmarks/gpu_kernels.py counts its own); sums of residuals and of gradients are
still counted as written.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as functional  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.library import custom_op  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import model.attention  # noqa: E402
import model.rotary  # noqa: E402
import model.transformer  # noqa: E402
from benchmarks.helpers import parser_of, run_main, write  # noqa: E402
from model.config import ModelConfig  # noqa: E402
from model.feedforward import FeedForward  # noqa: E402
from model.linears import fused_columns  # noqa: E402
from model.parameters import parameter_specs, takes_muon  # noqa: E402
from model.transformer import Fused, Transformer  # noqa: E402
from pretrain.config.model_file import load_named_model  # noqa: E402
from pretrain.config.sections import MuonConfig  # noqa: E402
from pretrain.engine.matrix_exchange import describe_matrix  # noqa: E402
from pretrain.optim.muon import orthogonalize  # noqa: E402

# NVIDIA's data sheet of the H100 SXM: dense bf16 products and memory.
PEAK_FLOPS, BANDWIDTH = 989e12, 3.35e12
PRODUCTS = ("mm", "addmm", "bmm", "flash_attention")


@custom_op("traffic::flash_attention", mutates_args=())
def flash_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What a GPU's kernel reads and writes; meta tensors would take SDPA's plain formula. It computes
    nothing."""
    return torch.empty_like(query)


@custom_op("traffic::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@custom_op("traffic::rms_norm", mutates_args=())
def rms_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    """A GPU's fused kernel."""
    return torch.empty_like(hidden)


@custom_op("traffic::rms_norm_backward", mutates_args=())
def rms_norm_backward(gradient: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Its gradients."""
    return torch.empty_like(hidden), torch.empty_like(weight)


@custom_op("traffic::rotate", mutates_args=())
def rotate(heads: Tensor) -> Tensor:
    """Rotary positions in one kernel; the tables are small."""
    return heads.new_empty(heads.shape)


@custom_op("traffic::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in one kernel."""
    return gate.new_empty(gate.shape)


@custom_op("traffic::swiglu_backward", mutates_args=())
def swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Its gradients."""
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@custom_op("traffic::loss", mutates_args=())
def loss(logits: Tensor, again: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of a chunk of logits, which are read for their sum and again for the residual, which the kernel
    writes in their place."""
    return logits.new_empty(len(logits), dtype=torch.float32), torch.empty_like(logits)


flash_attention.register_fake(lambda query, key, value: torch.empty_like(query))
flash_attention_backward.register_fake(
    lambda gradient, query, key, value, output: tuple(map(torch.empty_like, (query, key, value)))
)
rms_norm.register_fake(lambda hidden, weight: torch.empty_like(hidden))
rms_norm_backward.register_fake(
    lambda gradient, hidden, weight: (torch.empty_like(hidden), torch.empty_like(weight))
)
flash_attention.register_autograd(
    lambda context, gradient: flash_attention_backward(gradient, *context.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)
rms_norm.register_autograd(
    lambda context, gradient: rms_norm_backward(gradient, *context.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

rotate.register_fake(lambda heads: heads.new_empty(heads.shape))
swiglu.register_fake(lambda gate, up: gate.new_empty(gate.shape))
swiglu_backward.register_fake(lambda gradient, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)))
loss.register_fake(
    lambda logits, again, targets: (
        logits.new_empty(len(logits), dtype=torch.float32),
        torch.empty_like(logits),
    )
)
rotate.register_autograd(lambda context, gradient: rotate(gradient))


def _swiglu_gradients(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    swiglu(*context.saved_tensors)  # the product is computed again for the gradient of down
    gradients: tuple[Tensor, Tensor] = swiglu_backward(gradient, *context.saved_tensors)
    return gradients


swiglu.register_autograd(
    _swiglu_gradients,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def gated(self: FeedForward, hidden: Tensor) -> Tensor:
    """FeedForward.forward of a gated network, with one kernel between the products."""
    assert self.gate is not None
    if self.fused_gate_up:
        return self.down(swiglu(*fused_columns(hidden, (self.gate, self.up))))
    return self.down(swiglu(self.gate(hidden), self.up(hidden)))


@contextlib.contextmanager
def kernels_of_a_compiler() -> Iterator[None]:
    """Let the model call the stand-ins for what torch.compile joins."""
    with (
        mock.patch.object(model.attention, "rotate", lambda heads, table: rotate(heads)),
        mock.patch.object(FeedForward, "forward", gated),
        mock.patch.object(
            model.transformer,
            "loss_and_residual",
            lambda logits, targets, *_: loss(logits, logits, targets)[0],
        ),
    ):
        yield


@contextlib.contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """Let the model call the stand-ins above."""
    with (
        mock.patch.object(
            functional, "scaled_dot_product_attention", lambda q, k, v, **_: flash_attention(q, k, v)
        ),
        mock.patch.object(functional, "rms_norm", lambda x, shape, weight, eps: rms_norm(x, weight)),
    ):
        yield


class Traffic(TorchDispatchMode):
    """Counts the bytes of every operator that is not a view.

    *compiled* leaves out copies of the gradients of a fused product's parts, except v's, which the compiler
    makes.
    """

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.compiled = compiled
        self.bytes: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        result = operator(*arguments, **(keywords or {}))
        read = (arguments, {key: value for key, value in (keywords or {}).items() if key != "out"})
        inputs = [leaf for leaf in tree_leaves(read) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        name = str(operator.overloadpacket).removeprefix("aten.").removeprefix("traffic.")
        if name in (
            "gather",
            "scatter_",
            "scatter_add_",
            "embedding",
        ):  # they touch as much as they take, or put
            inputs = [tensor for tensor in inputs if tensor.dtype == torch.int64] * 2
            outputs = [] if name.startswith("scatter") else outputs
        if name == "copy_":  # it reads only what it copies
            inputs = inputs[1:]
        if self.compiled and name == "cat" and inputs[0].ndim > 2:
            inputs = outputs = inputs[2:]
        if not operator.is_view and name not in (
            "empty",
            "empty_like",
            "new_empty",
            "detach",
            "_unsafe_view",
        ):
            self.bytes[name] += sum(tensor.nbytes for tensor in (*inputs, *outputs))
            self.calls[name] += 1
        return result


def step(config: ModelConfig, micro_batch: int, fused: Fused, compiled: bool) -> tuple[Traffic, int]:
    """Forward and backward of one micro-batch; the traffic and the FLOPs."""
    kernels = kernels_of_a_compiler if compiled else contextlib.nullcontext
    with torch.device("meta"), kernels():
        network = Transformer(config, fused=fused).bfloat16()
        tokens = torch.zeros(micro_batch, config.context_length, dtype=torch.int64)
    network.rotary and [  # the tables are made on the CPU, once for all steps
        network.table(layer, torch.empty(0, device=tokens.device, dtype=torch.bfloat16), 0, 1)
        for layer in range(config.num_layers)
    ]
    flops = FlopCounterMode(display=False)
    traffic = Traffic(compiled)
    with kernels_of_a_gpu(), kernels(), flops, traffic:
        network(tokens, tokens).backward()
    # Two products forward and five backward, of the half that the causal mask leaves.
    T, widths = config.context_length, sum(map(config.attention_width, range(config.num_layers)))
    attention = 7 * 2 * T * T * widths * micro_batch // 2
    return traffic, flops.get_total_flops() + attention


def optimizer_bytes(config: ModelConfig) -> int:
    """AdamW's fp32 master, moments and gradient, read and written, and the bf16 weights; once a step."""
    return config.num_parameters() * (4 * (2 + 2 + 2 + 1) + 2)


def muon(config: ModelConfig, heads: Literal["whole", "each"]) -> tuple[float, int]:
    """Bytes and FLOPs of making the blocks' matrices orthogonal in bf16, once a step, on one GPU."""
    traffic, flops = Traffic(compiled=True), FlopCounterMode(display=False)
    with flops, traffic:
        for spec in parameter_specs(config).values():
            if takes_muon(spec.role):
                matrix = describe_matrix(spec, config, MuonConfig(heads=heads))
                blocks = torch.empty(matrix.shape, device="meta")
                if matrix.head is not None:
                    blocks = torch.stack(blocks.split(matrix.head[1], matrix.head[0]))
                orthogonalize(blocks, torch.bfloat16)
    return sum(traffic.bytes.values()), flops.get_total_flops()


def main() -> None:
    """Count and print."""
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--micro_batch", type=int, default=16)
    parser.add_argument("--context", type=int)
    parser.add_argument("--plain_rotary", action="store_true", help="rotate by the formula, as it reads")
    parser.add_argument("--fused", choices=get_args(Fused), default="loss")
    parser.add_argument(
        "--compiled", action="store_true", help="with what torch.compile joins as single kernels"
    )
    parser.add_argument("--muon", choices=("whole", "each"), help="say what Muon's iterations add")
    options = parser.parse_args()
    if options.plain_rotary:
        model.attention.rotate = model.rotary.rotate_plainly
    config = load_named_model(options.model)
    if options.context:
        config = config.replace(context_length=options.context)
    tokens = options.micro_batch * config.context_length
    traffic, flops = step(config, options.micro_batch, options.fused, options.compiled)
    optimizer = optimizer_bytes(config)
    write(
        options.out, {"bytes": traffic.bytes, "calls": traffic.calls, "flops": flops, "optimizer": optimizer}
    )
    print("| operator | calls | bytes a token | share |\n|---|---:|---:|---:|")
    total = sum(traffic.bytes.values()) + optimizer
    rows = sorted(traffic.bytes.items(), key=lambda item: -item[1])
    for name, count in rows[:15]:
        print(f"| {name} | {traffic.calls[name]:,} | {count / tokens:,.0f} | {count / total:.1%} |")
    rest = sum(count for _, count in rows[15:])
    print(f"| others | | {rest / tokens:,.0f} | {rest / total:.1%} |")
    print(f"| AdamW, once a step | | {optimizer / tokens:,.0f} | {optimizer / total:.1%} |")
    print(f"| all | {sum(traffic.calls.values()):,} | {total / tokens:,.0f} | 100% |")
    products = sum(count for name, count in traffic.bytes.items() if name.startswith(PRODUCTS))
    estimate(config, tokens, flops, products, total - products)
    if options.muon:
        moved, more = muon(config, options.muon)
        print(
            f"Muon, {options.muon}: {more / flops:.2%} more FLOPs and {moved / total:.1%} more bytes, once a "
            f"step of {tokens:,} tokens; on an H100 at least "
            f"{1e3 * max(more / PEAK_FLOPS, moved / BANDWIDTH):.1f} ms"
        )


def estimate(config: ModelConfig, tokens: int, flops: int, products: float, others: float) -> None:
    """Print the time of a step and the MFU that follow, products during their own traffic, all else after
    them."""
    seconds = max(flops / PEAK_FLOPS, products / BANDWIDTH) + others / BANDWIDTH
    mfu = tokens * config.flops_per_token() / seconds / PEAK_FLOPS
    print(
        f"{(products + others) / tokens:,.0f} bytes a token, of which products {products / tokens:,.0f}; "
        "on an "
        f"H100 at least {1e3 * seconds:.1f} ms for {tokens:,} tokens, MFU at most {mfu:.0%}"
    )


if __name__ == "__main__":
    run_main(main)
