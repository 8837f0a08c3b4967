"""The one command: hands arguments on, says what there is, and completes in a real bash."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pretrain import cli
from tests.helpers.launch import ROOT
from tests.helpers.refusals import refusal


def test_help_fits_a_screen(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 24 and all(len(line) <= 80 for line in lines)
    named = {line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "}
    assert named >= {"train", "completion", *cli.COMMANDS}
    assert cli.main([]) == 0
    assert capsys.readouterr().out == text


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("head-schedules 0.")


def test_unknown_commands_are_one_line(capsys):
    line = refusal(capsys, cli.main, "studdy", "run")
    assert line.startswith("error: command: 'studdy' is not valid; commands are train, convert")
    assert line.endswith("did you mean 'study'?")
    assert refusal(capsys, cli.main, "completion", "fish")
    assert refusal(capsys, cli.main, "--versio")


def test_arguments_are_handed_on(capsys):
    assert cli.main(["presets", "prism-nano"]) == 0
    assert "prism-nano" in capsys.readouterr().out
    assert "model" in refusal(capsys, cli.main, "plan", "--model", "prism-unknown")


def test_train_takes_the_rest(monkeypatch):
    import pretrain.main

    seen = []
    monkeypatch.setattr(pretrain.main, "start", lambda: seen.append(list(sys.argv)) or sys.exit(7))
    monkeypatch.setattr(sys, "argv", ["/bin/head-schedules", "train", "--steps", "3"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 7
    assert seen == [["/bin/head-schedules", "--steps", "3"]]


def test_a_process_of_its_own_hands_on_its_arguments():
    code = "import sys; from pretrain.cli import main; sys.argv[0] = 'head-schedules'; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "presets", "nope"],
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: model: ") and done.stderr.count("\n") == 1


def completed(script, *words):
    """What bash offers for the last word."""
    given = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
    lines = [script, given, "_head_schedules", 'echo "${COMPREPLY[@]}"']
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, encoding="utf-8", check=True)
    return done.stdout.split()


def test_completion_in_a_real_bash():
    script = cli.completion("bash")
    assert sorted(completed(script, "head-schedules", "pl")) == ["plan", "plot"]
    assert completed(script, "head-schedules", "study", "re") == ["report", "record"]
    assert "--parallel" in completed(script, "head-schedules", "study", "run", "--p")
    for command in ("train", "plan"):
        assert completed(script, "head-schedules", command, "--muon.l") == ["--muon.learning_rate"]
    assert "modern-124m" in completed(script, "head-schedules", "train", "--config", "modern")
    assert completed(script, "head-schedules", "train", "--optimizer.kind", "mu") == ["muon"]
    assert completed(script, "head-schedules", "convert", "--format", "q") == ["qwen3"]
    assert completed(script, "head-schedules", "prepare", "--format", "jsonl") == ["jsonl"]
    assert completed(script, "head-schedules", "study", "run", "llr") == ["llr-small"]
    assert completed(script, "head-schedules", "presets", "prism-na") == ["prism-nano"]
    assert completed(script, "head-schedules", "prepare", "--text.") == []
    assert completed(script, "head-schedules", "completion", "z") == ["zsh"]
    assert completed(script, "head-schedules", "convert", "runs/a") == []  # bash offers files
    assert "\nautoload -U +X bashcompinit && bashcompinit\n" in cli.completion("zsh")
