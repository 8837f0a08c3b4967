"""Training from a program of one's own: the settings of recipes, a run with a hook, what is imported."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import sentencepiece
import torch

import model
import pretrain
from model.errors import UserError
from pretrain import Hook, HookResult, recipe, train
from pretrain.config.command_line import parse_command_line
from pretrain.data.sequences import ValidationSequences
from pretrain.hf.tokenizer_files import write_tokenizer
from pretrain.prepare.command import main as prepare
from pretrain.run.saved import SavedRun
from tests.helpers.corpora import TEXTS
from tests.helpers.refusals import refused
from tests.helpers.training import ROOT, curve, nano_run


def test_a_recipe_is_that_of_the_command_with_the_same_flags():
    flags = (
        "--config 124m --steps 7 --heads 12x12 --optimizer.learning_rate 1e-3 --architecture.qk_norm plain"
    )
    asked = recipe(
        "124m", steps=7, heads="12x12", optimizer={"learning_rate": 1e-3}, architecture={"qk_norm": "plain"}
    )
    assert asked == parse_command_line(flags.split()).run
    assert recipe() == parse_command_line([]).run
    modern = recipe("modern-micro", architecture={"z_loss": 0.5})  # the recipe's other fields stay
    assert modern.build_model_config().qk_norm == "weighted" and modern.build_model_config().z_loss == 0.5


def test_a_classifier_needs_no_other_setting():
    assert "z_loss" not in recipe(task="classification").architecture
    assert recipe().architecture["z_loss"] == 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stesp": 3}, "stesp: unknown key in the settings"),
        ({"steps": -3}, "steps: -3 is not valid"),
        ({"optimizer": {"lerning_rate": 1}}, r"optimizer\.lerning_rate: unknown key"),
        ({"architecture": 3}, "architecture: 3 is not valid"),
        ({"name": "../x"}, "name: '../x' is not valid"),
    ],
    ids=str,
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(UserError, match=f"^{message}"):
        recipe(**settings)
    with pytest.raises(UserError, match="no recipe or file 'nope'"):
        recipe("nope")


class Counts(Hook):
    """Counts its own calls."""

    name = "counts"

    def __init__(self, session):
        self.calls = 0

    def is_due(self, step):
        return step % 2 == 0

    def run(self, engine, state, row):
        self.calls += 1
        return HookResult({"counts/calls": self.calls}, [f"counts   {self.calls}"])


@pytest.mark.slow
def test_train_continues_as_the_command_would(small_folder, tmp_path, capfd):
    """Six steps with a hook, then to the end; the model that comes back, on the validation's windows."""
    run = nano_run(small_folder, tmp_path)
    train(replace(run, steps=6), "zero1", [Counts])
    trained = train(run, "zero1", [Counts])
    printed, rows = capfd.readouterr().out, curve(tmp_path / "nano")
    held_out = ValidationSequences(trained.corpora()[0], trained.model.context_length, 10)
    tokens = torch.from_numpy(held_out.batch(0, len(held_out)).astype("int64"))
    loss = trained.load_model()(tokens[:, :-1], tokens[:, 1:]).item()
    assert [row["step"] for row in rows] == [*range(1, 13)]
    assert loss == pytest.approx(rows[-1]["val_loss"], rel=1e-5)
    calls = [row.get("counts/calls") for row in rows]
    assert calls == [None, 1, None, 2, None, 3] * 2  # each session has a hook of its own
    elsewhere = replace(run, data="builtin", data_root=str(tmp_path / "prepared"))
    asked = f"(data: {small_folder} != builtin); give --name for a new run"
    with refused(
        f"--config {tmp_path}/nano/config.yaml", begins=f"resume: {run.folder} holds another run {asked}"
    ):
        train(elsewhere, "zero1")
    assert not (tmp_path / "prepared").exists()
    again = f"head-schedules train --config {tmp_path}/nano/config.yaml"
    assert f"continue  {again} --ds_config {tmp_path}/nano/ds_config.json --steps 24" in printed


@pytest.mark.slow
def test_a_tokenizer_that_is_not_exported_is_reported_before_the_training(tmp_path, capfd):
    model = tmp_path / "unigram.model"
    with model.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS),
            model_writer=file,
            vocab_size=330,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    texts, data = tmp_path / "texts.json", tmp_path / "data"
    texts.write_text(json.dumps(TEXTS))
    assert prepare(["--text", str(texts), "--tokenizer", str(model), "--out", str(data)]) == 0
    why = "cannot be exported to Hugging Face: tokenizer sentencepiece-330 is not a byte-fallback BPE"
    assert f"note        a run on this corpus {why}\n" in capfd.readouterr().out
    run = nano_run(data, tmp_path, "--steps 1")
    train(run, "zero1")
    assert f"note     the run {why}\n" in capfd.readouterr().out
    with pytest.raises(UserError, match="sentencepiece-330 is not a byte-fallback BPE"):
        write_tokenizer(SavedRun.open(run.folder).tokenizer, tmp_path / "hf", 64)


def test_public_names_are_imported_when_they_are_used():
    for package in (pretrain, model):
        assert {*package.__all__} == {*package._PLACES}
        assert all(getattr(package, name).__doc__ for name in package.__all__)
        with pytest.raises(AttributeError, match="has no attribute 'nope'"):
            _ = package.nope
    code = (
        "import sys, model, pretrain as library\nlibrary.recipe()\n"
        "model.preset('prism-124m').num_parameters()\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
