"""Whether a run is compiled; that compiling changes no more than rounding, and later steps add no graphs."""

from __future__ import annotations

import deepspeed
import pytest
import torch

from model.blocks import block
from model.errors import UserError
from model.initialization import initialize
from model.transformer import Transformer
from pretrain.config.run_config import RunConfig
from pretrain.engine import build, compiling
from pretrain.engine.build import build_run_optimizer
from pretrain.engine.compiling import compile_network, find_missing_compiler
from pretrain.trainer import Trainer
from tests.helpers.distributed import run_distributed
from tests.helpers.training import curve, nano_run, session

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MODEL = block("llama", vocab_size=300, context_length=64, d_model=48, ffn_width=96, heads=(2, 3))


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_compiler_is_missed(monkeypatch, tmp_path, device):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert (find_missing_compiler(device) or "").startswith("no compiler: none of ")


def test_offloading_adamw_needs_a_compiler(monkeypatch, tmp_path):
    """But an operator that is built already does not."""
    network, offload = Transformer(MODEL), {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(deepspeed.ops.adam, "DeepSpeedCPUAdam", lambda groups, **_: torch.optim.AdamW(groups))
    monkeypatch.setattr(build, "count_loaded_steps", lambda optimizer: None)
    build_run_optimizer(RunConfig(), network, offload)

    def fail(groups, **_):
        raise RuntimeError("DeepSpeedCPUAdam requires the cpu_adam op, which failed to build/load.")

    monkeypatch.setattr(deepspeed.ops.adam, "DeepSpeedCPUAdam", fail)
    with pytest.raises(UserError, match=r"^ds_config: offload_optimizer with AdamW compiles .*g\+\+"):
        build_run_optimizer(RunConfig(), network, offload)


def test_python_headers_are_missed(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling.shutil, "which", lambda name: name)
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "python3-dev" in (find_missing_compiler(CPU) or "")


def graphs_after_steps(run: RunConfig) -> list[int]:
    """Train; how many graphs there were after each step."""
    counts: list[int] = []
    original = Trainer._note

    def count(self, *figures):
        counts.append(compiling.count_compiled_graphs())
        original(self, *figures)

    Trainer._note = count  # type: ignore[method-assign]
    try:
        session(run)
    finally:
        Trainer._note = original  # type: ignore[method-assign]
    return counts


@pytest.mark.slow  # it compiles three kinds of blocks, for training and for validation
def test_compiling_changes_rounding_only_and_ends_after_two_steps(small_folder, tmp_path):
    flags = ("--heads", "1,2,4,4", "--fused", "all", "--micro_batch", "4", "--diagnostics_every", "4")
    plain = nano_run(small_folder, tmp_path, *flags, "--name", "plain", "--compile", "false")
    compiled = nano_run(small_folder, tmp_path, *flags, "--name", "compiled", "--compile", "true")
    run_distributed(graphs_after_steps, 1, plain, timeout=120)
    [counts] = run_distributed(graphs_after_steps, 1, compiled, timeout=400)
    assert counts[1] > 3 and len(counts) == 12
    # Validation, after step 4, has graphs of its own; the steps after it have none.
    assert counts[1] == counts[3] and counts[4] == counts[-1]
    for one, other in zip(curve(plain.folder), curve(compiled.folder), strict=True):
        assert other["train_loss"] == pytest.approx(one["train_loss"], rel=1e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


@pytest.mark.slow  # it compiles two shapes of blocks
def test_an_event_of_growth_compiles_once(small_folder, tmp_path):
    """The two steps after an event may add graphs; later steps add none until the next event."""
    growth = "--growth.criterion schedule --growth.schedule '{4: 2x4, 8: 3x4}' --growth.head_dim 16"
    settings = "--compile true --micro_batch 4 --validation.every 0"
    run = nano_run(small_folder, tmp_path, settings, growth)
    [counts] = run_distributed(graphs_after_steps, 1, run, timeout=400)
    assert len(counts) == 12
    for first in (0, 4, 8):
        assert counts[first + 1] == counts[first + 3] > (counts[first - 1] if first else 0)


@pytest.mark.slow  # it compiles two kinds of blocks twice
def test_compiled_blocks_keep_less_on_a_cpu_with_the_same_bits():
    import torch._functorch.config as partitioning

    tokens = torch.randint(300, (2, 65), generator=torch.Generator().manual_seed(1))

    def step(by_default: bool):
        torch.compiler.reset()
        network = Transformer(MODEL)
        initialize(network, seed=1)
        compile_network(network)
        if by_default:
            partitioning.ban_recompute_materialized_backward = True
        kept = []

        def keep(tensor):
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = network(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        wide = sum(tensor.numel() == 2 * 64 * MODEL.ffn_width for tensor in kept)
        return wide, loss, [parameter.grad for parameter in network.parameters()]

    before = partitioning.ban_recompute_materialized_backward
    try:
        (wide, loss, gradients), (wide_by_default, *others) = step(False), step(True)
    finally:
        partitioning.ban_recompute_materialized_backward = before
        torch.compiler.reset()
    assert wide == 2 * MODEL.num_layers, "gate and up of every block"
    assert wide_by_default == 3 * MODEL.num_layers, "and their product"
    assert torch.equal(loss, others[0]) and all(map(torch.equal, gradients, others[1]))
