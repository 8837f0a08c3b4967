"""Recipes that say when diagnostics compare a slowed run with its control."""

import dataclasses

import pytest

from model.errors import UserError
from pretrain.config.command_line import parse_command_line
from pretrain.optim.groups import run_groups


def parse(*arguments):
    return parse_command_line(list(arguments)).run


@pytest.mark.parametrize("size", ["mini", "270m", "700m"])
def test_matched_recipes(size):
    """arXiv 2605.10504: a quarter of the rate for W_Q and W_K of the upper half, 4 % of the run, then 1 %;
    2.5B tokens at 270M, 7.0B at 0.7B. Nothing but the rule differs."""
    control = parse("--config", size)
    assert control.lr_rules == () and control.diagnostics.release == 0.04
    for name in ("upper_qk", "upper_qk_maturity"):
        ruled = parse("--config", size, "--lr_rules", f"[{name}]")
        (rule,) = ruled.lr_rules
        assert (rule.parameters, rule.layers, rule.scale) == (("q", "k"), ("upper_half",), 0.25)
        end = rule.latest if rule.release == "maturity" else rule.hold
        assert (end, rule.ramp) == (0.12 if name.endswith("maturity") else 0.04, 0.01)
        assert dataclasses.replace(ruled, lr_rules=()) == control
    tokens = control.steps * control.global_batch_tokens
    if size != "mini":
        assert tokens == pytest.approx({"270m": 2.5e9, "700m": 7.0e9}[size], rel=1e-3)
    for model in ("gpt2", "llama"):
        trained = parse("--config", size, "--model", f"{model}-{size}", "--lr_rules", "[upper_qk]")
        groups = run_groups(trained, trained.build_model_config())
        assert [group.name for group in groups] == ["base/decay", "base/no_decay", "upper_qk/decay"]


def test_a_release_beyond_the_run_is_refused():
    with pytest.raises(UserError, match=r"diagnostics\.release: step 1801 is beyond the run of 1800 steps"):
        parse("--config", "micro", "--diagnostics.release", "1801").build_model_config()
