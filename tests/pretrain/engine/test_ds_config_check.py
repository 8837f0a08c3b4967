"""ds_configs as people have them: all that is wrong is said in one line, and what is taken builds an engine."""

import contextlib
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.config.command_line import parse_command_line
from pretrain.engine.ds_config import EngineSettings, merge_ds_config, resolve_bf16
from pretrain.engine.ds_config_check import LISTED, check_ds_config, read_ds_config, simplified
from pretrain.engine.ds_config_keys import BF16, KEYS, ZERO, Key, Section
from pretrain.engine.memory.micro_batch import plan_batch
from tests.helpers.fuzzing import fixed, seeded
from tests.pretrain.engine.ds_configs import (
    HUGGING_FACE,
    ROOT,
    SHIPPED,
    accepted_ds_configs,
    ds_configs,
    merged,
    shipped,
)

CPU = torch.device("cpu")


def refusal(tmp_path, config, *flags):
    """What read_ds_config says about a ds_config, without the file's name; "" if it is taken."""
    path = tmp_path / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    try:
        read_ds_config(str(path), parse_command_line(list(flags)).run)
    except UserError as error:
        text = str(error)
        assert text.isprintable() and text.startswith("ds_config: ") and len(text) < 10_000
        return text.replace(str(path), "FILE")
    return ""


