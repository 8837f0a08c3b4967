"""The command ``head-schedules prepare``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.data.corpus import Corpus
from pretrain.prepare import command as command

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(30):
        lines = [f"{number} bottles on shelf {number * line}\n" for line in range(20)]
        (folder / f"{number:02}.txt").write_text("".join(lines))
    (folder / "empty.txt").write_text("")
    return folder


def run(arguments: str) -> int:
    return command.main(arguments.split())


def test_prepare_then_inspect(texts, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(f"--text {texts} --train_tokenizer 300 --validation_fraction 0.2 --out {out}") == 0
    printed = capsys.readouterr().out
    for part in (
        "training a tokenizer of 300 entries",
        "tokenizing: 30 documents",
        "1 empty",
        f"ready       {out}",
    ):
        assert part in printed
    corpus = Corpus.open(out)
    assert run(f"inspect {out}") == 0
    printed = capsys.readouterr().out
    assert f"{corpus.meta.training.documents} documents" in printed
    assert "bytes per token" in printed and "bottles on shelf 0\n" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--out o", "give either --text PATH… or --dataset builtin"),
        ("--text x --dataset builtin --out o", "give either --text PATH… or --dataset builtin"),
        ("--text missing --out o", "text: 'missing' is not a file or folder"),
        ("--dataset builtin --tokenizer gpt2", "required: --out"),
        ("--dataset builtin --tokenizer t --train_tokenizer 300 --out o", "and not both"),
        ("--dataset builtin --train_tokenizer many --out o", "train_tokenizer: 'many' is not valid; give a"),
        ("--dataset builtin --train_tokenizer 12 --out o", "train_tokenizer: 12 is not valid; give 260 to"),
        ("--dataset builtin --validation_fraction 2 --out o", "validation_fraction: 2.0"),
        ("--dataset builtin --tokeniser gpt2", "did you mean '--tokenizer'?"),
        ("inspect", "the following arguments are required: FOLDER"),
        ("inspect missing", "data: 'missing' is not a folder"),
        ("--text x --subset y --out o", "subset: --subset does not go with --text"),
        ("--dataset a/b --format jsonl --out o", "format: --format does not go with --dataset"),
        ("--dataset builtin --revision y --out o", "revision: --revision does not go with --dataset builtin"),
        ("--dataset NoSuch/thing --out o", "dataset: 'NoSuch/thing' cannot be opened"),
        ("--dataset builtin --max_tokens -1 --out o", "max_tokens: -1 is not valid"),
        ("--dataset builtin --processes 0 --out o", "processes: '0' is not valid"),
        ("--text x --max_document_bytes 9000000000000000000 --out o", "max_document_bytes: '9000000000000"),
        ("--dataset builtin --out /proc", "out: '/proc' is a mount point; give a folder in it"),
        ("--text missing --out ~nosuchuser/x", "text: 'missing' is not a file or folder"),
        ("--text x/.. --out loop", "out: 'loop' names no folder that can be written"),
        ("--dataset builtin --shard x --out o", "shard: 'x' is not valid"),
        ("--dataset builtin --shard 4/4 --out o", "shard: 4/4 is out of range; valid: 0/4 to 3/4"),
        (
            "--dataset builtin --format xml --out o",
            "format: 'xml' is not valid; give one of auto,",
        ),
        ("verify missing", "data: 'missing' is not a folder"),
        ("inspect missing --tokenizer nothing", "tokenizer: 'nothing' is not a local folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not (tmp_path / "o").exists()


def test_out_may_be_a_link(texts, small_folder, tmp_path):
    """To an empty folder of another disk, or to nothing yet."""
    (tmp_path / "disk").mkdir()
    for name in ("empty", "nothing"):
        (tmp_path / name).symlink_to(f"disk/{name}")
    (tmp_path / "disk/empty").mkdir()
    for name in ("empty", "nothing"):
        given = f"--text {texts} --tokenizer {small_folder / 'tokenizer'} --out {tmp_path / name}"
        assert [run(given) for _ in range(2)] == [0, 0]
        assert (tmp_path / name).is_symlink() and Corpus.open(tmp_path / "disk" / name).training.num_documents


def test_texts_that_are_too_long_are_named(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("word " * 100)
    assert run(f"--text {tmp_path} --max_document_bytes 99 --train_tokenizer 300 --out {tmp_path / 'o'}") == 2
    error = capsys.readouterr().err
    assert "(1 too_long)" in error and "raise --max_document_bytes, or" in error and "--format lines" in error


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet with a column of its own name, and duplicates."""
    import pyarrow
    import pyarrow.parquet

    path = tmp_path_factory.mktemp("dataset") / "train.parquet"
    documents = [f"{number % 50} bottles on the shelf. " * 5 for number in range(60)]
    pyarrow.parquet.write_table(pyarrow.table({"body": documents}), path, row_group_size=10)
    return path


