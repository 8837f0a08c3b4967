"""The plan of context parallelism: memory against what autograd keeps, bytes by hand, what is printed."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from model import context
from model.context import ContextExchange
from model.presets import preset
from model.transformer import Transformer
from pretrain import presets
from pretrain.engine.ds_config import EngineSettings
from pretrain.plan import command
from pretrain.plan.context_parallel import plan_context_parallel
from pretrain.plan.footprint import activations
from pretrain.plan.memory import memory_plan
from tests.helpers.distributed import run_distributed
from tests.model.parallel import shared_grid
from tests.pretrain.plan.test_footprint import GROUPED, LLAMA, WINDOWED

CONFIGS = [
    LLAMA,
    LLAMA.replace(heads=(1, 2)),
    GROUPED,
    WINDOWED.replace(local_window=(None, 16), heads=(1, 1)),
]


def kept_by_autograd(config, context_parallel, batch):
    """Bytes of every storage that a forward pass keeps, parameters apart; the plan's."""
    length = config.context_length
    model = Transformer(config, shared_grid(False, context_parallel))
    tokens = torch.randint(0, config.vocab_size, (batch, length))
    model(tokens, tokens)  # makes the rotary tables
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept.setdefault(storage.data_ptr(), tensor)  # held, so that no other gets its address
        return tensor

    def save(whole, make):
        """save_geometry, which keeps what is not of *whole*."""
        own = whole.untyped_storage().data_ptr()

        def pack(tensor):
            return tensor if tensor.untyped_storage().data_ptr() == own else keep(tensor)

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    gather = ContextExchange.gather_keys

    def gather_keys(exchange, pair, groups):
        return gather(exchange, keep(pair), groups)

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    saves = mock.patch.object(context, "save_geometry", save)
    with hooks, saves, mock.patch.object(ContextExchange, "gather_keys", gather_keys):
        model(tokens, tokens)
    settings = EngineSettings(bf16=False, context_parallel=context_parallel)
    planned = activations(config, batch, settings, device="cpu").total
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), planned


@pytest.mark.parametrize("config", CONFIGS)
def test_activations_are_what_autograd_keeps(config):
    found, planned = zip(*run_distributed(kept_by_autograd, 2, config, 2, 4), strict=True)
    # The last rank's chunks are neighbours, whose output needs not be joined.
    assert planned[0] == pytest.approx(max(found), rel=0.02)


def test_states_are_partitioned_over_context_ranks():
    config = preset("prism-124m").replace(context_length=8192)
    alone, shared = (
        memory_plan(config, EngineSettings(context_parallel=c), ranks, 1) for ranks, c in ((8, 1), (2, 4))
    )
    assert shared.states == alone.states and shared.gradients == alone.gradients
    assert sum(shared.activations.kept) < 0.27 * sum(alone.activations.kept)


def test_bytes_of_a_layer_by_hand():
    plan = plan_context_parallel(preset("prism-124m"), 4, micro_batch=2)
    # Layer 0 has 3 heads of 256, whose keys and values go to 3 other ranks, twice, and their gradients back.
    columns, rows = 3 * 256, 2 * 1024 // 4
    assert plan.layers[0].sent_bytes == (3 * 2 * columns * rows * 3 * 2,) * 4
    # Layer 11 has 12 heads of 64: q, k, v and the output leave three quarters, in both directions.
    assert plan.layers[11].sent_bytes == (2 * 4 * columns * rows * 3 // 4 * 2,)
    # Layer 2 has 6 heads: exchanged with the neighbour, then half of the keys gathered from the other group.
    half = 2 * 4 * columns * rows // 2 + 3 * 2 * columns * rows
    assert plan.layers[2].sent_bytes == (half * 2,) * 2


def test_what_is_printed(capsys):
    assert presets.main(["context", "--model", "prism-124m", "--context_parallel", "4", "8"]) == 0
    printed = capsys.readouterr().out
    assert "heads over 2, keys over 2" in printed and "heads over 4, keys over 2" in printed
    (row,) = (line.split() for line in printed.split("c = 8")[0].splitlines() if line.startswith("0-1 "))
    assert row == ["0-1", "3", "3", "256", "keys", "over", "4", "6.75", "-", "6.75", "14.62"]
    assert presets.main(["context", "--model", "prism-124m", "--context_parallel", "3"]) == 2


def test_a_plan_that_does_not_fit_names_degrees(capsys):
    long = "--config long-757m --gpus_per_node 8 --micro_batch 1 --global_batch_tokens 1048576"
    arguments = [*long.split(), "--architecture.context_length", "131072"]
    assert command.main(arguments) == 2
    assert "or --context_parallel 4; or --context_parallel 8" in capsys.readouterr().err
    assert command.main([*arguments, "--context_parallel", "4"]) == 0
    printed = capsys.readouterr().out
    assert "1 tensor-parallel x 4 context-parallel x 2 data-parallel" in printed
    assert "heads, keys, values" in printed and "gathered keys" in printed