def zero(**changes):
    return {"zero_optimization": changes}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        # unknown keys
        ({"gradient_cliping": 1.0}, ["gradient_cliping", "did you mean 'gradient_clipping'?"]),
        ({"zero_optimisation": {"stage": 1}}, ["zero_optimisation", "did you mean 'zero_optimization'?"]),
        (zero(reduce_bucket_sise=5), ["zero_optimization.reduce_bucket_sise", "did you mean 'reduce_bucket_size'?"]),
        ({"reduce_bucket_size": 5}, ["did you mean 'zero_optimization.reduce_bucket_size'?"]),
        (zero(train_batch_size=5), ["did you mean 'train_batch_size'?"]),
        ({"fp16": {"enabeld": True}}, ["fp16.enabeld", "did you mean 'enabled'?"]),
        ({"hybrid_engine": {"enable": 1}}, ["hybrid_engine.enable", "did you mean 'enabled'?"]),
        ({"zz": 1}, ["zz is unknown"]),
        ({"a\nb\u001b": 1}, ["'a\\nb\\x1b' is unknown"]),
        # what crashed in DeepSpeed
        ({"bf16": True}, ["bf16 is true", "JSON object"]),
        ({"bf16": 5}, ["bf16 is 5", "JSON object"]),
        ({"bf16": None}, ["bf16 is null", "JSON object"]),
        ({"bf16": {"enabled": None}}, ["bf16.enabled is null", 'true or false or "auto"']),
        (zero(offload_optimizer="cpu"), ["offload_optimizer is 'cpu'", "JSON object or null"]),
        (zero(offload_optimizer=3), ["offload_optimizer is 3", "JSON object or null"]),
        (zero(offload_optimizer={"device": "gpu"}), ["offload_optimizer.device is 'gpu'", '"none" or "cpu"']),
        ({"data_types": "fp32"}, ["data_types is 'fp32'", "JSON object"]),
        ({"data_types": {"grad_accum_dtype": "int8"}}, ["grad_accum_dtype is 'int8'", '"fp32" or "bf16"']),
        ({"communication_data_type": "fp8"}, ["communication_data_type is 'fp8'", '"fp32" or "bf16"']),
        ({"communication_data_type": 32}, ["communication_data_type is 32", '"fp32" or "bf16"']),
        (zero(reduce_bucket_size=-1), ["reduce_bucket_size is -1", "a whole number from 1"]),
        (zero(reduce_bucket_size=True), ["reduce_bucket_size is true", "a whole number from 1"]),
        (zero(reduce_bucket_size=0.5), ["reduce_bucket_size is 0.5", "a whole number from 1"]),
        (zero(reduce_bucket_size="5e8"), ["reduce_bucket_size is '5e8'", "a whole number from 1"]),
        (zero(allgather_bucket_size=3), ["allgather_bucket_size is 3", "an even whole number"]),
        (zero(leaf_module="x"), ["leaf_module is 'x'", "JSON object"]),
        ({"wall_clock_breakdown": "false"}, ["wall_clock_breakdown is 'false'", "true or false"]),
        ({"wall_clock_breakdown": None}, ["wall_clock_breakdown is null", "true or false"]),
        ({"prescale_gradients": True}, ["prescale_gradients is true", "leave it out"]),
        ({"timers": 1}, ["timers is 1", "JSON object"]),
        ({"timers": {"throughput": True}}, ["timers.throughput is true", "JSON object"]),
        ({"tensorboard": 1}, ["tensorboard is 1", "JSON object"]),
        ({"activation_checkpointing": "x"}, ["activation_checkpointing is 'x'", "JSON object"]),
        ({"checkpoint": [1]}, ["checkpoint is [1]", "JSON object"]),
        ({"checkpoint": {"tag_validation": "perhaps"}}, ["tag_validation is 'perhaps'", '"Warn"']),
        ({"tensor_parallel": {"autotp_size": 2}}, ["tensor_parallel", "use --tensor_parallel"]),
        (zero(zero_quantized_weights=True, zero_hpz_partition_size=2), ["2 mistakes", "write 1"]),
        (zero(stage="auto"), ["zero_optimization.stage is 'auto'", "1, 2 and 3"]),
        (zero(stage=True), ["zero_optimization.stage is true", "1, 2 and 3"]),
        (zero(stage=1.5), ["zero_optimization.stage is 1.5", "1, 2 and 3"]),
        (zero(offload_param={"device": "cpu"}), ["offload_param", "the stage is 2", "zero3_offload.json"]),
        (zero(stage3_module_granularity_threshold=1), ["granularity_threshold is 1", "write 0"]),
        (zero(cpu_offload=True), ["cpu_offload is true", '"offload_optimizer": {"device": "cpu"}']),
        (zero(reduce_bucket_size=10**20), ["reduce_bucket_size: 100000000000000000000 is not valid"]),
        (
            zero(stage3_max_live_parameters=1, max_live_parameters=1),
            ["max_live_parameters and stage3_max_live_parameters are the same"],
        ),
        ({"bf16": {}, "bfloat16": {"enabled": True}}, ["bfloat16 is the old name of bf16, and both are there"]),
        ({"compression_training": {"weight_quantization": {"x": 1}}}, ["'compression_training' block", "removed it"]),
        ({"sparse_gradients": True}, ["sparse_gradients is true", "removed it"]),
        ({"amp": {"opt_level": "O1"}}, ["'amp' block", "use bf16 or fp32"]),
        ({"train_batch_size": True}, ["train_batch_size is true", "a whole number from 1"]),
        ({"gradient_clipping": -1}, ["gradient_clipping is -1", "a number from 0"]),
        ({"gradient_clipping": 0.5}, ["gradient_clipping is 0.5", 'makes it 1.0; write "auto"']),
    ],
)  # fmt: skip
def test_one_line_names_field_value_and_what_is_valid(tmp_path, changes, parts):
    text = refusal(tmp_path, merged(shipped(), changes))
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"zero_optimization": {"stage": 2, "stage": 3}}', "gives 'stage' twice"),
        (
            '{"zero_optimization": {"reduce_bucket_size": NaN}}',
            "reduce_bucket_size: nan is not valid; give a finite number",
        ),
        ('{"zero_optimization": {"reduce_bucket_size": -Infinity}}', "reduce_bucket_size: -inf is not valid"),
        ('{"gradient_clipping": 1e999}', "gradient_clipping: inf is not valid"),
        ('{"gradient_clipping": 1' + "0" * 5000 + "}", "5001 digits"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" * 900 + "]" * 900, "nested more than 50 levels deep"),
        ("5", "holds 5; it must hold a JSON object"),
        ("null", "holds null"),
        ("", "is not valid JSON"),
        ('{"a": 1,}', "is not valid JSON"),
        ("\u007f", "is not valid JSON"),
    ],
)
def test_json_that_python_would_take_or_crash_over(tmp_path, text, part):
    assert part in refusal(tmp_path, text)


