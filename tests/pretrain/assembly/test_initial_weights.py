"""Runs that begin with the weights of another run or of a Hugging Face folder."""

import shlex
import shutil
from dataclasses import replace

import pytest
import torch

from pretrain import convert
from pretrain.assembly.initial_weights import describe_settings, fit_parameters, misfits, news, open_source
from pretrain.assembly.preflight import check_source
from pretrain.checkpoint.finder import checkpoint_path
from pretrain.checkpoint.sharded_files import UnshardedCheckpoint
from pretrain.config.command_line import parse_command_line
from pretrain.config.run_config import INITIAL_MODEL
from pretrain.run.saved import SavedRun
from tests.helpers.distributed import run_distributed
from tests.helpers.exports import trained
from tests.helpers.marks import slow
from tests.helpers.refusals import refused
from tests.helpers.training import nano_run, session

OTHER = "--name other --steps 1 --validation.every 0 --optimizer.learning_rate 1e-12"


@pytest.fixture(scope="module")
def source(small_folder, tmp_path_factory):
    """A Prism model that two ranks have trained with ZeRO-3: heads 2, 3, 4, 4 of a width of 48 / h."""
    return trained(small_folder, tmp_path_factory.mktemp("runs"), "source", "--seed 3").folder


def begun(source, data, runs, *more, ranks=1, stage=1):
    """The folder of a run that begins with *source*, after a step that changes nothing."""
    given = ["--config", "micro", "--init_from", str(source), "--data", str(data), "--runs_dir", str(runs)]
    common = "--global_batch_tokens 512 --micro_batch 2 --precision fp32 --checkpoint.background false"
    run = parse_command_line([*given, *common.split(), *shlex.split(" ".join((OTHER, *more)))]).run
    failure = run_distributed(session, ranks, run, stage, timeout=300)[0][1]
    assert failure is None, failure
    return run


def weights(folder, step=None):
    saved = SavedRun.open(folder, step)
    return {name: saved.checkpoint.parameter(name) for name in saved.checkpoint.names()}


@pytest.mark.parametrize(
    ("flags", "ranks", "stage"),
    [("--tensor_parallel 2", 2, 3), *slow([("--seed 9 --document_mask true", 1, 1)])],
)
def test_a_new_run_has_the_weights_and_a_fresh_optimizer(source, small_folder, tmp_path, flags, ranks, stage):
    run = begun(source, small_folder, tmp_path, flags, ranks=ranks, stage=stage)
    expected = weights(source)
    begins, after = weights(run.folder, 0), weights(run.folder, 1)
    assert begins.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(begins[name], weight)
        torch.testing.assert_close(after[name], weight, atol=1e-9, rtol=0)  # the learning rate is 1e-12
    state = SavedRun.open(run.folder).state
    assert (
        state.imported and state.origin == f"{source} at step 12" and (state.step, state.sequences) == (1, 8)
    )
    checkpoint = UnshardedCheckpoint.open(checkpoint_path(run.folder, 1))
    assert checkpoint.step("final_norm.weight") == 1


