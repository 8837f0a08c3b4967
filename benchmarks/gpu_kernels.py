"""The kernels that torch.compile writes for an H100, counted and compiled to machine code without a GPU.

    pip install triton==3.7.1        # into a separate environment; torch's CPU build comes without it
    python benchmarks/gpu_kernels.py prism-124m [--micro_batch 16] [--context 1024] [--compile]

One training step, forward and backward, runs on fake tensors in bf16 with --fused all, its blocks compiled as
training compiles them. Every kernel's arguments count as read and written once, as often as it is called;
products and attention are torch's own and listed apart. --compile turns each kernel into machine code for
compute capability 9.0. What runs outside of graphs (sums of the LM head's gradient, the optimizer) is not in
it: benchmarks/traffic.py counts all of a step, on stand-ins for these kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from benchmarks.helpers import parser_of, run_main, write  # noqa: E402
from model.errors import UserError  # noqa: E402
from pretrain.config.model_file import load_named_model  # noqa: E402

DRIVEN = "PRETRAIN_FAKE_GPU"
"""Set in the environment of the process that has the driver for fake CUDA tensors."""
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "total_memory": 80 << 30,
    "L2_cache_size": 50 << 20,
}
"""What torch.cuda.get_device_properties says of one."""


@dataclass
class Graph:
    """A graph that torch compiled, forward or backward."""

    operators: str
    """What its products and attention are, for its name."""
    bytes: dict[str, int] = field(default_factory=dict)
    """Of a call: of the arguments of written kernels, and of torch's own."""
    kernels: list[str] = field(default_factory=list)
    """Source of each written kernel."""
    calls: int = 0
    """In the step."""


def count_bytes(graph: Any, found: Graph) -> None:
    """Add up what the kernels of a lowered graph read and write."""
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    found.bytes = {"written": 0, "torch's own": 0}
    for node in graph.scheduler.nodes:
        if not isinstance(node, NopKernelSchedulerNode):
            own = isinstance(node, ExternKernelSchedulerNode)
            found.bytes["torch's own" if own else "written"] += node.get_read_write_buffers_sizes()


def kernel_sources(code: str) -> list[str]:
    """The Triton programs of a module that inductor wrote."""
    parts = code.split("async_compile.triton(")[1:]
    return [part.split("'''")[1] for part in parts]


