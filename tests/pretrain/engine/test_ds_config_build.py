"""What the check of ds_configs takes builds an engine that trains; what DeepSpeed refuses all the same is one
line."""

import contextlib
import io
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import event, given

from model.errors import UserError
from pretrain.engine.build import explain_refusals
from pretrain.engine.deepspeed_logging import quiet_start
from pretrain.engine.ds_config_check import check_ds_config, simplify
from tests.helpers.distributed import run_distributed
from tests.helpers.fuzzing import fixed, seeded
from tests.pretrain.engine.ds_configs import ROOT, accepted_ds_configs, merged, shipped
from tests.pretrain.engine.engines import batches, nano_engine


def zero(**changes):
    return {"zero_optimization": changes}


def build(config, folder):
    """Build an engine on one rank and take two steps: "refused", or the last loss and the gradient's norm."""
    if isinstance(config.get("csv_monitor"), dict):
        config["csv_monitor"]["output_path"] = folder
    if isinstance(config.get("flops_profiler"), dict):
        config["flops_profiler"]["output_file"] = f"{folder}/flops.txt"
    if check_ds_config(config):
        return "refused by the check"
    config = simplify(config)
    precision = "bf16" if config.get("bf16", {}).get("enabled") is True else "fp32"
    try:
        engine, model, plan = nano_engine(config, precision=precision)
    except UserError as error:
        assert str(error).isprintable()
        return f"refused: {error}"
    try:
        # A second step, since profilers speak at the end of one.
        for micro_batches in batches(model, plan, 2):
            for inputs, labels in micro_batches:
                loss = engine(inputs, labels)
                engine.backward(loss)
                engine.step()
        return loss.item(), float(engine.get_global_grad_norm())
    except RuntimeError as error:  # a bucket may be larger than this machine's memory
        if "can't allocate memory" in str(error):
            return f"refused: {error}"
        raise
    finally:
        from deepspeed.utils import set_log_level_from_string

        set_log_level_from_string("warning")
        engine.destroy()


def built(config, folder, timeout=120):
    """What is taken by the check builds and trains with finite numbers, or DeepSpeed rejects it."""
    result = run_distributed(build, 1, config, str(folder), timeout=timeout)[0]
    if isinstance(result, str):
        assert result.startswith("refused"), (result, config)
    else:
        assert all(math.isfinite(number) for number in result), (result, config)
    return result


def all_build(folder, **chosen):
    """A test: whatever the check takes builds an engine."""

    @given(accepted_ds_configs(**chosen))
    def test(config):
        event("refused" if isinstance(built(config, folder), str) else "trained")

    return test


def test_what_is_taken_builds_an_engine(tmp_path):
    fixed(all_build(tmp_path), examples=4)


@pytest.mark.slow
def test_what_is_taken_builds_an_engine_at_length(tmp_path):
    built(shipped("zero2_offload"), tmp_path, timeout=600)  # compiles the optimizer
    seeded(all_build(tmp_path, offload=True), examples=40)


def curve(name, changes, steps=2):
    """Losses and gradient norms of a few steps on this rank's share of the same batches."""
    config = merged(shipped(name), changes)
    assert not check_ds_config(config)
    engine, model, plan = nano_engine(simplify(config), precision="bf16" if name == "zero1" else "fp32")
    numbers = []
    for micro_batches in batches(model, plan, steps):
        for inputs, labels in micro_batches:
            loss = engine(inputs, labels)
            engine.backward(loss)
            engine.step()
            numbers.append(loss.item())
        numbers.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return numbers


KNOBS = {
    "zero1": [{"bf16": {"enabled": "auto", "immediate_grad_update": True}}],
    "zero2": [
        zero(reduce_scatter=False),
        zero(contiguous_gradients=False, overlap_comm=False),
        zero(use_multi_rank_bucket_allreduce=False, allgather_partitions=False),
        zero(reduce_bucket_size=1000, allgather_bucket_size=2),
        zero(round_robin_gradients=True, parameter_alignment=True, ignore_unused_parameters=False),
        {"disable_python_gc": True, "timers": {"throughput": {"enabled": False}}},
    ],
    "zero3": [
        zero(contiguous_gradients=False, overlap_comm=False),
        zero(reduce_scatter=False),
        zero(reduce_bucket_size=1000, sub_group_size=1000, stage3_prefetch_bucket_size=0),
        zero(stage3_use_all_reduce_for_fetch_params=True, override_module_apply=False),
        zero(stage3_allgather_sequential=True, memory_efficient_linear=False),
        zero(enable_sanity_checks=True, log_trace_cache_warnings=True),
        zero(stage3_max_live_parameters=0, stage3_max_reuse_distance=0, stage3_param_persistence_threshold=0),
        zero(stage3_model_persistence_threshold=0, round_robin_gradients=True),
        zero(offload_param={"device": "cpu", "pin_memory": False}),
    ],
}


EACH_KNOB = [(name, knob) for name, knobs in KNOBS.items() for knob in knobs]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), EACH_KNOB)
def test_a_knob_that_is_taken_leaves_the_numbers_alone(name, changes):
    reference = run_distributed(curve, 2, name, {}, timeout=120)
    for ours, theirs in zip(run_distributed(curve, 2, name, changes, timeout=120), reference, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


REFUSALS = [
    (AssertionError("allgather_bucket_size must be even\nmore"), "allgather_bucket_size must be even"),
    (ValueError(""), "no reason given"),
]


@pytest.mark.parametrize(("error", "said"), REFUSALS)
def test_what_deepspeed_refuses_is_one_line(error, said):
    refused = pytest.raises(UserError, match="ds_config: DeepSpeed rejects it: ")
    with refused as caught, explain_refusals():
        raise error
    assert said in str(caught.value) and str(caught.value).isprintable()
    assert caught.value.__cause__ is error


OTHERS = [torch.OutOfMemoryError("no memory"), torch.AcceleratorError("an assert"), UserError("said already")]


@pytest.mark.parametrize("error", OTHERS)
def test_what_says_nothing_about_the_configuration_passes(error):
    with pytest.raises(type(error)) as caught, explain_refusals():
        raise error
    assert caught.value is error


def test_errors_of_collectives_pass_whatever_their_words():
    """They say that a rank is gone, not that the configuration is wrong."""
    with pytest.raises(ValueError, match="process group") as caught, explain_refusals():
        torch.distributed.barrier()  # no group here
    assert not isinstance(caught.value, UserError)


def start():
    """What building a stage-1 engine in bf16 prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        nano_engine(shipped("zero1"), precision="bf16")[0].destroy()
    return output.getvalue()


def test_deepspeeds_own_lines_stay_out_of_the_log():
    assert run_distributed(start, 1, timeout=120) == [""]


@pytest.mark.slow
def test_warnings_are_heard_while_an_engine_starts():
    code = (
        "from pretrain.engine.deepspeed_logging import quiet_deepspeed, quiet_start\n"
        "quiet_deepspeed()\n"
        "from deepspeed.utils import logger\n"
        "with quiet_start():\n"
        "    print('memory'); logger.info('advice'); logger.warning('mind this')\n"
    )
    command, path = [sys.executable, "-c", code], {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | path)
    output = result.stdout + result.stderr
    assert "mind this" in output and "memory" not in output and "advice" not in output, output
    with contextlib.redirect_stdout(io.StringIO()) as kept, quiet_start(wanted=True):
        print("memory")
    assert kept.getvalue() == "memory\n"