def test_the_path_of_hub_datasets_with_all_options(dataset, small_folder, tmp_path, capsys):
    """The line of the README that needs the internet, with files of this machine in its place."""
    out = tmp_path / "out"
    tokenizer = f"--tokenizer {small_folder / 'tokenizer'}"
    source = f"--dataset {dataset.parent} --column body --split train"
    options = "--validation_fraction 0.2 --drop_duplicates --max_tokens 1000000 --processes 1"
    assert run(f"{source} {options} {tokenizer} --out {out}") == 0
    printed = capsys.readouterr().out
    for part in ("10 duplicate", "p50 "):
        assert part in printed
    corpus = Corpus.open(out)
    assert corpus.training.num_documents + corpus.validation.num_documents == 50
    assert run(f"verify {out}") == 0
    assert "4 files are what was written" in capsys.readouterr().out
    assert run(f"inspect {out / 'training'} {tokenizer}") == 0
    assert "bottles on the shelf" in capsys.readouterr().out
    (out / "training.bin").write_bytes(b"")
    assert run(f"verify {out}") == 2
    assert "training.bin' is truncated" in capsys.readouterr().err


def test_the_last_shard_makes_the_folder(dataset, small_folder, tmp_path, capsys):
    common = f"--text {dataset} --column body --tokenizer {small_folder / 'tokenizer'} --processes 1"
    common += f" --out {tmp_path}"
    assert run(f"{common}/one") == 0
    assert run(f"{common}/two --shard 1/2") == 0
    assert "shard       1/2 is done" in capsys.readouterr().out
    assert run(f"{common}/two --shard 0/2") == run(f"verify {tmp_path}/two") == 0
    for name in ("training.bin", "training.idx", "validation.bin", "meta.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.slow
def test_the_job_script_ends_with_a_merged_corpus(texts, small_folder, tmp_path):
    """slurm/prepare.sh as an array of two calls it; the environment variables are SLURM's."""
    line = ["bash", str(ROOT / "slurm" / "prepare.sh"), "--text", str(texts)]
    line += f"--tokenizer {small_folder / 'tokenizer'} --out {tmp_path / 'out'} --processes 1".split()
    for task, ready in ((7, False), (6, True)):
        variables = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_ARRAY_TASK_ID": str(task)}
        array = {"MIN": "6", "MAX": "7", "COUNT": "2"}
        variables |= {f"SLURM_ARRAY_TASK_{name}": value for name, value in array.items()}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        result = subprocess.run(
            line, cwd=tmp_path, env=os.environ | variables | {"PATH": path}, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        assert ("ready       " in result.stdout) == (tmp_path / "out").exists()
        assert (tmp_path / "out").exists() >= ready
    assert Corpus.open(tmp_path / "out").meta.skipped == {"empty": 1}


@pytest.mark.slow
def test_a_program_may_prepare_at_its_top_level(texts, tmp_path):
    """Started processes do not run it again."""
    program = tmp_path / "program.py"
    program.write_text(
        f"print('begun', flush=True)\nfrom pretrain.prepare.command import main\n"
        f"main(['--text', {str(texts)!r}, '--train_tokenizer', '300', '--processes', '2', '--out', 'out'])\n"
        "print('ended', __file__)\n"
    )
    command_line = [sys.executable, str(program)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command_line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.count("begun") == 1, done.stdout + done.stderr
    assert f"ended {program}" in done.stdout and Corpus.open(tmp_path / "out").meta.training.documents


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("zstd frame is damaged"), "zstd frame is damaged"),  # as pyarrow raises it
        (OSError(28, "No space left on device", "out"), "out: No space left on device"),
    ],
)
def test_errors_of_files_are_one_line(texts, tmp_path, capsys, monkeypatch, error, message):
    def damaged(_: object) -> None:
        raise error

    monkeypatch.setattr(command.Preparation, "make", damaged)
    assert run(f"--text {texts} --train_tokenizer 300 --out {tmp_path / 'out'}") == 2
    assert capsys.readouterr().err == f"error: {message}\n"
