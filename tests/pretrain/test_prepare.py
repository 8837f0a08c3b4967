"""The command ``python -m pretrain.prepare``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pretrain import prepare as command
from pretrain.data.sequences import Corpus

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(30):
        lines = [f"{number} bottles on shelf {number * line}\n" for line in range(20)]
        (folder / f"{number:02}.txt").write_text("".join(lines))
    (folder / "empty.txt").write_text("")
    return folder


def run(*arguments: object) -> int:
    return command.main([str(argument) for argument in arguments])


def test_prepare_then_inspect(texts, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("--text", texts, "--train_tokenizer", 300, "--validation_fraction", 0.2, "--out", out) == 0
    printed = capsys.readouterr().out
    for part in (
        "training a tokenizer of 300 entries",
        "tokenizing: 30 documents",
        "1 empty",
        f"ready       {out}",
    ):
        assert part in printed
    corpus = Corpus.open(out)
    assert run("inspect", out) == 0
    printed = capsys.readouterr().out
    assert f"{corpus.meta['training']['documents']} documents" in printed
    assert "bytes per token" in printed and "bottles on shelf 0\n" in printed


def test_tokenizer_of_another_corpus_can_be_used(texts, tmp_path, capsys):
    assert run("--text", texts, "--train_tokenizer", 300, "--out", tmp_path / "one") == 0
    arguments = ["--text", texts, "--tokenizer", tmp_path / "one" / "tokenizer", "--out", tmp_path / "two"]
    assert run(*arguments) == 0
    one, two = Corpus.open(tmp_path / "one"), Corpus.open(tmp_path / "two")
    assert one.meta["tokenizer"] == two.meta["tokenizer"]
    assert run(*arguments) == 0, "the same command again finds its work done"


def test_builtin_without_out_goes_to_the_shared_folder(monkeypatch, capsys):
    called = []
    monkeypatch.setattr(
        command, "prepare_builtin", lambda *arguments: called.append(arguments) or Path("nowhere")
    )
    assert run("--dataset", "builtin") == 2
    assert called == [("data", 4096, command._print_progress)]
    assert (
        capsys.readouterr().err
        == "error: data: 'nowhere' is no folder; valid: one written by python -m pretrain.prepare\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --text PATH… or --dataset builtin"),
        (["--text", "x", "--dataset", "builtin"], "give either --text PATH… or --dataset builtin"),
        (["--text", "missing", "--out", "o"], "text: 'missing' is no file or folder"),
        (["--dataset", "bultin", "--out", "o"], "dataset: 'bultin' is unknown; valid: builtin"),
        (["--dataset", "builtin", "--tokenizer", "gpt2"], "out: missing"),
        (["--dataset", "builtin", "--tokenizer", "t", "--train_tokenizer", "300"], "and not both"),
        (
            ["--dataset", "builtin", "--train_tokenizer", "many"],
            "argument --train_tokenizer: invalid int value: 'many'",
        ),
        (
            ["--dataset", "builtin", "--train_tokenizer", "12"],
            "train_tokenizer: 12 is out of range; valid: 260 to",
        ),
        (["--dataset", "builtin", "--validation_fraction", "2", "--out", "o"], "validation_fraction: 2.0"),
        (["--dataset", "builtin", "--tokeniser", "gpt2"], "did you mean '--tokenizer'?"),
        (["inspect"], "the following arguments are required: folder"),
        (["inspect", "missing"], "data: 'missing' is no folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not (tmp_path / "o").exists()


def test_disk_errors_are_one_line(texts, tmp_path, capsys, monkeypatch):
    def full(*_: object, **__: object) -> Path:
        raise OSError(28, "No space left on device", str(tmp_path / "out"))

    monkeypatch.setattr(command, "prepare", full)
    assert run("--text", texts, "--out", tmp_path / "out") == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'out'}: No space left on device\n"


def test_it_runs_as_a_module(tmp_path):
    line = [sys.executable, "-m", "pretrain.prepare", "inspect", str(tmp_path)]
    result = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == (
        f"error: data: {str(tmp_path)!r} has no meta.json; "
        "valid: a folder written by python -m pretrain.prepare\n"
    )
