"""Buckets: the size that "auto" becomes, what DeepSpeed reduces with it, and that no size changes the
numbers.

And the precision in which they are reduced.
"""

import json
import math
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from model.presets import preset
from pretrain.config.command_line import parse_command_line
from pretrain.engine import ds_config as ds_config_module
from pretrain.engine.batch import BatchPlan
from pretrain.engine.ds_config import EngineSettings, auto_bucket, merge_ds_config
from pretrain.engine.ds_config_check import BUCKETS, read_ds_config
from tests.helpers.distributed import ROOT, run_distributed
from tests.helpers.marks import slow
from tests.pretrain.engine.ds_configs import SHIPPED, shipped
from tests.pretrain.engine.engines import batches, nano_engine, set_rate

SMALL = 1000
"""Smaller than every matrix of the nano models, larger than their norms."""


# A model, its widths, and how many buckets a block has at each tensor-parallel degree.
PARTS = [
    ("prism-124m", 768, 2048, {1: 1, 2: 1 / 2, 4: 1 / 3}),
    ("uniform-354m", 1024, 2736, {1: 2, 2: 1, 4: 1 / 2}),
    ("prism-757m", 1536, 4096, {1: 5, 2: 2, 4: 1}),
    ("prism-nano", 48, 128, {1: 1 / 181}),
]


@pytest.mark.parametrize(("name", "width", "feed_forward", "parts"), PARTS)
def test_an_automatic_bucket_is_a_part_of_a_block_or_several(name, width, feed_forward, parts):
    for t, number in parts.items():  # a rank has 1/t of the matrices, and all norms
        block = (4 * width**2 + 3 * width * feed_forward) // t + 2 * width
        matrix = width * feed_forward // t
        expected = max(math.ceil(block / number - 1e-6), matrix) + width
        assert auto_bucket(preset(name), t) == expected + expected % 2
        assert 5_000_000 <= block / number < 10_000_000


def test_an_automatic_bucket_is_even_and_has_an_upper_bound():
    assert auto_bucket(preset("prism-757m").replace(d_model=6144, ffn_width=12288)) == 50_000_000
    odd = preset("gpt2-nano").replace(d_model=1025, ffn_width=2049, heads=(1,) * 4)
    block = 4 * 1025**2 + 2 * 1025 * 2049 + 4 * 1025 + 2049 + 1025 + 4 * 1025  # with biases, two LayerNorms
    assert auto_bucket(odd) in (block + 2 * 1025, block + 2 * 1025 + 1) and auto_bucket(odd) % 2 == 0


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_ds_configs_leave_buckets_to_the_model_and_the_planner_reads_the_same(name):
    run, model = parse_command_line(["--tensor_parallel", "2"]).run, preset("prism-757m")
    config = read_ds_config(str(ROOT / f"ds_configs/{name}.json"))
    merged = merge_ds_config(config, run, BatchPlan(32, 4, 8, 1), True, model)
    filled = {key: value for key, value in merged["zero_optimization"].items() if key in BUCKETS}
    assert set(filled.values()) == {auto_bucket(model, 2)} and "auto" not in json.dumps(merged)
    for each in (config, merged):
        settings = EngineSettings.from_run(run, each, True, model)
        assert settings.reduce_bucket == filled["reduce_bucket_size"]
        if settings.stage == 3:
            assert settings.prefetch_bucket == filled["stage3_prefetch_bucket_size"]


def test_numbers_in_a_ds_config_stay():
    config = shipped()
    config["zero_optimization"] |= {"reduce_bucket_size": 2e6, "allgather_bucket_size": 400}
    run, model = parse_command_line([]).run, preset("prism-124m")
    merged = merge_ds_config(config, run, BatchPlan(32, 4, 8, 1), True, model)
    assert [merged["zero_optimization"][key] for key in BUCKETS[:2]] == [2e6, 400]
    assert EngineSettings.from_run(run, config, True, model).reduce_bucket == 2_000_000