def test_files_that_are_none(tmp_path):
    (tmp_path / "latin.json").write_bytes('{"ä": 1}'.encode("latin-1"))
    (tmp_path / "utf16.json").write_bytes('{"a": 1}'.encode("utf-16"))
    (tmp_path / "large.json").touch()
    os.truncate(tmp_path / "large.json", (64 << 20) + 1)
    os.mkfifo(tmp_path / "pipe.json")
    for path, reason in {
        tmp_path / "latin.json": "not UTF-8",
        tmp_path / "utf16.json": "not UTF-8",
        tmp_path / "large.json": "67,108,865 bytes; at most 67,108,864 are read",
        tmp_path / "pipe.json": "not a regular file",
        tmp_path: "a folder",
        tmp_path / ("x" * 300): "File name too long",
        tmp_path / "no\n.json": "No such file",
        "nul\0.json": "null byte",
        "/dev/zero": "not a regular file",
    }.items():
        with pytest.raises(UserError, match=re.escape(reason)) as caught:
            read_ds_config(str(path))
        assert str(caught.value).isprintable() and "ds_configs/ holds" in str(caught.value)


def test_a_byte_order_mark_is_passed_over(tmp_path):
    (tmp_path / "ds.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(shipped()).encode())
    assert read_ds_config(str(tmp_path / "ds.json")) == shipped()


def test_everything_is_listed_at_once(tmp_path):
    text = refusal(tmp_path, merged(shipped(), HUGGING_FACE) | {"gradient_cliping": 1, "bf16": 5})
    assert "has 4 mistakes: (1) " in text
    for part in ("gradient_cliping", "bf16 is 5", "'optimizer' block", "'scheduler' block"):
        assert part in text
    began = time.perf_counter()
    many = refusal(tmp_path, shipped() | {f"gradient_clippin{i}": 1 for i in range(30_000)})
    assert f"and {30_000 - LISTED:,} more" in many and time.perf_counter() - began < 5


def test_the_runs_other_settings_are_compared_at_once(tmp_path):
    config = merged(shipped("zero3"), {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 8})
    text = refusal(tmp_path, config, "--precision", "fp32", "--micro_batch", "4", "--compile", "true")
    for part in ("precision is fp32", "micro_batch makes it 4", "compile: true is not valid"):
        assert part in text


def test_an_optimizer_block_says_which_flags_to_write(tmp_path):
    blocks = {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "weight_decay": "$(x)"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 500, "total_num_steps": "auto"},
        },
    }
    text = refusal(tmp_path, shipped() | blocks)
    assert "write --optimizer.learning_rate 3e-05 --optimizer.betas [0.8,0.999];" in text
    assert text.endswith("write --schedule.warmup 500")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_come_through_as_they_are(name):
    path = str(ROOT / f"ds_configs/{name}.json")
    assert json.dumps(read_ds_config(path, parse_command_line([]).run)) == json.dumps(shipped(name))


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        (zero(offload_optimizer=None), {}),
        ({"fp16": {"enabled": "auto", "loss_scale": 0}}, {}),
        ({"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}}, {}),
        ({"sparse_gradients": False, "amp": {"enabled": False}, "tensor_parallel": {"autotp_size": 1}}, {}),
        ({"wall_clock_breakdown": "auto", "steps_per_print": None}, {}),
        (zero(sub_group_size="auto", max_live_parameters="auto"), {}),
        (zero(prefetch_bucket_size="auto"), zero(stage3_prefetch_bucket_size="auto")),
        ({"wall_clock_breakdown": True}, {"wall_clock_breakdown": True}),
        (zero(cpu_offload=False, cpu_offload_param=None), {}),
        (zero(max_live_parameters=1e9), zero(stage3_max_live_parameters=1e9)),
        (
            zero(stage3_gather_fp16_weights_on_model_save=True),
            zero(stage3_gather_16bit_weights_on_model_save=True),
        ),
    ],
)
def test_auto_and_off_leave_nothing_behind(changes, kept):
    config = merged(shipped(), changes)
    assert not check_ds_config(config).texts
    assert simplified(config) == merged(shipped(), kept)


