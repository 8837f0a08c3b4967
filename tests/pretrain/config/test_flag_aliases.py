"""Names that people bring from other programs lead to what is meant."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import UserError, suggest
from pretrain.config.command_line import _build_parser, parse_command_line
from pretrain.config.flag_aliases import OTHER_NAMES, suggest_flag

FLAGS = [option for action in _build_parser(described=False)._actions for option in action.option_strings]


MEANT = """
lr learning_rate learning-rate optimizer.learning_rat = optimizer.learning_rate; muon.lr = muon.learning_rate
batch_size = global_batch_tokens; max_steps num_train_epochs stesp = steps; output_dir = runs_dir
weight_decay = optimizer.weight_decay; warmup warmup_steps = schedule.warmup; eval_interval = validation.every
grad_clip gradient_cliping = optimizer.gradient_clipping; save_interval = checkpoint.every
keep_last = checkpoint.keep_last; wandb_project = logging.wandb_project; optimiser.eps = optimizer.eps
hang_minutes = interruption.hang_minutes; num_layers n_layers num_hidden_layers = heads
per_device_train_batch_size = micro_batch; max_position_embeddings block_size = architecture.context_length
swiglu = architecture.ffn; normalization = architecture.norm; exit_duration_in_mins = interruption.minutes
init_method_std = architecture.init_std; untie_embeddings_and_output_weights = architecture.tie_embeddings
position_embedding_type = architecture.positions; group_query_attention = architecture.kv_heads
lr_warmup_fraction = schedule.warmup; recompute_granularity = activation_checkpointing
split = validation.data
reset_position_ids = document_mask; use_flash_attn = attention; wandb_log = logging.wandb
always_save_checkpoint = checkpoint.every
report_to = logging.wandb; n_head = heads; n_embd architecture.hidden_size = architecture.d_model
"""
PAIRS = [part.strip().split(" = ") for part in MEANT.replace("\n", ";").split(";") if part.strip()]


@pytest.mark.parametrize(
    ("name", "meant"), [(f"--{name}", f"--{to}") for names, to in PAIRS for name in names.split()]
)
def test_flags(name, meant):
    with pytest.raises(UserError) as caught:
        parse_command_line([name, "1"])
    line = str(caught.value)
    assert line.startswith(f"{name}: unknown flag; ") and "\n" not in line
    assert re.search(rf"{re.escape(meant)}(?![\w.])", line), line


def test_every_name_leads_to_flags_that_exist():
    for name, meant in OTHER_NAMES.items():
        assert f"--{name}" not in FLAGS, name
        for flag in re.findall(r"--[\w.]+", meant):
            assert flag in [*FLAGS, "--from_hf"], (name, flag)
        assert re.findall(r"--[\w.]+", meant) or name == "version" or "there is no" in meant


def test_a_name_that_several_settings_end_in():
    assert suggest_flag("--every", FLAGS).count(" or ") >= 2
    assert suggest_flag("--xyzzy", FLAGS) == ""


def test_keys_of_a_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("lr: 1.0e-3")
    with pytest.raises(UserError, match=r"^lr: unknown key in .*; use optimizer\.learning_rate$"):
        parse_command_line(["--config", str(recipe)])
    recipe.write_text("optimizer: {learnig_rate: 1.0e-3}")
    with pytest.raises(
        UserError, match=r"^optimizer\.learnig_rate: .* did you mean 'optimizer.learning_rate'"
    ):
        parse_command_line(["--config", str(recipe)])
    for name in ("ds_config", "deepspeed"):
        recipe.write_text(f"{name}: zero2")
        with pytest.raises(UserError, match=r"; it is a flag of the command, --ds_config$"):
            parse_command_line(["--config", str(recipe)])


FAR = {"report_to": ["plot_lr"], "n_layers": ["ffn_bias"], "version": ["precision"], "dropout": ["data_root"]}


@pytest.mark.parametrize("name", FAR)
def test_what_is_far_is_not_said(name):
    assert suggest(name, FAR[name]) == ""


@given(st.text("abcdefgh_", min_size=8, max_size=20), st.data())
def test_near_names_are_said_and_equal_ones_are_not(name, data):
    place = data.draw(st.integers(0, len(name) - 1))
    written = name[:place] + "x" + name[place + 1 :]
    assert suggest(written, [name]) == f"; did you mean {name!r}?" or not name.strip("_")
    assert suggest(name, [name]) == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--architecture", "{n_layers: 4}"],
            r"^architecture\.n_layers: unknown key in the flags; use heads, .*such as 6x12",
        ),
        (
            ["--architecture", "{d_modle: 4}"],
            r"^architecture\.d_modle: unknown key .*; did you mean 'architecture\.d_model'\?$",
        ),
        (
            ["--architecture.vocab_size", "5"],
            r"^architecture\.vocab_size: it comes from the data; ",
        ),
        (["--dropout", "0.1"], "^--dropout: unknown flag; there is no dropout"),
        (["--fp8-format", "hybrid"], "^--fp8-format: unknown flag; there is no FP8 training"),
        (["--version"], "`pip show head-schedules` prints it$"),
    ],
)
def test_other_programs_names(arguments, line):
    with pytest.raises(UserError, match=line):
        parse_command_line(arguments)
