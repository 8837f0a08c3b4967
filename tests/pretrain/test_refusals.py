"""Every kind of bad input with which a run can be started: one line and exit code 2, before the ranks meet,
and nothing that was saved is touched. What each check says in detail is tested beside it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import pytest

from model.errors import UserError
from tests.pretrain.engine.ds_configs import merged, shipped
from tests.pretrain.runtime.test_environment import BAD, NAMES

LONG = "1" * 400
SECONDS = 5


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """pretrain/main.py, without what it does to the process that it is the main module of."""
    with mock.patch.object(sys, "path", [*sys.path]), mock.patch.dict(os.environ):
        import pretrain.assembly.open_run  # which the tests replace
        import pretrain.assembly.preflight
        import pretrain.main
    # What these import is no part of a refusal's time.
    pretrain.main.parse_command_line([])
    return pretrain.main


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with runs, data and a corpus that must stay as they are."""
    checkpoint = "runs/tiny-prism-tiny-s1/checkpoints/step_000001/state.json"
    for name in (checkpoint, "data/other/meta.json", "file", "x.bin", "x.idx"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("kept")
    return tmp_path


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Each file and folder below: when it was changed, and what it holds."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


def past_the_checks(*arguments: Any, **options: Any) -> NoReturn:
    raise AssertionError("taken: next the ranks meet")


def refusal(
    program: ModuleType,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    arguments: list[str],
    environment: dict[str, str] | None = None,
) -> str:
    """The line that ends a start with these arguments."""
    before = everything(folder)
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    listener = mock.Mock(raising=contextlib.nullcontext)
    began = time.perf_counter()
    with (
        mock.patch.dict(os.environ, clean | (environment or {}), clear=True),
        mock.patch("pretrain.assembly.open_run.open_run", past_the_checks),
        pytest.raises(SystemExit) as ended,
    ):
        try:
            program.main(arguments, listener, 0)
        except UserError as error:
            program.end_after(error, 0)
    assert ended.value.code == 2 and time.perf_counter() - began < SECONDS
    assert everything(folder) == before
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and output.err.startswith("error: ")
    assert output.err.strip().isprintable()
    return output.err


DS_CONFIGS: dict[str, tuple[Any, str]] = {
    "misspelt key": ({"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'?"),
    "all at once": ({"gradient_cliping": 1, "bf16": 5, "optimizer": {"type": "Adam"}}, "optimizer is {"),
    "no object": (None, "holds null"),
    "bucket inf": ({"zero_optimization": {"reduce_bucket_size": float("inf")}}, "inf is not valid"),
}


@pytest.mark.parametrize("kind", DS_CONFIGS)
def test_ds_configs(program, files, capsys, kind):
    changes, said = DS_CONFIGS[kind]
    path = files / "ds.json"
    path.write_text(json.dumps(None if changes is None else merged(shipped(), changes)))
    arguments = ["--ds_config", str(path), "--data_root", str(files / "data")]
    assert said in refusal(program, capsys, files, arguments)


GROWTH, GROUPED = ["--config", "growth"], "{kv_heads: [1, 1, 1, 1]}"
STARTS: dict[str, tuple[list[str], str]] = {
    "recipe as a flag": (["--recipe", "../../x"], "--recipe"),
    "recipe in YAML": (["--config", "YAML:recipe: ../../x"], "recipe: '../../x'"),
    "data_root a file": (["--data_root", "{tmp}/file"], "data_root: "),
    "data_root in a file": (["--data_root", "{tmp}/file/data"], "data_root: "),
    "recipe's name long": (["--config", "x" * 300], "config: no recipe or file"),
    "ds_config's name long": (["--ds_config", "x" * 300], "ds_config: cannot read"),
    "name long": (["--name", "x" * 300], "name: "),
    "name with NUL": (["--name", "a\0b"], "name: "),
    "name with a newline": (["--name", "a\nb"], "name: "),
    "name with ESC": (["--name", "\x1b[31mred"], "name: "),
    "threads 0": (["--threads", "0"], "threads: 0"),
    "threads -1": (["--threads", "-1"], "threads: -1"),
    "threads 100000": (["--threads", "100000"], "threads: 100000"),
    "threads 1e14": (["--threads", "1e14"], "threads"),
    "400 digits in a rule": (["--lr_rules", f"[{{name: a, parameters: [q], scale: {LONG}}}]"], "lr_rules"),
    "400 digits in YAML": (["--config", f"YAML:steps: {LONG}"], "steps"),
    "400 digits in a flag": (["--steps", LONG], "steps"),
    "weight 1e999": (["--data", "x:1e999"], "weight for 'x'"),
    "d_model of 1e9": (["--architecture.d_model", "1000000007"], "do not divide d_model"),
    "100,000 layers": (["--heads", "3x100000"], "10,000 layers"),
    "model 5": (["--model", "JSON:5"], "value: 5 is not valid; give a mapping"),
    "model null": (["--model", "JSON:null"], "value: None is not valid; give a mapping"),
    "model nested": (["--model", "JSON:" + "[" * 1000], "model: "),
    "YAML nested": (["--config", "YAML:" + "{a: " * 1000], "nested"),
    "!!int": (["--config", "YAML:steps: !!int 'abc'"], "not valid YAML"),
    "plot_lr empty": (["--plot_lr", ""], "--plot_lr: '' is empty; give a value, or leave it out"),
    "plot_lr --": (["--plot_lr=--"], "--plot_lr: '--' is no value"),
    "--lr": (["--lr", "1"], "--lr: unknown flag; use --optimizer.learning_rate"),
    "data x.bin": (["--data", "{tmp}/x.bin"], "give the prefix"),
    "data nowhere": (["--data", "{tmp}/nowhere"], "is not a folder"),
    "batch": (["--global_batch_tokens", "300"], "global_batch_tokens: 300"),
    "micro-batch": (["--micro_batch", "7"], "micro_batch: 7"),
    "tensor_parallel": (["--tensor_parallel", "3"], "tensor_parallel: 3"),
    "growth and heads": ([*GROWTH, "--heads", "1,2,3,4"], "heads: '1,2,3,4' contradicts growth"),
    "growth below its start": (
        [*GROWTH, "--growth.start", "9"],
        "growth.maximum: 8 is below the 9 heads",
    ),
    "growth of grouped queries": ([*GROWTH, "--architecture", GROUPED], "incrt is not for grouped queries"),
    "model of a folder": (["--model", "{tmp}/runs"], "runs holds no checkpoint"),
}


@pytest.mark.parametrize("kind", STARTS)
def test_starts(program, files, capsys, kind):
    arguments, said = STARTS[kind]
    written = []
    for argument in arguments:
        if argument.startswith(("YAML:", "JSON:")):
            path = files / f"given.{argument[:4].lower()}"
            path.write_text(argument[5:])
            argument = str(path)
        written.append(argument.replace("{tmp}", str(files)))
    given = [] if "--data_root" in written else ["--data_root", str(files / "data")]
    assert said in refusal(program, capsys, files, [*written, *given, "--runs_dir", str(files / "runs")])


@pytest.mark.parametrize(("environment", "said"), BAD, ids=lambda value: str(value)[:40])
def test_environments(program, files, capsys, environment, said):
    assert f"error: {said}" in refusal(program, capsys, files, ["--data_root", str(files)], environment)


def test_a_rendezvous_port_that_is_taken(program, files, capsys):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(other.getsockname()[1])}
        assert "MASTER_PORT: " in refusal(program, capsys, files, ["--data_root", str(files)], environment)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
def test_ranks_that_cannot_share_the_default_batch(program, files, capsys, ranks):
    environment = {"RANK": "0", "WORLD_SIZE": str(ranks)}
    line = refusal(program, capsys, files, ["--data_root", str(files)], environment)
    assert f"shared evenly by {ranks} data-parallel ranks; valid numbers of ranks are [1, 2, 4" in line


def test_the_ranks_that_are_advised_count_those_of_a_copy(program, files, capsys):
    environment = {"RANK": "0", "WORLD_SIZE": "6"}
    given = ["--data_root", str(files), "--tensor_parallel", "2"]
    line = refusal(program, capsys, files, given, environment)
    assert "shared evenly by 3 data-parallel ranks; valid numbers of ranks are [2, 4, 8" in line


def test_what_is_fine_is_not_refused(program, files):
    """Or the tests above would pass whatever the program did."""
    arguments = ["--data_root", str(files), "--runs_dir", str(files / "runs")]
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    with (
        mock.patch.dict(os.environ, clean, clear=True),
        mock.patch("pretrain.assembly.open_run.open_run", past_the_checks),
        pytest.raises(AssertionError, match="taken: next the ranks meet"),
    ):
        program.main(arguments, mock.Mock(raising=contextlib.nullcontext), 0)