def test_the_old_name_of_bf16_means_bf16():
    config = {"bfloat16" if key == "bf16" else key: value for key, value in shipped().items()}
    config["bfloat16"] = {"enabled": True}
    assert not check_ds_config(config)
    assert resolve_bf16(parse_command_line([]).run, simplified(config), CPU) == (True, "set in the ds_config")


def test_hugging_faces_own_example_needs_two_blocks_less():
    assert len(check_ds_config(HUGGING_FACE).texts) == 2
    rest = {key: value for key, value in HUGGING_FACE.items() if key not in ("optimizer", "scheduler")}
    assert not check_ds_config(rest).texts
    run, model, _ = default_run()
    settings_ = EngineSettings.of(run, simplified(rest), True, model)
    assert settings_.offload_optimizer and settings_.offload_parameters
    # The run fills these in; its model is small, and gets the smallest.
    assert 5_000_000 <= settings_.reduce_bucket == settings_.prefetch_bucket < 5_500_000


def documented():
    """The rows of docs/configuration.md's table: JSON, what happens, what to write instead."""
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    table = text.split("| in a ds_config |")[1].split("\n\n")[0].splitlines()[2:]
    return [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in table]


@pytest.mark.parametrize(("block", "happens", "instead"), documented())
def test_the_documentations_table(tmp_path, block, happens, instead):
    config = merged(shipped("zero3"), json.loads("{" + block.strip("`") + "}"))
    text = refusal(tmp_path, config)
    if happens.startswith("refused"):
        assert text and instead.strip("`") in text, text
    else:
        assert happens.startswith(("works", "off")) and not text and not instead, text
        if happens.startswith("off"):
            assert simplified(config) == shipped("zero3")


def inside(section, key):
    return section.keys[key]


def names_of(section):
    return set(section.keys) if isinstance(section, Section) else set(section.names.split())


@pytest.mark.parametrize(
    ("ours", "module", "theirs"),
    [
        (Section(ZERO), "runtime.zero.config", "DeepSpeedZeroConfig"),
        (ZERO["offload_param"], "runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
        (ZERO["offload_optimizer"], "runtime.zero.offload_config", "DeepSpeedZeroOffloadOptimizerConfig"),
        (ZERO["leaf_module"], "runtime.zero.leaf_module_config", "DeepSpeedZeroLeafModuleConfig"),
        (ZERO["zenflow"], "runtime.zenflow.zenflow_config", "ZenFlowConfig"),
        (BF16, "runtime.precision_config", "DeepSpeedBF16Config"),
        (KEYS["fp16"], "runtime.precision_config", "DeepSpeedFP16Config"),
        (KEYS["hybrid_engine"], "runtime.config", "HybridEngineConfig"),
        (KEYS["tensorboard"], "monitor.config", "TensorBoardConfig"),
        (KEYS["csv_monitor"], "monitor.config", "CSVConfig"),
        (KEYS["wandb"], "monitor.config", "WandbConfig"),
        (KEYS["comet"], "monitor.config", "CometConfig"),
        (KEYS["comms_logger"], "comm.config", "CommsLoggerConfig"),
        (KEYS["compile"], "compile.config", "CompileConfig"),
        (KEYS["tensor_parallel"], "runtime.tensor_parallel.config", "TPTrainingConfig"),
        (inside(KEYS["timers"], "throughput"), "utils.config", "DeepSpeedThroughputTimerConfig"),
    ],
)
def test_the_table_knows_every_field_of_deepspeeds_models(ours, module, theirs):
    fields = getattr(importlib.import_module(f"deepspeed.{module}"), theirs).model_fields
    known = set(fields) | {field.alias for field in fields.values() if field.alias}
    removed = {"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"}
    assert names_of(ours) - removed == known


def test_the_table_knows_every_top_level_key_of_deepspeed():
    from deepspeed.runtime import config, constants

    assert set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) <= set(KEYS)
    assert set(config._REMOVED_ZERO_CONFIG_KEYS) <= set(ZERO)
    # Every name in its constants that has a default is a key, at the top level or in a block.
    names = {
        getattr(constants, name.removesuffix("_DEFAULT"))
        for name in vars(constants)
        if name.endswith("_DEFAULT") and hasattr(constants, name.removesuffix("_DEFAULT"))
    }
    inner = {key for known in KEYS.values() if not isinstance(known, Key) for key in names_of(known)}
    unread = {"check_overflow", "pipeline_stage"}
    assert names - unread <= set(KEYS) | inner
    source = Path(config.__file__).read_text(encoding="utf-8")
    assert set(re.findall(r"""param_dict(?:\.get\(|\[)['"](\w+)['"]""", source)) <= set(KEYS)