def test_the_source_is_not_needed_again(source, small_folder, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy")
    run = begun(copy, small_folder, tmp_path)
    shutil.rmtree(copy)
    check_source(run)
    assert (run.folder / INITIAL_MODEL).is_file()
    # Before the first step is saved, too, another source is another run.
    unsaved = replace(run, runs_dir=str(tmp_path / "unsaved"))
    shutil.copytree(run.folder, unsaved.folder)
    shutil.rmtree(checkpoint_path(unsaved.folder, 1))
    failures = []
    for name in (str(copy), f"{copy}:11", "runs/b"):
        given = replace(unsaved, init_from=name, model=name)
        failures.append(run_distributed(session, 1, given, 1, timeout=300)[0][1])
        shutil.rmtree(checkpoint_path(unsaved.folder, 1), ignore_errors=True)
    assert failures[0] is None
    assert f"init_from: {copy} at step 12 != {copy}:11" in failures[1]
    assert f"init_from: {copy} at step 12 != runs/b" in failures[2]
    failure = run_distributed(session, 1, replace(run, steps=2), 1, timeout=300)[0][1]
    assert failure is None and SavedRun.open(run.folder).state.step == 2


def test_context_rope_base_and_classes_may_change(source, small_folder, tmp_path):
    run = begun(
        source, small_folder, tmp_path, "--architecture.context_length 128 --architecture.rope_base 5e5"
    )
    model = SavedRun.open(run.folder).model
    assert (model.context_length, model.rope_base) == (128, 5e5)
    expected, found = weights(source), weights(run.folder, 0)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_added_heads_change_no_logit(source, small_folder, tmp_path):
    """Of one width: the heads of a model that is widened are kept, and the output of new ones is zero."""
    dims = "24,16,12,12"
    run = begun(source, small_folder, tmp_path, f"--heads 3,3,5,4 --architecture.head_dim {dims}")
    before, after = SavedRun.open(source), SavedRun.open(run.folder)
    assert after.model.heads == (3, 3, 5, 4)
    tokens = torch.randint(600, (2, 64))
    wide, narrow = after.load_model(), before.load_model()
    torch.testing.assert_close(wide(tokens), narrow(tokens), atol=1e-5, rtol=0)
    new = wide.layers[0].attention.q.weight[48:]
    assert new.shape == (24, 48) and 0.01 < new.std() < 0.03


def test_an_untied_head_begins_as_the_embedding(source, small_folder, tmp_path):
    run = begun(source, small_folder, tmp_path, "--architecture.tie_embeddings false")
    found = weights(run.folder, 0)
    assert torch.equal(found["output.weight"], found["token_embedding.weight"])


def test_a_classifier_begins_with_a_language_models_weights(source):
    opened = open_source(str(source))
    model = opened.model.replace(classes=3)
    assert not misfits(opened.model, model) and "LM head" in misfits(model, opened.model)[0]
    assert news(opened.model, model)[-1] == "initialized: classifier.weight"
    assert news(model, model.replace(classes=7))[-1] == "initialized: classifier.weight"  # nothing is taken
    assert news(model.replace(classes=7), model)[-1] == "initialized: classifier.weight"
    found, expected = dict(fit_parameters(opened, model, 1)), weights(source)
    assert found.pop("classifier.weight").shape == (3, 48)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_growth_begins_with_the_heads_of_the_weights(source, small_folder, tmp_path):
    growth = "--growth.criterion schedule --growth.schedule '{1: [3, 3, 4, 4]}' --steps 2"
    run = begun(source, small_folder, tmp_path, growth)
    assert SavedRun.open(run.folder).model.heads == (3, 3, 4, 4)
    name = "layers.0.attention.q.weight"
    torch.testing.assert_close(weights(run.folder)[name][:48], weights(source)[name], atol=1e-9, rtol=0)


@pytest.mark.parametrize("given", ["--growth.head_dim 8", "--architecture.head_dim 8x4"])
def test_growth_keeps_the_width_of_the_heads_of_the_weights(source, small_folder, tmp_path, given):
    arguments = f"--init_from {source} --data {small_folder} --runs_dir {tmp_path} --growth.criterion random"
    run = parse_command_line(shlex.split(f"--config micro {arguments} {OTHER} {given}")).run
    said = run_distributed(session, 1, run, 1, timeout=300)[0][1]
    name = given.split()[0].removeprefix("--")
    assert said is not None and f"{name}: 8x4, and the weights have heads of width " in said


def test_what_does_not_fit_is_named(source):
    model = open_source(str(source)).model
    assert (
        misfits(model, model) == [] == misfits(model, model.replace(context_length=32, local_window=[8] * 4))
    )
    wrong = misfits(model, model.replace(activation="gelu", heads=[2, 3, 4, 2]))
    assert wrong[0] == "activation: gelu != silu"
    assert wrong[1] == (
        "heads: layer 3 has 2 heads (2 key/value) of width 24, the weights 4 heads (4 key/value) of width 12"
    )
    assert "weights have 4" in misfits(model, model.replace(heads=[2] * 5, ffn_width=96))[-1]
    untied = model.replace(tie_embeddings=False)
    assert misfits(untied, model) and not misfits(model, untied)
    grouped = model.replace(heads=[4] * 4, kv_heads=[2] * 4, head_dim=[12] * 4)
    assert not misfits(grouped, grouped.replace(heads=[6] * 4, kv_heads=[3] * 4))
    assert misfits(grouped, grouped.replace(heads=[8] * 4))


def test_an_import_begins_runs_of_other_names(source, small_folder, tmp_path, capsys):
    """Through a Hugging Face folder: imported, begun under another name, and begun with the folder itself."""
    folder, imported = tmp_path / "hf", tmp_path / "imported"
    assert convert.main([str(source), "--out", str(folder)]) == 0
    assert convert.main(["--from_hf", str(folder), "--out", str(imported)]) == 0
    assert "recipe continue" in capsys.readouterr().out
    settings = parse_command_line(["--config", str(imported / "config.yaml")]).run
    assert (settings.optimizer.kind, settings.optimizer.learning_rate) == ("adamw", 3e-5)
    assert settings.model == str(imported / "model.json") and settings.recipe == "imported"
    expected = weights(source)
    given = nano_run(
        small_folder,
        tmp_path,
        "--config",
        str(imported / "config.yaml"),
        "--model",
        str(imported / "model.json"),
        "--name",
        "q4",
    )
    assert given.init_from == str(imported)
    for begins_with, name in ((given.init_from, "q4"), (str(folder), "q5")):
        run = begun(begins_with, small_folder, tmp_path, f"--name {name}")
        found = weights(run.folder, 0)
        assert all(torch.equal(found[key][:600], expected[key][:600]) for key in expected)
    # Under its own name the import continues; it is not another source's run.
    flags = f"--config {imported}/config.yaml --data {small_folder} --global_batch_tokens 512 --micro_batch 2"
    flags += " --precision fp32 --steps 1 --validation.every 0 --checkpoint.background false"
    own = parse_command_line(flags.split()).run
    failures = [
        run_distributed(session, 1, run, 1, timeout=300)[0][1]
        for run in (replace(own, init_from=str(folder)), own)
    ]
    assert f"init_from: an import != {folder}" in failures[0]
    assert failures[1] is None and SavedRun.open(imported).state.step == 1


def test_a_run_says_what_is_not_the_sources():
    given = ["--init_from", "runs/one"]
    line = describe_settings(parse_command_line(given).run)
    assert "muon, peak learning rate 0.008, 1,050 steps of 1,024 tokens; --config continue" in line
    line = describe_settings(parse_command_line(["--config", "continue", *given, "--steps", "7"]).run)
    assert line.endswith(
        "recipe continue and of flags, not of the source: adamw, peak learning rate 3e-05, "
        "7 steps of 262,144 tokens"
    )


def test_sources_that_cannot_be_used(source, small_folder, tmp_path):
    def check(given, *words):
        with refused(*words, begins="init_from: "):
            check_source(replace(nano_run(small_folder, tmp_path, "--name", "mine"), init_from=given))

    check("runs/nothing", "holds no weights", "RUN:STEP")
    check(f"{source}:7", "no checkpoint of step 7", "the nearest is that of 8")
    check(str(tmp_path / "mine"), "is this run itself")
    with refused("'runs/nothing' is not a folder", begins="init_from: "):
        parse_command_line(["--init_from", "runs/nothing"]).run.build_model_config()
    with refused("no checkpoint of step 7", "the nearest is that of 8", begins="init_from: "):
        parse_command_line(["--init_from", f"{source}:7"]).run.build_model_config()
    shutil.copytree(source, tmp_path / "damaged")
    newest = max((tmp_path / "damaged/checkpoints").iterdir())
    (newest / "state.json").write_text("{")
    found = parse_command_line(["--init_from", str(tmp_path / "damaged")]).run.build_model_config()
    assert found == parse_command_line(["--init_from", str(source)]).run.build_model_config()
