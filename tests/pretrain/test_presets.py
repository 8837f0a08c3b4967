"""``head-schedules presets``: what it lists, plans, draws and refuses."""

import json
import subprocess
import sys

import pytest

from model.presets import preset, preset_names
from pretrain.plan.tensor_parallel import plan_tensor_parallel
from pretrain.presets import main, plan_table


def run(*arguments):
    command = [sys.executable, "-m", "pretrain.presets", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_command_lists_presets_and_ends_with_2_on_a_bad_name():
    result = run()
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 1 + len(preset_names())
    row = next(line for line in lines if line.startswith("prism-124m ")).split()
    expected = ["prism-124m", "12", "768", "3x2,6x2,8x2,12x6", "▂▂▄▄▆▆██████", "256x2,128x2,96x2,64x6"]
    assert row == [*expected, "2048", "768", "123,551,232", "123,587,328", "854,438,400"]
    row = next(line for line in lines if line.startswith("waist-200m ")).split()
    assert " ".join(row[5:14]) == "12 to 72 768 to 4608 192 to 1152"
    row = next(line for line in lines if line.startswith("openelm-270m ")).split()
    assert " ".join(row[5:10]) == "64 768 to 5120 1280"
    result = run("prims-124m")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: model: no preset 'prims-124m'; did you mean 'prism-124m'?\n"


def test_command_plots_and_prints_json(tmp_path, capsys):
    image = tmp_path / "heads.png"
    assert main(["prism-124m", "--plot", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["prism-nano", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == preset("prism-nano").to_json()


def test_shapes_that_need_more_layers_do_not_hide_the_others(capsys):
    assert main(["allocations", "--layers", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("(")[0] for line in lines[1:6]] == ["uniform", "tapered", "late", "openelm", "prism"]
    assert lines[6].startswith("allocation: 'middle(2048)' is not valid; share: needs 2 layers or more")
    assert main(["allocations", "waist(2048, turn=3)"]) == 2
    assert "turn: 3 is not valid for 12 layers" in capsys.readouterr().err


def test_heads_of_an_allocation_have_the_models_layers(capsys):
    assert (
        main(["exchange", "--model", "uniform-micro", "--tensor_parallel", "2", "--heads", "uniform(8)"]) == 0
    )
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4 + 3


def test_command_refuses_files_it_cannot_write_and_options_without_a_name(tmp_path, capsys):
    assert main(["--json"]) == 2
    assert main(["prism-nano", "--plot", "/dev/null/folder.png"]) == 2
    assert main(["prism-nano", "--plot", str(tmp_path / "heads.nonsense")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and all(line.startswith("error: ") for line in errors)


def test_it_is_printed(capsys):
    arguments = ["exchange", "--model", "prism-124m", "--tensor_parallel", "4"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert plan_table(plan_tensor_parallel(preset("prism-124m"), 4, 8)) in printed
    assert "60.00, 6.7 % on top" in printed
    assert main([*arguments, "--micro_batch", "3"]) == 0
    assert "per 3 sequences" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("prism-124 --tensor_parallel 4", "did you mean 'prism-124m'"),
        ("prism-124m --tensor_parallel 5", "nearest valid: 4 or 8"),
        ("prism-124m --tensor_parallel 4 --micro_batch 0", "micro_batch: 0"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert main(["exchange", "--model", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_model_of_ones_own_is_read_from_a_file(tmp_path, capsys):
    file = tmp_path / "model.json"
    file.write_text(json.dumps(preset("prism-nano").replace(heads="1,2,4,4").to_json()))
    assert main(["exchange", "--model", str(file), "--tensor_parallel", "2"]) == 0
    own = capsys.readouterr().out
    assert main(["exchange", "--model", "prism-nano", "--heads", "1,2,4,4", "--tensor_parallel", "2"]) == 0
    assert capsys.readouterr().out == own
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"model": json.loads(file.read_text())}))
    assert main(["exchange", "--model", str(tmp_path / "run"), "--tensor_parallel", "2"]) == 0
    assert capsys.readouterr().out == own
    file.write_text("[[")
    assert main(["exchange", "--model", str(file), "--tensor_parallel", "2"]) == 2
    assert "is not valid JSON" in capsys.readouterr().err
