"""ds_configs: what is filled in, and what is refused."""

import json

import pytest

from model.errors import UserError
from model.presets import preset
from pretrain.config.command_line import parse_command_line
from pretrain.engine.batch import BatchPlan
from pretrain.engine.ds_config import merge_ds_config
from pretrain.engine.ds_config_check import read_ds_config
from tests.pretrain.engine.ds_configs import ROOT, SHIPPED

MODEL = preset("prism-nano")
OWNED = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
OWNED += ["gradient_clipping"]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_own_nothing_of_the_run(name):
    config = read_ds_config(str(ROOT / f"ds_configs/{name}.json"))
    assert all(config[key] == "auto" for key in OWNED)
    assert config["bf16"] == {"enabled": "auto"}
    # Gradients accumulate and are reduced in fp32.
    assert config["data_types"]["grad_accum_dtype"] == "fp32" and config["communication_data_type"] == "fp32"


def test_auto_is_filled_from_the_run():
    run = parse_command_line(["--optimizer.gradient_clipping", "0.5"]).run
    config = read_ds_config(str(ROOT / "ds_configs/zero2.json"))
    merged = merge_ds_config(config, run, BatchPlan(32, 4, 2, 4), True, MODEL)
    assert merged["train_batch_size"] == 32 and merged["train_micro_batch_size_per_gpu"] == 4
    assert merged["gradient_accumulation_steps"] == 2 and merged["gradient_clipping"] == 0.5
    assert merged["bf16"]["enabled"] is True
    assert "auto" not in json.dumps(merged)
    said = "train_batch_size is 7, but the run's global_batch_tokens makes it 32"
    with pytest.raises(UserError, match=said):
        merge_ds_config(config | {"train_batch_size": 7}, run, BatchPlan(32, 4, 2, 4), True, MODEL)
    # DeepSpeed also counts the micro-batches of context ranks. What a run saves can be given again.
    shared = parse_command_line(["--context_parallel", "2"]).run
    merged = merge_ds_config(config, shared, BatchPlan(32, 4, 2, 4), True, MODEL)
    assert merged["train_batch_size"] == 64
    assert merge_ds_config(merged, shared, BatchPlan(32, 4, 2, 4), True, MODEL) == merged
