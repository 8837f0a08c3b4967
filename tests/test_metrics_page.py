"""The fields of docs/metrics.py are those that runs write."""

import json
import re

import pytest

from docs.metrics import ALWAYS, EVALUATION, METRICS, TYPES, Field, metrics_page, metrics_schema
from pretrain.checkpoint.state import TrainingState
from pretrain.evaluation.follow import Follower, Found
from pretrain.metrics.file import EVALUATION_NAME, read_rows
from tests.helpers.distributed import run_distributed
from tests.helpers.training import nano_run, session

FIELDS = [field for fields in METRICS.values() for field in fields]
RULE = {"name": "slow", "parameters": ["q", "k"], "layers": "upper_half", "scale": 0.25}
RUNS = {
    "measured": (
        2,
        "--diagnostics_every 2 --architecture.z_loss 1e-4 --architecture.attention_gate head "
        f"--maturity.every 2 --lr_rules '{json.dumps([RULE | {'release': 'maturity', 'latest': 5}])}'",
    ),
    "spectra": (1, "--llr.apply each --llr.every 2 --llr.least 2 --llr.transition 1"),
    "grown": (1, "--growth.criterion gradient --growth.interval 2 --growth.calibration 1"),
}
ELSEWHERE = {"val_accuracy", "evaluation/TASK/METRIC"}
"""Of classifiers, and with lm-eval."""


def check(value, kind: str) -> bool:
    number = (type(value) in (int, float)) or value in ("NaN", "Infinity", "-Infinity")
    return {
        "integer": type(value) is int and value >= 0,
        "number": number,
        "list": type(value) is list,
        "string": type(value) is str,
        "object": type(value) is dict,
    }[kind]


def forms(rows: list[dict], fields: list[Field]) -> set[str]:
    """The forms of the rows' names; each has one field, and a value of its type."""
    seen = set()
    for row in rows:
        for name, value in row.items():
            (field,) = (each for each in fields if re.match(each.pattern, name))
            assert check(value, field.type), (name, value)
            seen.add(field.name)
        assert {each.name for each in fields if each.when == ALWAYS and "/" not in each.name} <= row.keys()
    return seen


@pytest.mark.slow  # trains three runs
def test_rows_of_real_runs_have_these_fields(small_folder, tmp_path):
    seen = set()
    for name, (ranks, flags) in RUNS.items():
        run = nano_run(small_folder, tmp_path, "--steps 6 --checkpoint.every 0", flags, "--name", name)
        assert run_distributed(session, ranks, run) == [([], None)] * ranks
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [*range(1, 7)]
        seen |= forms(rows, FIELDS)
    assert {field.name for field in FIELDS} - seen == ELSEWHERE


def test_rows_of_scored_checkpoints_have_these_fields(tmp_path):
    follower = Follower(tmp_path, {"tasks": "piqa"})
    follower.read()
    follower.write(Found(3, "0123"), TrainingState(step=3, tokens=96), {"piqa/acc,none": 0.5})
    rows = [*read_rows(tmp_path / EVALUATION_NAME)]
    assert forms(rows, EVALUATION) == {field.name for field in EVALUATION}


def test_page_and_schema_have_every_field():
    page, schema = metrics_page(), metrics_schema()
    for field in FIELDS:
        assert f"| `{field.name}` | {field.meaning} | {field.value} | {field.when} |" in page
        assert schema["patternProperties"][field.pattern].items() >= TYPES[field.type].items()
    assert "^diagnostics/path_energy/layer_[0-9]+$" in schema["patternProperties"]


@pytest.mark.parametrize("name", ["diagnostics/path_energy", "growth/heads/layer_x", "vall_loss"])
def test_other_names_have_no_field(name):
    assert not any(re.match(field.pattern, name) for field in FIELDS)