def test_a_defaults_type_is_valid_where_a_key_is_honoured():
    """DeepSpeed's own defaults are taken, so that a configuration that spells them out is."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for name, field in DeepSpeedZeroConfig.model_fields.items():
        key = ZERO[field.alias or name]
        default = field.get_default(call_default_factory=True)
        if isinstance(key, Key) and name not in ("stage", "model_persistence_threshold"):
            assert (default is None and key.null) or key.kind.accepts(default), name
            assert key.only is None or default is None or default in key.only, name


def test_nothing_heavy_is_imported_for_the_check():
    code = (
        "import sys; from pretrain.engine.ds_config_check import read_ds_config; "
        "read_ds_config('ds_configs/zero3.json'); "
        "assert not {'torch', 'deepspeed', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


def test_the_command_says_it_at_once(tmp_path):
    (tmp_path / "ds.json").write_text(
        '{"bf16": true, "gradient_cliping": 1, "zero_optimization": {"stage": 2}}'
    )
    before = os.times()
    result = subprocess.run(
        [
            sys.executable,
            "pretrain/main.py",
            "--ds_config",
            tmp_path / "ds.json",
            "--runs_dir",
            tmp_path / "runs",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and "has 2 mistakes" in result.stderr
    # Half a second of processor time; torch alone takes four times as much.
    used = [getattr(os.times(), key) - getattr(before, key) for key in ("children_user", "children_system")]
    assert sum(used) < 1.5 and not (tmp_path / "runs").exists()


@functools.cache
def default_run():
    """The default run, its model and its plan, made once: parsing a command line takes longer than a check."""
    run = parse_command_line([]).run
    model = run.build_model_config(300)
    return run, model, plan_batch(run.global_batch_tokens, 2, model, 1, 1 << 30, "cpu")


def checked(config, path):
    """One example through the check, from a file: taken or refused in one line, within 5 seconds."""
    run, model, plan = default_run()
    path.write_text(json.dumps(config))
    try:
        taken = read_ds_config(str(path), run)
    except UserError as error:
        assert str(error).isprintable(), error
    else:
        assert simplified(taken) == taken and not check_ds_config(taken, run)
        EngineSettings.of(run, taken, resolve_bf16(run, taken, CPU)[0], model)
        with contextlib.suppress(UserError):
            merge_ds_config(taken, run, plan, False, model)
    # From memory NaN and infinity arrive too.
    assert all(text.isprintable() for text in check_ds_config(config, run).texts)
    return path


def taken_or_refused(path):
    @given(st.one_of(ds_configs(), accepted_ds_configs()))
    def test(config):
        checked(config, path)

    return test


def test_fuzzed(tmp_path):
    fixed(taken_or_refused(tmp_path / "fuzzed.json"), examples=200)


@pytest.mark.slow
def test_fuzzed_at_length(tmp_path):
    seeded(taken_or_refused(tmp_path / "fuzzed.json"), examples=2000)
