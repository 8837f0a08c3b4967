"""head-schedules diagnose: the figures of finished runs are those that the runs measured, and are
drawn."""

import dataclasses
import json

import pytest

from pretrain.data.tokenizer import SentencePieceTokenizer
from pretrain.diagnostics.command import list_runs, main
from pretrain.diagnostics.comparison import (
    bands,
    by_group,
    describe_depths,
    difference,
    find_baselines,
    take_last,
    upper_half,
)
from pretrain.diagnostics.figures import differences
from pretrain.diagnostics.measure import RunMeasures, measure_run, split_run_name
from pretrain.metrics.file import read_metrics
from tests.helpers.distributed import run_distributed
from tests.helpers.training import nano_run, session

RULE = {"name": "slow", "parameters": ["q", "k"], "layers": "upper_half", "scale": 0.25, "hold": 2}


@pytest.fixture(scope="module")
def runs(small_folder, tmp_path_factory):
    """Two seeds of a control and of a run with a rule, 6 steps each; the rule's under ZeRO 3 and t = 2."""
    folder = tmp_path_factory.mktemp("runs")
    made = []
    shared = """--steps 6 --diagnostics_every 3 --diagnostics.sequences 6 --diagnostics.release 2
        --checkpoint.every 3"""
    for name, rules, ranks, stage in (("control", [], 1, 2), ("rule", [RULE], 2, 3)):
        for seed in (1, 2):
            own = f"--name {name}-s{seed} --seed {seed} --tensor_parallel {ranks} --lr_rules"
            run = nano_run(small_folder, folder, *shared.split(), *own.split(), json.dumps(rules))
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
def test_measured_afterwards_is_what_was_measured_in_the_loop(runs, capsys, which):
    found = measure_run(runs[which], sequences=6, steps="all")
    assert "step 6 measured on 6 windows" in capsys.readouterr().out
    in_loop = looks(runs[which])
    for row in (row for row in found.rows if row["step"] in in_loop):
        expected = in_loop[row["step"]]
        measured = {k: v for k, v in row.items() if k.startswith("diagnostics/")}
        assert measured.keys() == expected.keys()
        for key, value in expected.items():  # a number, or a list for each layer
            own = measured[key]
            parts = zip(own, value, strict=True) if type(value) is list else [(own, value)]
            assert all(part == pytest.approx(other, rel=1e-4, abs=1e-7) for part, other in parts), key
    assert found.last["step"] == 6 and (found.group, found.seed) == (("control", "rule")[which // 2], "1")


@pytest.mark.slow
def test_the_command_draws_and_prints(runs, tmp_path, capsys):
    link = tmp_path / "best"  # a run has the name of its folder
    link.symlink_to(runs[0])
    code = main([*map(str, [link, *runs[1:]]), "--sequences", "4", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    for name in ("curves.png", "layers.png", "difference.png", "difference_training.png"):
        assert (tmp_path / "out" / name).stat().st_size > 20_000, name
    assert "control (seeds: 2, step 6)" in printed.out and "rule (seeds: 2, step 6)" in printed.out
    kept = json.loads((tmp_path / "out" / "diagnostics.json").read_text())
    assert list(kept) == ["control-s1", "control-s2", "rule-s1", "rule-s2"]
    assert len(kept["rule-s1"]["diagnostics/attention_distance/heads"]) == 4


@pytest.mark.slow
def test_a_folder_of_a_study_stands_for_its_runs(runs, tmp_path, capsys):
    """Its variants are the groups, and its baseline is theirs; a run without a checkpoint is named."""
    study = runs[0].parent
    (study / "study.yaml").write_text("seeds: 2\nbaseline: control\nvariants: {control: {}, rule: {}}\n")
    names = ["rule-s1", "control-s1", "rule-s2", "control-s2", "rule-s3"]
    (study / "tasks.txt").write_text("\n".join(names))
    try:
        code = main([str(study), "--sequences", "2", "--out", str(tmp_path)])
    finally:
        (study / "study.yaml").unlink()
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "warning: 1 of the study's 5 runs have no checkpoint" in printed.err
    assert "rule (seeds: 2, step 6)" in printed.out and "control (seeds: 2, step 6)" in printed.out
    assert list(json.loads((tmp_path / "diagnostics.json").read_text())) == names[:4]
    assert "the study's baseline" not in printed.err
    # A study with factors has a baseline at each level, and none of that name.
    (study / "study.yaml").write_text("baseline: [plain, large.flat]\n")
    try:
        assert main([str(study), "--sequences", "2", "--out", str(tmp_path)]) == 0
    finally:
        (study / "study.yaml").unlink()
    said = "no run measured is of the study's baseline plain, large.flat, and differences are from rule"
    assert said in capsys.readouterr().err


def test_a_folder_of_a_study_names_runs_and_baseline_in_its_order(tmp_path, capsys):
    (tmp_path / "study.yaml").write_text("baseline: b\n")
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "has a checkpoint yet; train it: head-schedules study run" in error and error.count("\n") == 1
    (tmp_path / "tasks.txt").write_text("b-s2\na-s1\nb-s1\n")
    for name in ("a-s1", "b-s1", "b-s2"):
        (tmp_path / name / "checkpoints" / "step_000006").mkdir(parents=True)
    assert list_runs(tmp_path) == ([tmp_path / name for name in ("b-s2", "a-s1", "b-s1")], ["b"])


@pytest.mark.slow
def test_one_run_and_other_data(runs, small_folder, tmp_path, capsys):
    code = main([str(runs[0]), "--data", str(small_folder), "--sequences", "2", "--out", str(tmp_path)])
    assert code == 0, capsys.readouterr().err
    assert (tmp_path / "layers.png").is_file() and not (tmp_path / "difference.png").exists()
    rows = {row["step"]: row for row in measure_run(runs[0], str(small_folder), 2).rows}
    distance, moved = "diagnostics/attention_distance/layer_0", "diagnostics/lambda_q_initial/layer_0"
    # A curve is of one text; what does not depend on the text is that of the training.
    assert distance in rows[6] and distance not in rows[3] and moved in rows[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: RUN"),
        (["{0}", "--sequences", "0"], "sequences: 0 is not valid"),
        (["{0}", "--steps", "first"], "steps: 'first' is not valid"),
        (["{0}", "--steps", "4"], "step: no checkpoint of step 4"),
        (["{0}", "--baseline", "contrl"], "groups are control"),
        (["{0}", "--data", "nowhere"], "data: 'nowhere' is not a folder"),
        (["nowhere"], "run: 'nowhere' is not a run's folder"),
        (["{0}", "{0}"], "was given twice"),
        (["{0}", "--out", "/dev/null/x"], "out: cannot write"),
    ],
)
def test_bad_input_is_one_clear_line(runs, capsys, arguments, message):
    assert main([argument.format(*runs) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def figures(name, values, layers=2):
    row = {"step": 1} | {f"diagnostics/attention_distance/layer_{i}": value for i, value in enumerate(values)}
    return RunMeasures(name, *split_run_name(name), [row], row, layers)


def test_differences_are_paired_by_seed():
    control = [figures("a-s1", [1.0, 2.0]), figures("a-s2", [2.0, 4.0]), figures("a-s3", [9.0, 9.0])]
    other = [figures("b-s2", [2.5, 4.0]), figures("b-s1", [1.25, 1.0])]
    ours, theirs = (take_last(runs, "attention_distance") for runs in (other, control))
    found = bands(difference(ours, theirs))
    # Layer 0: 0.5 and 0.25. Layer 1: 0 and -1. Sample deviations: 0.25 / sqrt 2 and 1 / sqrt 2.
    assert found["mean"].to_dict() == {0: 0.375, 1: -0.5}
    assert found["sd"].to_dict() == pytest.approx({0: 0.25 / 2**0.5, 1: 1 / 2**0.5})
    unseeded = difference(take_last([figures("c", [4.0, 5.0])], "attention_distance"), theirs)
    assert unseeded.values.tolist() == [[3.0, 3.0]], "in their order"
    assert list(by_group([*control, *other])) == ["a", "b"]
    assert not describe_depths({"a": control, "b": other})
    deeper = describe_depths({"a": control, "c": [figures("c-s1", [1.0], layers=1)]})
    assert deeper == "layers differ (2 in a, 1 in c): no differences by layer"


def test_every_group_has_the_baseline_of_its_own_factor():
    groups = ["adamw-uniform", "adamw-tapered", "muon-uniform", "muon-tapered", "sgd-tapered"]
    found = find_baselines(groups, ["uniform"])
    assert found == dict.fromkeys(groups[:2], groups[0]) | dict.fromkeys(groups[2:4], groups[2])
    assert find_baselines(groups, ["muon-uniform"]) == dict.fromkeys(groups, "muon-uniform")
    rates = ["0.001", "0.002", "prism-0.002"]
    assert find_baselines(rates[:2], ["0.002"]) == dict.fromkeys(rates[:2], "0.002")
    assert find_baselines(rates[2:], ["prism.0.002"]) == {"prism-0.002": "prism-0.002"}
    assert find_baselines(groups, ["prism"]) == {} == find_baselines(groups, [])
    assert find_baselines(groups[:4], ["muon-tapered", "adamw-uniform"]) == {
        **dict.fromkeys(groups[:2], "adamw-uniform"),
        **dict.fromkeys(groups[2:4], "muon-tapered"),
    }
    tables = {
        "D": {
            name: take_last([figures(name, [float(i)])], "attention_distance")
            for i, name in enumerate(groups)
        }
    }
    drawn = differences(tables, found)["Δ D"]
    assert {name: table.values.tolist() for name, table in drawn.items()} == {
        "adamw-tapered − adamw-uniform": [[1.0]],
        "muon-tapered − muon-uniform": [[1.0]],
    }


def test_bands_are_where_all_seeds_have_a_value():
    found = bands(take_last([figures("a-s1", [1.0, 2.0, 4.0]), figures("a-s2", [3.0])], "attention_distance"))
    assert found["mean"].to_dict() == {0: 2.0} and found["sd"].to_dict() == pytest.approx({0: 2**0.5})
    assert bands(take_last([figures("a", [3.0])], "attention_distance"))["sd"].isna().all()
    upper = upper_half([figures("a", [9.0, 9.0, 1.0, 2.0, 6.0], layers=5)], "attention_distance")
    assert upper.values.tolist() == [[4.0]], "layers 3 and 4 of 0 to 4"


def test_names():
    assert split_run_name("tiny-prism-tiny-s12") == ("tiny-prism-tiny", "12")
    assert split_run_name("my_run") == ("my_run", "") and split_run_name("s3") == ("s3", "")


@pytest.mark.slow
def test_the_same_text_with_another_vocabulary_is_not_the_runs_data(runs, small_folder, tmp_path):
    """The folders of the built-in corpus differ in their tokenizer only; ids of a larger one would not
    fit."""
    from pretrain.run.saved import SavedRun

    source = SavedRun.open(runs[0])
    assert len(source.corpora()) == 1
    another = SentencePieceTokenizer.train(["another text with other pieces " * 20], 280)
    assert dataclasses.replace(source, tokenizer=another).corpora() == []
