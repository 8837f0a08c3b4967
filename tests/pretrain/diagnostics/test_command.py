"""python -m pretrain.diagnostics: the figures of finished runs are those that the runs measured, and are
drawn."""

import dataclasses
import json
import math

import pytest

from model.errors import UserError
from pretrain.data.tokenizer import SentencePieceTokenizer
from pretrain.diagnostics.command import main
from pretrain.diagnostics.comparison import Band, by_group, differences, paired
from pretrain.diagnostics.measure import RunFigures, group_and_seed, measure_run
from pretrain.metrics.file import read_metrics
from tests.helpers.distributed import run_distributed
from tests.helpers.training import nano_run, session

RULE = {"name": "slow", "parameters": ["q", "k"], "layers": "upper_half", "scale": 0.25, "hold": 2}


@pytest.fixture(scope="module")
def runs(small_folder, tmp_path_factory):
    """Two seeds of a control and of a run with a rule, 6 steps each; the rule's under ZeRO 3 and t = 2."""
    folder = tmp_path_factory.mktemp("runs")
    made = []
    for name, rules, ranks, stage in (("control", [], 1, 2), ("rule", [RULE], 2, 3)):
        for seed in (1, 2):
            flags = ["--steps", "6", "--diagnostics_every", "3", "--diagnostics.sequences", "6"]
            flags += [
                "--checkpoint.every",
                "3",
                "--diagnostics.release",
                "2",
                "--lr_rules",
                json.dumps(rules),
            ]
            flags += ["--name", f"{name}-s{seed}", "--seed", str(seed), "--tensor_parallel", str(ranks)]
            run = nano_run(small_folder, folder, *flags)
            run_distributed(session, ranks, run, stage, timeout=120)
            made.append(run.folder)
    return made


def looks(folder):
    return {
        row["step"]: {k: v for k, v in row.items() if k.startswith("diagnostics/")}
        for row in read_metrics(folder)
        if "diagnostics/attention_distance/layer_0" in row
    }


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 2])
def test_measured_afterwards_is_what_was_measured_in_the_loop(runs, which):
    lines = []
    found = measure_run(runs[which], sequences=6, steps="all", report=lines.append)
    assert len(lines) == 2 and "step 6 measured on 6 windows" in lines[1]
    in_loop = looks(runs[which])
    for row in found.rows:
        if row["step"] not in in_loop:
            continue
        expected = in_loop[row["step"]]
        measured = {k: v for k, v in row.items() if k.startswith("diagnostics/")}
        assert measured.keys() == expected.keys()
        for key, value in expected.items():
            parts = (
                zip(measured[key], value, strict=True)
                if isinstance(value, list)
                else [([measured[key]], [value])]
            )
            for part, other in parts:
                assert part == pytest.approx(other, rel=1e-4, abs=1e-7), key
    assert found.last["step"] == 6 and (found.group, found.seed) == (("control", "rule")[which // 2], "1")


@pytest.mark.slow
def test_the_command_draws_and_prints(runs, tmp_path, capsys):
    code = main([*map(str, runs), "--sequences", "4", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    for name in ("curves.png", "layers.png", "difference.png", "difference_training.png"):
        assert (tmp_path / "out" / name).stat().st_size > 20_000, name
    assert "control (2 seeds, step 6)" in printed.out and "rule (2 seeds, step 6)" in printed.out
    kept = json.loads((tmp_path / "out" / "diagnostics.json").read_text())
    assert list(kept) == ["control-s1", "control-s2", "rule-s1", "rule-s2"]
    assert len(kept["rule-s1"]["diagnostics/attention_distance/heads"]) == 4


@pytest.mark.slow
def test_one_run_and_other_data(runs, small_folder, tmp_path, capsys):
    code = main([str(runs[0]), "--data", str(small_folder), "--sequences", "2", "--out", str(tmp_path)])
    assert code == 0, capsys.readouterr().err
    assert (tmp_path / "layers.png").is_file() and not (tmp_path / "difference.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: RUN"),
        (["{0}", "--sequences", "0"], "sequences: 0 is not valid"),
        (["{0}", "--steps", "first"], "steps: 'first' is not valid"),
        (["{0}", "--steps", "4"], "step: no checkpoint of step 4"),
        (["{0}", "--baseline", "contrl"], "did you mean 'control'?"),
        (["{0}", "--data", "nowhere"], "data: 'nowhere' is not a folder"),
        (["nowhere"], "run: 'nowhere' does not exist"),
        (["{0}", "{0}"], "runs: control-s1 was given twice"),
        (["{0}", "--out", "/dev/null/x"], "out: cannot write"),
    ],
)
def test_bad_input_is_one_clear_line(runs, capsys, arguments, message):
    assert main([argument.format(*runs) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def figures(name, values, layers=2):
    row = {"step": 1} | {f"diagnostics/attention_distance/layer_{i}": value for i, value in enumerate(values)}
    return RunFigures(name, *group_and_seed(name), [row], row, layers)


def test_differences_are_paired_by_seed():
    control = [figures("a-s1", [1.0, 2.0]), figures("a-s2", [2.0, 4.0])]
    other = [figures("b-s2", [2.5, 4.0]), figures("b-s1", [1.25, 1.0])]
    assert [(x.seed, y.seed) for x, y in paired(other, control)] == [("2", "2"), ("1", "1")]
    bands = differences(other, control, "attention_distance")
    # Layer 0: 0.5 and 0.25. Layer 1: 0 and -1. Sample deviations: 0.25 / sqrt 2 and 1 / sqrt 2.
    assert bands[0] == Band(0.375, pytest.approx(0.25 / 2**0.5), 2)
    assert bands[1] == Band(-0.5, pytest.approx(1 / 2**0.5), 2)
    assert math.isnan(Band.of([3.0]).sd)
    assert list(by_group([*control, *other])) == ["a", "b"]
    with pytest.raises(UserError, match="needs models of one depth"):
        differences([figures("c-s1", [1.0], layers=1)], control, "attention_distance")


def test_names():
    assert group_and_seed("tiny-prism-tiny-s12") == ("tiny-prism-tiny", "12")
    assert group_and_seed("my_run") == ("my_run", "") and group_and_seed("s3") == ("s3", "")


@pytest.mark.slow
def test_the_same_text_with_another_vocabulary_is_not_the_runs_data(runs, small_folder, tmp_path):
    """The folders of the built-in corpus differ in their tokenizer only; ids of a larger one would not
    fit."""
    from pretrain.run.saved import SavedRun

    source = SavedRun.open(runs[0])
    assert len(source.corpora()) == 1
    another = SentencePieceTokenizer.train(["another text with other pieces " * 20], 280)
    assert dataclasses.replace(source, tokenizer=another).corpora() == []
