"""ds_configs as people have them: all that is wrong is said in one line, and what is taken builds an
engine."""

import contextlib
import functools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.config.command_line import parse_command_line
from pretrain.engine.ds_config import EngineSettings, bf16_by, merge_ds_config
from pretrain.engine.ds_config_check import (
    NOT_SUPPORTED,
    check_ds_config,
    read_ds_config,
    simplify,
    supported_keys,
)
from pretrain.plan.micro_batch import plan_batch
from tests.helpers.fuzzing import fixed
from tests.pretrain.engine import ds_configs as made
from tests.pretrain.engine.ds_configs import HUGGING_FACE, ROOT, SHIPPED, merged, shipped

ZERO = "zero_optimization"
BLOCKS = [ZERO, f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param", "timers.throughput"]
BLOCKS += ["bf16", "data_types", "timers", "flops_profiler", "comms_logger", "csv_monitor", "tensorboard"]
BLOCKS += ["aio"]


def refusal(tmp_path, config):
    """What the check says about a ds_config, without the file's name; "" if it is taken."""
    path = tmp_path / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    try:
        read_ds_config(str(path))
    except UserError as error:
        text = str(error)
        assert text.isprintable() and text.startswith("ds_config: ") and len(text) < 10_000
        return text.replace(str(path), "FILE")
    return ""


def zero(**changes):
    return {"zero_optimization": changes}


def at(path, value):
    """A ds_config with one setting, such as zero_optimization.stage."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


# Other kinds are in tests/pretrain/test_refusals.py.
SAID = [
    (zero(reduce_bucket_sise=5), "did you mean 'zero_optimization.reduce_bucket_size'?"),
    ({"reduce_bucket_size": 5}, "did you mean 'zero_optimization.reduce_bucket_size'?"),
    (zero(train_batch_size=5), "did you mean 'train_batch_size'?"),
    ({"a\nb\u001b": 1}, "a\\nb\\x1b is unknown"),
    ({"bf16": {"enabled": None}}, 'bf16.enabled is null … true, false or "auto"'),
    (zero(offload_optimizer={"device": "gpu"}), 'offload_optimizer.device is \'gpu\' … "device": "cpu"'),
    (zero(reduce_bucket_size=-1), "reduce_bucket_size is -1 … give a whole number from 1"),
    (zero(reduce_bucket_size=5.5), "reduce_bucket_size is 5.5 … give a whole number from 1"),
    ({"timers": {"throughput": {"enable": 1}}}, "did you mean 'timers.throughput.enabled'?"),
    ({"log_level": "loud"}, "log_level is 'loud' … give one of debug, info"),
    ({"data_types": {"grad_accum_dtype": "fp16"}}, "grad_accum_dtype is 'fp16' … fp32 or bf16"),
    (zero(stage=True), "zero_optimization.stage is true … 1, 2 and 3"),
    (zero(stage=0), "zero_optimization.stage is 0 … 1, 2 and 3"),
    (zero(offload_param={"device": "cpu"}), "offload_param … the stage is 2 … zero3_offload.json"),
    ({"train_batch_size": True}, "train_batch_size is true … a whole number"),
    (zero(prefetch_bucket_size=5), "did you mean 'zero_optimization.stage3_prefetch_bucket_size'?"),
    ({"bfloat16": {"enabled": True}}, 'bfloat16 is {"enabled": true}; write "bf16"'),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer is { … use --optimizer.*"),
]


@pytest.mark.parametrize(("changes", "said"), SAID, ids=[said for _, said in SAID])
def test_one_line_names_field_value_and_what_is_valid(tmp_path, changes, said):
    text = refusal(tmp_path, merged(shipped(), changes))
    assert all(part in text for part in said.split(" … ")), text


@pytest.mark.parametrize("path", BLOCKS)
def test_a_block_is_a_mapping(tmp_path, path):
    """DeepSpeed crashes over other values."""
    for value in (True, 5, "cpu", [1]):
        text = refusal(tmp_path, merged(shipped("zero3"), at(path, value)))
        assert f"{path} is " in text and "give a mapping" in text


@pytest.mark.parametrize("path", NOT_SUPPORTED)
def test_what_is_refused_says_what_to_write_and_is_left_out_while_it_is_off(tmp_path, path):
    for value in (True, {"x": 1}):
        text = refusal(tmp_path, merged(shipped("zero3"), at(path, value)))
        assert f"{path} is " in text and NOT_SUPPORTED[path] in text
    block = path.rpartition(".")[0]
    left = merged(shipped("zero3"), at(block, {}) if block else {})
    automatic = [] if path == "bfloat16" else ["auto"]  # of that it would be on
    for value in (False, None, 0, *automatic, {"enabled": False, "x": 1}):
        off = merged(shipped("zero3"), at(path, value))
        assert refusal(tmp_path, off) == "" and simplify(off) == left, value


FILES = {
    '{"zero_optimization": {"stage": 2, "stage": 3}}': "gives 'stage' twice",
    '{"zero_optimization": {"reduce_bucket_size": NaN}}': "reduce_bucket_size: nan is not valid",
    '{"a": 1,}': "is not valid JSON",
    json.dumps({"log_level": "\ud800"}): "log_level is '\\ud800'",
}


@pytest.mark.parametrize(("text", "part"), FILES.items())
def test_files_without_a_ds_config(tmp_path, text, part):
    assert part in refusal(tmp_path, text)
    with pytest.raises(UserError, match=r"cannot read.*by their names alone: zero1"):
        read_ds_config(str(tmp_path))


def test_everything_is_listed_at_once(tmp_path):
    text = refusal(tmp_path, merged(shipped(), HUGGING_FACE) | {"gradient_cliping": 1, "bf16": 5})
    for part in ("gradient_cliping", "bf16 is 5", "optimizer is ", "scheduler is "):
        assert part in text


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_come_through_as_they_are(name):
    path = str(ROOT / f"ds_configs/{name}.json")
    assert json.dumps(read_ds_config(path)) == json.dumps(shipped(name))


OFF = [
    zero(offload_optimizer=None, sub_group_size="auto", stage3_max_live_parameters="auto"),
    {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
    {"sparse_gradients": False, "amp": {"enabled": False}, "tensor_parallel": {"autotp_size": 0}},
    {"fp16": {"enabled": "auto", "loss_scale": 0}, "wall_clock_breakdown": "auto", "steps_per_print": None},
]


@pytest.mark.parametrize("changes", OFF)
def test_auto_and_off_leave_nothing_behind(changes):
    config = merged(shipped(), changes)
    assert not check_ds_config(config)
    assert simplify(config) == shipped()


def test_a_misspelled_key_is_unknown_also_if_it_is_automatic():
    for path in ("bf16.enable", "zero_optimization.overlap_com", "bf_16"):
        (mistake,) = check_ds_config(merged(shipped(), at(path, "auto")))
        assert mistake.startswith(f"{path} is unknown")
    assert check_ds_config(merged(shipped(), {"bfloat16": {"enabled": "auto"}}))


def test_hugging_faces_own_example_needs_two_blocks_less():
    assert len(check_ds_config(HUGGING_FACE)) == 2
    rest = {key: value for key, value in HUGGING_FACE.items() if key not in ("optimizer", "scheduler")}
    assert not check_ds_config(rest)
    run, model, _ = default_run()
    settings_ = EngineSettings.from_run(run, simplify(rest), True, model)
    assert settings_.offload_optimizer and settings_.offload_parameters
    # The run fills these in; its model is small, and gets the smallest.
    assert 5_000_000 <= settings_.reduce_bucket == settings_.prefetch_bucket < 5_500_000


def documented():
    """The rows of docs/configuration.md's table: JSON, what happens, what to write instead."""
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    table = text.split("| in a ds_config |")[1].split("\n\n")[0].splitlines()[2:]
    return [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in table]


# As the rows of that table, which has the commonest only.
OTHERS = [
    ('"tensor_parallel": {"autotp_size": 2}', "rejected", "--tensor_parallel"),
    ('"sequence_parallel_size": 2', "rejected", "--context_parallel"),
    ('"gradient_clipping": "auto"', "works", ""),
    ('"torch_autocast": {"enabled": true, "dtype": "bfloat16"}', "rejected", "--precision bf16"),
    ('"wall_clock_breakdown": true', "works", ""),
    ('"comms_logger": {"enabled": true, "verbose": true}', "works", ""),
    ('"csv_monitor": {"enabled": true, "output_path": "csv/", "job_name": "mine"}', "works", ""),
    ('"checkpoint": {"load_universal": true}', "rejected", "leave it out"),
    ('"communication_data_type": "fp16"', "rejected", "fp32 or bf16"),
    ('"fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}', "off", ""),
    ('"amp": {"enabled": true, "opt_level": "O1"}', "rejected", '"bf16": {"enabled": "auto"}'),
    ('"bf16": {"enabled": true}', "works", ""),
    ('"bf16": "auto"', "works", ""),
    ('"bf16": {"enabled": true, "bf16_master_weights_and_grads": true}', "rejected", "leave it out"),
    (
        '"activation_checkpointing": {"partition_activations": false, "number_checkpoints": null}',
        "off",
        "",
    ),
    (
        '"flops_profiler": {"enabled": true, "module_depth": -1, "top_modules": 1, "output_file": null}',
        "works",
        "",
    ),
    ('"steps_per_print": 2000', "works", ""),
    ('"memory_breakdown": true', "works", ""),
    ('"dump_state": true', "rejected", "ds_config.json"),
    ('"comms_logger": {"enabled": true, "prof_all": true, "debug": false}', "works", ""),
    ('"tensorboard": {"enabled": false, "output_path": "tb/", "job_name": "mine"}', "works", ""),
    ('"comet": {"enabled": true}', "rejected", "--logging.wandb online"),
    (f'"{ZERO}": {{"offload_optimizer": {{"device": "cpu", "pin_memory": true}}}}', "works", ""),
    (f'"{ZERO}": {{"offload_optimizer": null}}', "works", ""),
    (
        f'"{ZERO}": {{"offload_param": {{"device": "nvme", "nvme_path": "/local_nvme"}}}}',
        "rejected",
        '"device": "cpu"',
    ),
    (f'"{ZERO}": {{"offload_optimizer": {{"device": "cpu", "ratio": 0.5}}}}', "rejected", "write 1.0"),
    (f'"{ZERO}": {{"cpu_offload": true}}', "rejected", '"offload_optimizer": {"device": "cpu"}'),
    ('"aio": {"block_size": 262144, "queue_depth": 32, "single_submit": false}', "works", ""),
    (
        f'"{ZERO}": {{"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}}',
        "works",
        "",
    ),
    (f'"{ZERO}": {{"stage3_gather_fp16_weights_on_model_save": true}}', "works", ""),
    (
        f'"{ZERO}": {{"zero_quantized_weights": true, "zero_quantized_gradients": true}}',
        "rejected",
        "leave it out",
    ),
    (f'"{ZERO}": {{"mics_shard_size": 8}}', "rejected", "leave it out"),
    ('"prescale_gradients": true', "rejected", "leave it out"),
    ('"data_types": {"grad_accum_dtype": "bf16"}', "works", ""),
    ('"checkpoint": {"tag_validation": "Warn"}', "works", ""),
    ('"data_efficiency": {"enabled": true}', "rejected", "leave it out"),
    ('"elasticity": {"enabled": true}', "rejected", "leave it out"),
    ('"sparse_gradients": false', "off", ""),
]


@pytest.mark.parametrize(("block", "happens", "instead"), [*documented(), *OTHERS])
def test_what_the_documentation_says_of_a_block(tmp_path, block, happens, instead):
    config = merged(shipped("zero3"), json.loads("{" + block.strip("`") + "}"))
    text = refusal(tmp_path, config)
    if happens.startswith("rejected"):
        assert text and instead.strip("`") in text, text
    else:
        assert happens.startswith(("works", "off")) and not text and not instead, text
        if happens.startswith("off"):
            assert simplify(config) == shipped("zero3")


def test_deepspeed_knows_every_key_that_is_supported():
    """Or it would be ignored."""
    from deepspeed.runtime import config, constants
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    source = Path(config.__file__).read_text(encoding="utf-8")
    named = {value for name, value in vars(constants).items() if name.isupper() and isinstance(value, str)}
    named |= set(re.findall(r"""param_dict(?:\.get\(|\[)['"](\w+)['"]""", source))
    zero = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    paths = [path.split(".") for path in supported_keys()]
    assert {path[1] for path in paths if path[0] == ZERO and len(path) == 2} <= zero
    elsewhere = {"aio", "comms_logger", "csv_monitor", "flops_profiler", "tensorboard", "timers"}
    assert {path[0] for path in paths} - named == elsewhere, "read by modules of their own"


def test_deepspeeds_own_defaults_are_taken(tmp_path):
    """A configuration that spells them out is valid."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    repeated = {"leaf_module", "stage3_gather_fp16_weights_on_model_save"}
    defaults = json.loads(DeepSpeedZeroConfig().model_dump_json(by_alias=True, exclude=repeated))
    assert refusal(tmp_path, shipped("zero3") | {"zero_optimization": defaults | {"stage": 3}}) == ""


@functools.cache
def default_run():
    """The default run, its model and its plan, made once: parsing a command line takes longer than a
    check."""
    run = parse_command_line([]).run
    model = run.build_model_config(300)
    return run, model, plan_batch(run.global_batch_tokens, 2, model, 1, 1 << 30, "cpu")


@pytest.mark.slow
def test_fuzzed(tmp_path):
    """Taken or refused in one line."""
    path = tmp_path / "fuzzed.json"

    @given(st.one_of(made.ds_configs(), made.accepted_ds_configs()))
    def test(config):
        run, model, plan = default_run()
        path.write_text(json.dumps(config))
        try:
            taken = read_ds_config(str(path))
        except UserError as error:
            assert str(error).isprintable(), error
        else:
            assert simplify(taken) == taken and not check_ds_config(taken)
            EngineSettings.from_run(run, taken, bool(bf16_by(run, taken)), model)
            with contextlib.suppress(UserError):
                merge_ds_config(taken, run, plan, False, model)

    fixed(test, examples=200)