def reductions(stage, precision, bucket, steps=3, least=20_000, **changes):
    """Train; return losses and gradient norms, the elements of each reduction of the last backward pass, and
    dtypes.

    bucket: elements, or "auto" for buckets of at least *least* elements, since a nano model is smaller than
        any.
    """
    import deepspeed
    from deepspeed.runtime.zero import stage3

    settings = shipped(f"zero{stage}") | changes
    for key in BUCKETS:
        if key in settings["zero_optimization"]:
            settings["zero_optimization"][key] = bucket
    sizes, dtypes, numbers = [], set(), []

    def noting(original):
        def noted(reduced, *arguments, **options):
            tensors = [reduced] if isinstance(reduced, torch.Tensor) else reduced
            sizes.append(sum(tensor.numel() for tensor in tensors))
            dtypes.update(str(tensor.dtype) for tensor in tensors)
            return original(reduced, *arguments, **options)

        return noted

    auto_bucket.cache_clear()
    with mock.patch.object(ds_config_module, "SMALLEST_BUCKET", least):
        engine, config, plan = nano_engine(settings, precision=precision)
    auto_bucket.cache_clear()
    for micro_batches in batches(config, plan, steps):
        set_rate(engine)
        for inputs, labels in micro_batches:
            loss = engine(inputs, labels)
            sizes.clear()
            with ExitStack() as stack:
                for module, name in ((deepspeed.comm, "all_reduce"), (stage3, "reduce_scatter_coalesced")):
                    noted = noting(getattr(module, name))
                    stack.enter_context(mock.patch.object(module, name, noted))
                engine.backward(loss)
            engine.step()
            numbers.append(loss.item())
        numbers.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return numbers, list(sizes), dtypes


CASES = [(2, "fp32"), *slow([(1, "fp32"), (3, "fp32"), (2, "bf16"), (3, "bf16")])]


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_buckets_smaller_than_a_parameter_keep_the_numbers(stage, precision):
    """Bit for bit on two ranks, where a sum has one order only."""
    sizes = (10**7, SMALL)
    large, small = (run_distributed(reductions, 2, stage, precision, size, timeout=60) for size in sizes)
    for (ours, sizes, _), (theirs, at_once, _) in zip(small, large, strict=True):
        assert ours == theirs and all(math.isfinite(number) for number in ours)
        assert sum(sizes) == sum(at_once) and len(at_once) == 1
        assert len(sizes) > 10 and max(sizes) > 6 * SMALL  # each matrix alone


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_automatic_bucket_reduces_block_by_block(stage):
    model = preset("prism-nano").replace(vocab_size=300)
    width = model.d_model
    block = 4 * width**2 + 3 * width * model.ffn_width + 2 * width
    embedding = model.padded_vocab_size(1) * width
    found = run_distributed(reductions, 2, stage, "fp32", "auto", timeout=60)
    for _, sizes, _ in found:
        # The last block with the final norm, block by block, and the tied embedding, whose gradient comes
        # last. That one is larger than a bucket, and is reduced in as many parts as ranks own of it.
        assert sizes[: model.num_layers] == [block + width, *[block] * (model.num_layers - 1)]
        assert sum(sizes[model.num_layers :]) == embedding and len(sizes) <= model.num_layers + 2


@pytest.mark.parametrize("stage", [2, *slow([1, 3])])
def test_reduction_in_bf16_trains(stage):
    """Sums of two ranks are rounded to 8 bits, 2^-9 relative: norms agree within 1e-2, losses within 1e-3."""
    wide, narrow = (
        run_distributed(reductions, 2, stage, "bf16", "auto", communication_data_type=dtype, timeout=120)[0]
        for dtype in ("fp32", "bf16")
    )
    assert wide[2] == {"torch.float32"} and narrow[2] == {"torch.bfloat16"} and wide[1] == narrow[1]
    assert narrow[0] == pytest.approx(wide[0], rel=1e-2) and narrow[0] != wide[0]
