"""Names that people bring from other programs lead to what is meant."""

import re

import pytest

from model.errors import UserError
from pretrain.config.command_line import _build_parser, parse_command_line
from pretrain.config.names import OTHER_NAMES, suggestion

FLAGS = [option for action in _build_parser()._actions for option in action.option_strings]


MEANT = """
lr learning_rate learning-rate optimizer.learning_rat = optimizer.learning_rate
batch_size = global_batch_tokens; max_steps num_train_epochs stesp = steps; output_dir = runs_dir
weight_decay = optimizer.weight_decay; warmup warmup_steps = schedule.warmup; eval_interval = validation.every
grad_clip gradient_cliping = optimizer.gradient_clipping; save_interval = checkpoint.every
keep_last = checkpoint.keep_last; wandb_project = logging.wandb_project; optimiser.eps = optimizer.eps
hang_minutes = interruption.hang_minutes; num_layers = architecture '{heads:
"""
PAIRS = [part.strip().split(" = ") for part in MEANT.replace("\n", ";").split(";") if part.strip()]


@pytest.mark.parametrize(
    ("given", "meant"), [(f"--{name}", f"--{to}") for names, to in PAIRS for name in names.split()]
)
def test_flags(given, meant):
    with pytest.raises(UserError) as caught:
        parse_command_line([given, "1"])
    line = str(caught.value)
    assert line.startswith(f"{given}: unknown flag; ") and "\n" not in line
    assert re.search(rf"{re.escape(meant)}(?![\w.])", line), line


def test_every_name_leads_to_flags_that_exist():
    for given, meant in OTHER_NAMES.items():
        assert f"--{given}" not in FLAGS, given
        for flag in re.findall(r"--[\w.]+", meant):
            known = flag in FLAGS or flag.startswith("--architecture") or flag == "--num_accelerators"
            assert known, (given, flag)


def test_a_name_that_several_settings_end_in():
    assert suggestion("--every", FLAGS).count(" or ") >= 2
    assert suggestion("--xyzzy", FLAGS) == ""


def test_keys_of_a_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("lr: 1.0e-3")
    with pytest.raises(UserError, match=r"^lr: unknown key in .*; here that is optimizer\.learning_rate$"):
        parse_command_line(["--config", str(recipe)])
    recipe.write_text("optimizer: {learnig_rate: 1.0e-3}")
    with pytest.raises(
        UserError, match=r"^optimizer\.learnig_rate: .* did you mean 'optimizer.learning_rate'"
    ):
        parse_command_line(["--config", str(recipe)])
