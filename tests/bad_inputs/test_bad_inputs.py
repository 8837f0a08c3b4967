"""Bad inputs of every kind through every command: each is refused in one line, or accepted for a reason."""

import re
import subprocess
import sys

import pytest

from pretrain.cli import COMMANDS, help_texts
from tests.bad_inputs.cases import MOST_OF_A_KIND, all_cases, chosen, commands


def test_cases_are_many_and_spread_evenly():
    counts: dict[tuple[str, str, str], int] = {}
    for case in all_cases(["--steps", "--seed"]):
        counts[case.key] = counts.get(case.key, 0) + 1
    assert max(counts.values()) <= MOST_OF_A_KIND
    assert sum(counts.values()) > 2000
    found = chosen(["--steps"], 200, seed=1)
    assert len({case.key[0] for case in found}) > 20 and len(found) == 200
    assert [case.key for case in chosen(["--steps"], 200, seed=1)] == [case.key for case in found]


def test_every_flag_with_a_value_is_tried():
    tried = {(command.module, flag) for command in commands([]) for flag in command.flags}
    listed = {
        (module, flag)
        for name, (module, _) in COMMANDS.items()
        for text in help_texts(name).values()
        for flag in re.findall(r"^ +(--\w+) [A-Z]", text, re.MULTILINE)
    }
    assert len(listed) > 60
    assert listed - tried == set()


@pytest.mark.slow
def test_no_bad_input_ends_in_a_traceback():
    command = [sys.executable, "-m", "tests.bad_inputs", "--count", "150", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
