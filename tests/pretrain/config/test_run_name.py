"""The default name of a run's folder: two arms of a comparison never share one."""

from __future__ import annotations

import itertools

import pytest

from model.errors import UserError
from pretrain.config.command_line import parse_command_line
from pretrain.config.run_config import RunConfig, split_run_name

SLOW = "{name: slow, parameters: [v], scale: 0.5}"


def name(*flags: str) -> str:
    return parse_command_line(["--config", "270m", *flags]).run.run_name


def test_arms_of_a_comparison_have_folders_of_their_own() -> None:
    rules = ["[]", "[upper_qk]", f"[{SLOW}]", f"[upper_qk, {SLOW}]"]
    arms = [["--lr_rules", given] for given in rules]
    names = [name(*arm, "--seed", seed) for arm, seed in itertools.product(arms, ("1", "2"))]
    assert names[:4] == [f"270m-gpt2-270m{arm}-s{seed}" for arm in ("", "-upper_qk") for seed in (1, 2)]
    assert len({*names}) == len(names)
    assert len({split_run_name(each)[0] for each in names}) == len(arms), "seeds of an arm are one group"


def test_growing_runs_are_no_fixed_ones() -> None:
    assert name("--growth.criterion", "incrt") == "270m-gpt2-270m-growth_incrt-s1"
    assert name("--growth.criterion", "random") != name("--growth.criterion", "incrt")


def test_what_is_no_seed_stays_in_the_name() -> None:
    assert name("--model", "hf/Mistral-7B-v0.1") == "270m-Mistral-7B-v0.1-s1"
    assert name("--model", "models/wide.json") == "270m-wide-s1"
    groups = {each: split_run_name(each)[0] for each in ("runs2", "heads16", "a-s2", "a_s2", "s3")}
    assert groups == {"runs2": "runs2", "heads16": "heads16", "a-s2": "a", "a_s2": "a", "s3": "s3"}


def test_a_name_that_is_given_stands() -> None:
    assert name("--name", "mine", "--lr_rules", "[upper_qk]") == "mine"


@pytest.mark.parametrize("bad", ["a/b", ".hidden", "", "x" * 300, "a\nb"])
def test_a_name_that_is_no_folder_is_refused(bad: str) -> None:
    with pytest.raises(UserError, match="name: "):
        RunConfig(name=bad)
