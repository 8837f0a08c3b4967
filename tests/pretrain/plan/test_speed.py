"""The predicted time of a step: its work is what torch counts on meta tensors; the rest is computed by
hand."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from benchmarks.traffic import optimizer_bytes, step
from model.blocks import block
from model.errors import UserError
from model.presets import preset
from pretrain.engine.batch import BatchPlan
from pretrain.engine.ds_config import EngineSettings
from pretrain.plan.command import main
from pretrain.plan.speed import STEP_BYTES, Work, assumed_rates, count_work, muon_flops, rate_for, read_rates

ONE = BatchPlan(sequences=8, micro_batch=8, accumulation=1, data_parallel=1)
SETTINGS = EngineSettings(fused="all")
RATES = {"source": "a test", "products": {"768": 5e14}, "attention": {"64": 1e14, "512": 5e13}, "bytes": 2e12}


@pytest.mark.parametrize("name", ["prism-124m", "prism-757m"])
def test_work_is_that_of_meta_tensors(name):
    """Products and attention exactly. The kernels that torch.compile writes move somewhat more than stand-ins
    that read and write once."""
    config = preset(name)
    work = count_work(config, SETTINGS, ONE, 1, compiled=True)
    traffic, flops = step(config, ONE.micro_batch, "all", compiled=True)
    assert work.products + sum(work.attention.values()) == pytest.approx(flops, rel=1e-6)
    products = ("mm", "flash")
    others = sum(count for kernel, count in traffic.bytes.items() if not kernel.startswith(products))
    assert 1.0 < work.bytes / (others + optimizer_bytes(config)) < 1.3


SMALL = {"vocab_size": 256, "context_length": 64, "d_model": 48, "ffn_width": 128}


def test_attention_is_counted_by_kernel():
    """Of 8 x 64 tokens, in units of 2 A FLOPs: 7 products of the keys that a kernel reads for a query."""
    heads = {"heads": (3, 3, 1, 0), "ffn_width": 128}
    config = block("llama", **SMALL | heads, local_window=(None, 16, None, None))
    unit = 8 * 64 * 2 * 48 * 7
    windowed = count_work(config, SETTINGS, ONE, 1, compiled=True).attention
    assert windowed == {16: unit * (32 + 64), 48: unit * 32}  # behind a mask all 64 keys are computed
    packed = dataclasses.replace(SETTINGS, document_mask=True)  # flash knows windows: 16, fewer at the start
    assert count_work(config, packed, ONE, 1, compiled=True).attention[16] == unit * (32 + 16 - 2)
    again = dataclasses.replace(SETTINGS, checkpointing=True)
    assert count_work(config, again, ONE, 1, compiled=True).attention[48] == unit * 32 * 9 / 7


def test_ranks_share_the_work():
    config = block("llama", **SMALL, heads=(2, 4))
    whole = count_work(config, SETTINGS, ONE, 1, compiled=True)
    halves = count_work(config, SETTINGS, dataclasses.replace(ONE, data_parallel=2), 2, compiled=True)
    assert halves.products == whole.products / 2
    assert halves.attention == {dim: flops / 2 for dim, flops in whole.attention.items()}
    assert whole.bytes / 2 < halves.bytes < whole.bytes  # both have all hidden states
    parts = dataclasses.replace(SETTINGS, context_parallel=2)
    assert count_work(config, parts, ONE, 1, compiled=True).products == whole.products / 2
    assert count_work(config, SETTINGS, ONE, 1, compiled=False).bytes > 2 * whole.bytes


def test_the_matrices_of_muon_are_spread_over_all_ranks():
    config, muon = block("llama", **SMALL, heads=(2, 4)), dataclasses.replace(SETTINGS, muon=True)
    spread = dataclasses.replace(muon, context_parallel=2), dataclasses.replace(SETTINGS, context_parallel=2)
    with_it, without = (count_work(config, each, ONE, 2, compiled=True).products for each in spread)
    assert with_it - without == pytest.approx(muon_flops(config) / 4)


def test_a_classifier_moves_the_logits_of_its_classes():
    config = block("llama", **SMALL, heads=(2, 4))
    moved = [
        count_work(each, SETTINGS, ONE, 1, compiled=True)
        for each in (config.replace(classes=n) for n in (2, 3))
    ]
    parameters = moved[1].products - moved[0].products
    assert (
        parameters == 6 * 8 * 64 * 48
        and moved[0].bytes < count_work(config, SETTINGS, ONE, 1, compiled=True).bytes
    )
    logits, gradient = 6 * 8 * 64, 22 * 48  # bf16, three times; see count_work
    step = moved[1].bytes - moved[0].bytes - logits - gradient
    assert step == pytest.approx(48 * STEP_BYTES)


def test_muon_adds_five_iterations():
    config = block("llama", **SMALL, heads=(2,))
    square, wide = 2 * (2 * 48**3 + 48**3), 2 * (2 * 48 * 48 * 128 + 48**3)
    assert muon_flops(config) == 5 * (4 * square + 3 * wide)
    plain, muon = (
        count_work(config, dataclasses.replace(SETTINGS, muon=on), ONE, 1, compiled=True).products
        for on in (False, True)
    )
    assert muon - plain == muon_flops(config)


def test_seconds_are_sums_of_work_over_rates(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(RATES))
    rates = read_rates(str(path))
    work = Work(products=1e15, attention={48: 2e14, 384: 1e14, 1024: 1e14}, bytes=1e12)
    assert work.seconds(rates, 768) == pytest.approx(2 + 2 + 2 + 2 + 0.5)
    known = {64: 1.0, 128: 2.0}
    assert [rate_for(known, size) for size in (16, 64, 65, 128, 500)] == [1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bytes": -1}, "bytes: -1 is not valid; give a number above 0"),
        ({"attention": {}}, "attention: {} is not valid; give at least 1 value"),
        ({"products": {"wide": 1e12}}, "products.wide: .* is not valid; give a whole number"),
        ({"speed": 1}, "speed: unknown"),
    ],
)
def test_bad_rates_are_one_line(tmp_path, change, message):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(RATES | change))
    with pytest.raises(UserError, match=message):
        read_rates(str(path))
    path.write_text("{")
    with pytest.raises(UserError, match="rates: cannot read"):
        read_rates(str(path))


def test_the_command_predicts(tmp_path, capsys):
    run = ["--config", "124m", "--micro_batch", "16"]
    assert main([*run, "--json"]) == 0
    assumed = json.loads(capsys.readouterr().out)
    assert assumed["rates"] == "assumed shares of the data sheet" and 0.2 < assumed["mfu"] < 0.6
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(RATES))
    assert main([*run, "--rates", str(path)]) == 0
    text = capsys.readouterr().out
    work = count_work(preset("prism-124m"), SETTINGS, BatchPlan(256, 16, 16, 1), 1, compiled=True)
    found = re.search(r"time     (\S+) s a step, .* at an MFU of 0\.\d+ of 989", text)
    assert float(found[1]) == pytest.approx(work.seconds(read_rates(str(path)), 768), rel=5e-3)
    assert "predicted from counted work and a test, without communication" in text
    refused = {"--mfu 0.4": "give --rates or --mfu, not both", "--precision fp32": "they are those of bf16"}
    for more, message in refused.items():
        assert main([*run, "--rates", str(path), *more.split()]) == 2
        assert message in capsys.readouterr().err
    assert assumed_rates(1e15, 3.35e12).products[768] == pytest.approx(5.5e14)
