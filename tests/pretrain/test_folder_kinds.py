"""No command fills a folder of another kind: every kind of folder against every command that makes one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from model.presets import preset
from pretrain import convert
from pretrain.assembly.preflight import check_start
from pretrain.config.command_line import parse_command_line
from pretrain.prepare import command as prepare
from pretrain.study import command as study
from pretrain.utils.files import KINDS, detect_kinds
from tests.helpers.corpora import contents
from tests.helpers.refusals import refusal, refused

STUDY = {
    "title": "two seeds",
    "recipe": "micro",
    "settings": {"model": "prism-nano", "steps": 3},
    "baseline": "a",
    "variants": {"a": {}, "b": {"heads": "4x4"}},
    "seeds": [1, 2],
}


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def a_run(folder: Path) -> None:
    write(folder, config__yaml="model: prism-nano\n", decisions__json="{}", metrics__jsonl="")
    state = {"model": preset("prism-nano").to_json()}
    write(folder / "checkpoints" / "step_000001", state__json=json.dumps(state))


def an_import(folder: Path) -> None:
    write(folder, config__yaml="recipe: imported\n", model__json="{}")
    (folder / "checkpoints" / "step_000000").mkdir(parents=True)


FOLDERS: dict[str, tuple[str | None, Callable[[Path], None]]] = {
    "run": ("run", a_run),
    "import": ("run", an_import),
    "study": ("study", lambda folder: write(folder, study__yaml=yaml.safe_dump(STUDY))),
    "corpus": ("corpus", lambda folder: write(folder, meta__json="{}", training__bin="")),
    "export": ("model", lambda folder: write(folder, config__json="{}", export__json="{}")),
    "tokenizer": ("model", lambda folder: write(folder, tokenizer__json="{}")),
}


def train(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    arguments = ["--name", folder.name, "--runs_dir", str(folder.parent), "--data_root", str(folder.parent)]
    run = parse_command_line([*arguments, "--model", "prism-nano"]).run
    with pytest.raises(ValueError) as caught:
        check_start(run)
    return f"error: {caught.value}"


def make_caller(main: Callable[[list[str]], int], *arguments: str) -> Callable[..., str]:
    def command(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
        top = folder.parent
        given = [each.format(folder=folder, top=top) for each in arguments]
        return refusal(capsys, main, *given)

    return command


COMMANDS: dict[str, tuple[str, Callable[..., str]]] = {
    "train": ("run", train),
    "study run": ("study", make_caller(study.main, "run", "{top}/x.yaml", "--out", "{folder}")),
    "study task": ("study", make_caller(study.main, "task", "{top}/x.yaml", "0", "--out", "{folder}")),
    "study report": ("study", make_caller(study.main, "report", "{top}/x.yaml", "--out", "{folder}")),
    "prepare": ("corpus", make_caller(prepare.main, "--text", "{top}/a.txt", "--out", "{folder}")),
    "labelled": (
        "corpus",
        make_caller(prepare.main, "labelled", "--train", "{top}/a.tsv", "--out", "{folder}"),
    ),
    "export": ("model", make_caller(convert.main, "{top}/other", "--out", "{folder}")),
    "overwrite": ("model", make_caller(convert.main, "{top}/other", "--out", "{folder}", "--overwrite")),
    "import": ("run", make_caller(convert.main, "--from_hf", "{top}/hf", "--out", "{folder}")),
}


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_of_another_kind_is_refused_and_kept(name, kind, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of_folder, make = FOLDERS[kind]
    of_command, command = COMMANDS[name]
    if of_folder == of_command:
        return
    make(tmp_path / "there")
    a_run(tmp_path / "other")
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "".join(f"a{n}\t{n % 2}\n" for n in range(60)))
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(STUDY))
    monkeypatch.setattr("pretrain.convert.check_folder", lambda folder: None)
    before = contents(tmp_path / "there")
    line = command(capsys, tmp_path / "there")
    option = "name" if name == "train" else "out"
    assert line.startswith(f"error: {option}: '{tmp_path / 'there'}' is the folder of {KINDS[of_folder][0]}")
    assert f"not of {KINDS[of_command][0]}; give another --{option}" in line
    assert contents(tmp_path / "there") == before
    assert not list(tmp_path.glob("there/*/*.lock"))


def test_a_study_may_be_run_again_and_a_run_continued(tmp_path):
    for kind, (of_folder, make) in FOLDERS.items():
        make(tmp_path / kind)
        assert detect_kinds(tmp_path / kind) == {of_folder}
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "notes.txt").write_text("x")
    assert not detect_kinds(tmp_path / "unknown") and not detect_kinds(tmp_path / "nowhere")


def test_folders_that_commands_make_are_known(small_folder):
    """Runs, imports and exports: tests/pretrain/test_convert.py."""
    assert detect_kinds(small_folder) == {"corpus"} and detect_kinds(small_folder / "tokenizer") <= {"model"}
    with refused("is the folder of a corpus, not of a study"):
        from pretrain.utils.files import refuse_other_kind

        refuse_other_kind(small_folder, "study", "out")