@contextlib.contextmanager
def compiling_for_an_h100(graphs: list[Graph]) -> Iterator[None]:
    """Let torch.compile write kernels for an H100 that is not there, and note them. What it compiled runs as
    it was traced."""
    import torch
    import torch._dynamo
    import torch._inductor.config as settings
    import triton
    from functorch.compile import make_boxed_func
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import compile_fx
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget

    from tests.helpers.fake_gpu import fake_gpu

    properties = SimpleNamespace(**H100)
    target = GPUTarget("cuda", 90, 32)

    def write_kernels(module: Any, inputs: Sequence[Any], **options: Any) -> Any:
        found = Graph(", ".join(sorted({str(node.target) for node in module.graph.nodes if is_large(node)})))
        graphs.append(found)

        def note(graph: Any) -> Any:
            code, _ = graph.codegen()
            count_bytes(graph, found)
            found.kernels = kernel_sources(code.value)
            return SimpleNamespace(call=lambda *_: None, __file__="", key="")

        with mock.patch.object(GraphLowering, "compile_to_module", note):
            compile_fx.compile_fx_inner(copy.deepcopy(module), inputs, **options)

        def run(*arguments: Any) -> Any:
            found.calls += 1
            return module(*arguments)

        return make_boxed_func(run)

    def backend(module: Any, inputs: Sequence[Any]) -> Any:
        return compile_fx.compile_fx(module, inputs, inner_compile=write_kernels)

    def flash(query: Any, key: Any, value: Any, **options: Any) -> Any:
        """What torch calls on a GPU; fake tensors would take the plain formula."""
        causal, scale = options.get("is_causal", False), options.get("scale")
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=scale
        )[0]

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda *_: True,
        "is_bf16_supported": lambda *_, **__: True,
        "get_compute_capability": lambda *_: 90,
        "get_device_properties": lambda *_: properties,
    }
    driver = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(answer)))
        worker = staticmethod(answers["get_device_properties"])
        stack.enter_context(mock.patch.object(CudaInterface.Worker, "get_device_properties", worker))
        for name, value in {
            "get_device_properties": lambda *_: properties,
            "current_device": lambda: 0,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", flash))
        compiling = functools.partial(torch.compile, backend=backend, fullgraph=True)
        stack.enter_context(mock.patch.object(torch, "compile", compiling))
        # Folding constants would compute on the GPU.
        stack.enter_context(
            settings.patch(joint_graph_constant_folding=False, force_disable_caches=True, compile_threads=1)
        )
        triton.runtime.driver.set_active(driver)
        stack.enter_context(fake_gpu())
        yield


def is_large(node: Any) -> bool:
    """Whether a node of a graph is a product or attention."""
    return any(name in str(node.target) for name in ("mm.", "attention"))


def step(options: argparse.Namespace, graphs: list[Graph]) -> int:
    """A step's forward and backward pass; the tokens of it."""
    import torch

    from model.transformer import Transformer
    from pretrain.engine.compiling import compile_network

    config = load_named_model(options.model)
    if options.context:
        config = config.replace(context_length=options.context)
    with compiling_for_an_h100(graphs):
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda", 0):
            network = Transformer(config, fused="all")
        torch.set_default_dtype(torch.float32)
        compile_network(network)
        shape = (options.micro_batch, config.context_length)
        tokens = torch.zeros(shape, dtype=torch.int64, device="cuda")
        network(tokens, tokens).backward()
    return options.micro_batch * config.context_length


def compile_kernel(source: str, folder: Path, number: int) -> int:
    """Compile a kernel in every form that inductor would try on a GPU, and return their number."""
    path = folder / f"kernel_{number}.py"
    path.write_text("from torch._inductor.runtime import triton_helpers\n" + source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    [kernel] = [value for value in vars(module).values() if hasattr(value, "precompile")]
    kernel.precompile(warm_cache_only=True)
    return len(kernel.compile_results)


def main() -> None:
    """Count and print."""
    parser = parser_of(__doc__)
    parser.add_argument("model", help="a preset, or a model file")
    parser.add_argument("--micro_batch", type=int, default=16)
    parser.add_argument("--context", type=int, help="tokens of a sequence, in place of the model's")
    parser.add_argument("--compile", action="store_true", help="compile the kernels to machine code")
    options = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        raise UserError("triton: not installed; pip install triton==3.7.1, the version of torch 2.13")
    if DRIVEN not in os.environ:
        from tests.helpers.fake_gpu import driver_environment

        driven = os.environ | driver_environment() | {DRIVEN: "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], driven)
    os.environ.pop("LD_PRELOAD", None)
    graphs: list[Graph] = []
    tokens = step(options, graphs)
    print("| graph | calls | kernels | bytes a token of a call | of torch's own kernels |")
    print("|---|---:|---:|---:|---:|")
    for number, graph in enumerate(graphs, 1):
        written, own = (graph.bytes[name] / tokens for name in ("written", "torch's own"))
        print(f"| {number} | {graph.calls} | {len(graph.kernels)} | {written:,.0f} | {own:,.0f} |")
    total = sum(graph.calls * graph.bytes["written"] for graph in graphs) / tokens
    launches = sum(graph.calls * len(graph.kernels) for graph in graphs)
    print(f"{len(graphs)} graphs, {launches:,} launches, {total:,.0f} bytes a token")
    results = {"tokens": tokens, "bytes_a_token": total, "launches": launches}
    if options.compile:
        sources = dict.fromkeys(source for graph in graphs for source in graph.kernels)
        from torch._inductor.runtime import triton_helpers

        # Kernels ask for the driver of a GPU when they are read.
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        ):
            forms = [compile_kernel(source, Path(folder), index) for index, source in enumerate(sources)]
        print(f"{len(forms)} different kernels compiled for compute capability 9.0, in {sum(forms)} forms")
        results["compiled"] = len(forms)
    write(options.out, results)


if __name__ == "__main__":
    run_main(main)
