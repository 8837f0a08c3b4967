"""ds_configs: what is filled in, and what is refused."""

import json

import pytest
import torch

from model.errors import UserError
from model.presets import preset
from pretrain.config.command_line import parse_command_line
from pretrain.engine.batch import BatchPlan
from pretrain.engine.ds_config import bf16_by, merge_ds_config
from pretrain.engine.ds_config_check import read_ds_config
from tests.helpers.launch import ROOT

CPU = torch.device("cpu")
MODEL = preset("prism-nano")
SHIPPED = ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]


def write(tmp_path, **changes):
    config = json.loads((ROOT / "ds_configs/zero2.json").read_text())
    for key, value in changes.items():
        if value is None:
            del config[key]
        else:
            config[key] = value
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_own_nothing_of_the_run(name):
    config = read_ds_config(str(ROOT / f"ds_configs/{name}.json"))
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ):
        assert config[key] == "auto"
    assert config["bf16"] == {"enabled": "auto"}
    # Gradients accumulate and are reduced in fp32.
    assert config["data_types"]["grad_accum_dtype"] == "fp32" and config["communication_data_type"] == "fp32"


def test_auto_is_filled_from_the_run():
    run = parse_command_line(["--optimizer.gradient_clipping", "0.5"]).run
    merged = merge_ds_config(
        read_ds_config(str(ROOT / "ds_configs/zero2.json")), run, BatchPlan(32, 4, 2, 4), True, MODEL
    )
    assert merged["train_batch_size"] == 32 and merged["train_micro_batch_size_per_gpu"] == 4
    assert merged["gradient_accumulation_steps"] == 2 and merged["gradient_clipping"] == 0.5
    assert merged["bf16"]["enabled"] is True
    assert "auto" not in json.dumps(merged)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_batch_size": 7}, "train_batch_size is 7, but the run's global_batch_tokens makes it 32"),
        (
            {"gradient_clipping": 2.0},
            "gradient_clipping is 2.0, but the run's optimizer.gradient_clipping makes it 1.0",
        ),
    ],
)
def test_contradictions_are_refused(tmp_path, changes, message):
    run = parse_command_line([]).run
    with pytest.raises(UserError) as caught:
        config = read_ds_config(write(tmp_path, **changes))
        bf16_by(run, config)
        merge_ds_config(config, run, BatchPlan(32, 4, 8, 1), False, MODEL)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_precision_and_bf16():
    fp32 = parse_command_line(["--precision", "fp32"]).run
    auto = parse_command_line([]).run
    assert bf16_by(fp32, {"bf16": {"enabled": "auto"}}) == (False, "precision: fp32")
    assert bf16_by(auto, {"bf16": {"enabled": True}}) == (True, "set in the ds_config")
    assert bf16_by(auto, {"bf16": {"enabled": "auto"}}) is None
    assert bf16_by(auto, {}) == (False, "the ds_config has no bf16 block")
    with pytest.raises(UserError, match="precision: fp32 contradicts"):
        bf16_by(fp32, {"bf16": {"enabled": True}})
