"""lm-eval for real, offline: the papers' tasks on local files, through runs and exports, against other
code."""

import json
import logging
import re
import shutil
import sys

import pytest
import torch

from pretrain import convert
from pretrain.checkpoint.finder import checkpoint_steps
from pretrain.evaluation import command as evaluation
from pretrain.evaluation.checks import GROUPS
from pretrain.evaluation.follow import settings_of
from tests.helpers.damage import damage
from tests.helpers.distributed import run_distributed
from tests.helpers.exports import trained
from tests.helpers.items import piqa_items, write, write_data_sets, write_paper_data_sets
from tests.helpers.launch import ROOT, launch
from tests.helpers.refusals import refusal

lm_eval = pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Data sets of piqa, arc_easy and wikitext, with a few dozen items each."""
    return write_data_sets(tmp_path_factory.mktemp("data_sets"))


@pytest.fixture(scope="module")
def paper_data(tmp_path_factory):
    """Data sets of the papers' six tasks."""
    return write_paper_data_sets(tmp_path_factory.mktemp("paper_data"))


@pytest.fixture(scope="module")
def folders(small_folder, tmp_path_factory):
    """A run with a context long enough for the items, and its two exports."""
    root = tmp_path_factory.mktemp("evaluation")
    more = ["--architecture.context_length", "128", "--micro_batch", "1", "--global_batch_tokens", "512"]
    run = trained(small_folder, root / "runs", "prism", *more).folder
    for name in ("native", "llama"):
        assert convert.main([str(run), "--out", str(root / name), "--format", name]) == 0
    return {"run": run, "native": root / "native", "llama": root / "llama"}


@pytest.fixture(scope="module")
def qwen3(small_folder, tmp_path_factory):
    """A run's padded export to Qwen3."""
    root = tmp_path_factory.mktemp("qwen3")
    more = "--architecture.context_length 128 --micro_batch 1 --architecture.qk_norm weighted"
    widths = "--architecture.head_dim 16,16,16,16"
    run = trained(small_folder, root / "runs", "qwen3", more, widths, ranks=1, stage=1).folder
    assert convert.main([str(run), "--out", str(root / "hf"), "--format", "qwen3"]) == 0
    return root / "hf"


def score(folder, data_dir, out, *more):
    """The arguments of an evaluation that writes to *out*."""
    places = [str(folder), "--data_dir", str(data_dir), "--out", str(out)]
    return [*places, "--tasks", "piqa,arc_easy,wikitext", *more]


def figures(folder, data_dir, out, *more):
    assert evaluation.main(score(folder, data_dir, out, *more)) == 0
    return json.loads(out.read_text())["scores"]


@pytest.mark.slow
def test_run_and_exports_have_the_same_scores(folders, data_dir, tmp_path, capsys):
    scores = {name: figures(folder, data_dir, tmp_path / f"{name}.json") for name, folder in folders.items()}
    accuracies = {f"{task}/{metric}" for task in ("piqa", "arc_easy") for metric in ("acc", "acc_norm")}
    of_text = {f"wikitext/{metric}" for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte")}
    assert set(scores["run"]) == accuracies | of_text
    for name in ("native", "llama"):
        assert scores[name] == pytest.approx(scores["run"], rel=1e-5)
    printed = capsys.readouterr().out
    assert "|arc_easy|" in printed
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["step"] == 12 and record["items"]["piqa"]["effective"] == 30


def record_requests(monkeypatch, model_class):
    """(context ids, continuation ids) -> (log-likelihood, greedy), of each answer that a model has scored."""
    asked, original = {}, model_class._loglikelihood_tokens

    def recorded(self, requests, *more, **options):
        answers = original(self, requests, *more, **options)
        for (_, context, scored), answer in zip(requests, answers, strict=True):
            asked[tuple(context), tuple(scored)] = answer
        return answers

    monkeypatch.setattr(model_class, "_loglikelihood_tokens", recorded)
    return asked


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "native", "qwen3"])
def test_scores_equal_lm_evals_own_hugging_face_model(
    kind, folders, qwen3, paper_data, tmp_path, monkeypatch
):
    """Padded, with the code in the folder, and padded with norms of queries and keys: the papers' six tasks,
    their scores and the log-likelihood of every answer."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pretrain.evaluation.data_sets import use_data_sets
    from pretrain.evaluation.language_model import ZeroShotModel
    from pretrain.evaluation.scores import task_manager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    theirs, ours = (record_requests(monkeypatch, model) for model in (HFLM, ZeroShotModel))
    folder = qwen3 if kind == "qwen3" else folders[kind]
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    network = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with use_data_sets(paper_data):
        results = lm_eval.simple_evaluate(
            model=HFLM(pretrained=network, tokenizer=tokenizer, batch_size=16),
            tasks=list(GROUPS["papers"]),
            task_manager=task_manager("papers"),
            bootstrap_iters=0,
            log_samples=False,
        )["results"]
    scores = figures(folder, paper_data, tmp_path / "out.json", "--tasks", "papers")
    assert {name.split("/")[0] for name in scores} == set(GROUPS["papers"])
    for name, value in scores.items():
        task, metric = name.split("/")
        assert value == pytest.approx(results[task][f"{metric},none"], rel=1e-5), name
    assert len(ours) > 300 and ours.keys() == theirs.keys()
    for request, (likelihood, greedy) in ours.items():
        assert likelihood == pytest.approx(theirs[request][0], rel=1e-5, abs=1e-4)
        assert greedy == theirs[request][1]


@pytest.mark.slow
def test_batch_size_changes_no_score(folders, data_dir, tmp_path):
    """1e-5: other batch shapes sum in another order."""
    one = figures(folders["run"], data_dir, tmp_path / "a.json", "--batch_tokens", "1")
    many = figures(folders["run"], data_dir, tmp_path / "b.json", "--batch_tokens", "4000")
    assert one == pytest.approx(many, rel=1e-5)


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (".", "out: '.' is a folder"),
        ("{}", "is a folder; give a file"),
        ("{}/file/y.json", "cannot be written"),
    ],
)
def test_a_place_that_cannot_take_the_results_is_named_first(out, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "check_model", lambda *_: None)
    (tmp_path / "file").touch()
    arguments = ["runs/a", "--out", out.format(tmp_path), "--tasks", "nothing"]
    assert said in refusal(capsys, evaluation.main, *arguments)


def test_scores_of_other_settings_are_not_replaced(tmp_path):
    def written(tasks, **settings):
        options = evaluation.EvaluationOptions("runs/a", limit=settings.pop("limit", None))
        settings = settings_of(options, tasks) | {"earlier_steps": []} | settings
        path = evaluation._choose_file(tmp_path / "step_8.json", settings)
        path.write_text(json.dumps(settings))
        return path.name

    (tmp_path / "step_8.json").write_text('{"tasks": ["piqa"], "limit": null}')  # it may be of five examples
    assert written(["piqa"]) == "step_8-2.json"
    assert written(["piqa"], earlier_steps=[4, 6]) == "step_8-3.json"
    (tmp_path / "step_8-3.json").unlink()
    (tmp_path / "step_8.json").unlink()
    (tmp_path / "step_8-2.json").unlink()
    assert written(["piqa"]) == written(["piqa"]) == "step_8.json"
    assert written(["piqa"], limit=10) == "step_8-2.json" and written(["arc_easy"]) == "step_8-3.json"
    assert (
        written(["piqa"], limit=10) == "step_8-2.json" and written(["piqa"], num_fewshot=5) == "step_8-4.json"
    )


def evaluated(arguments):
    """The command inside a rank of a test pool."""
    import os

    os.environ["WORLD_SIZE"] = str(torch.distributed.get_world_size())
    return evaluation.main(arguments)


FAILING = """
import os, sys
sys.path.insert(0, {root!r})
from model.errors import UserError
from pretrain.evaluation import command, scores

def fail(*_, **__):
    raise {error}

if os.environ["RANK"] == "1":
    scores.{function} = fail
sys.exit(command.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "error", "code", "said"),
    [
        ("load_tasks", "UserError('data_dir: no piqa')", 2, ["error: rank 1: data_dir: no piqa"]),
        ("score", "ValueError('a defect')", 1, ["error: rank 1 on", "Traceback", "ValueError: a defect"]),
    ],
)
def test_a_rank_that_fails_alone_says_why(folders, data_dir, tmp_path, function, error, code, said):
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(root=str(ROOT), function=function, error=error))
    arguments = [str(folders["run"]), "--tasks", "piqa", "--data_dir", str(data_dir)]
    finished = launch(arguments, 2, script=script, timeout=120)
    assert finished.returncode == code, finished.output
    assert all(text in finished.output for text in said)


@pytest.mark.slow
def test_two_ranks_share_the_work(folders, data_dir, tmp_path):
    out = tmp_path / "two.json"
    arguments = score(folders["run"], data_dir, out)
    assert run_distributed(evaluated, 2, arguments, timeout=180) == [0, 0]
    alone = figures(folders["run"], data_dir, tmp_path / "one.json")
    assert json.loads(out.read_text())["scores"] == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow  # importing lm-eval takes longer than the rest of it
def test_random_state_is_left_alone(folders, data_dir, tmp_path):
    import random

    import numpy as np

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    figures(folders["run"], data_dir, tmp_path / "out.json", "--limit", "2")
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


@pytest.mark.slow
def test_data_sets_are_saved_where_there_is_internet_and_read_elsewhere(
    folders, data_dir, tmp_path, monkeypatch, capsys
):
    """The hub is played by a function; everything after it is real."""
    import datasets

    def hub(path, name=None, **more):
        assert (path, name) == ("baber/piqa", None)
        rows = datasets.Dataset.from_list(piqa_items())
        return datasets.DatasetDict({"train": rows, "validation": rows})

    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert evaluation.main(["save", "--tasks", "piqa", "--data_dir", str(tmp_path / "saved")]) == 0
    assert "saved" in capsys.readouterr().out
    monkeypatch.undo()
    found = [
        figures(folders["run"], where, tmp_path / "out.json", "--tasks", "piqa")
        for where in (tmp_path / "saved", data_dir)
    ]
    assert found[0] == found[1] and set(found[0]) == {"piqa/acc", "piqa/acc_norm"}


UNKNOWN = {
    "helaswag": "'helaswag' is unknown; did you mean 'hellaswag'?",
    ",": "tasks: none given",
    "winogrande --data_dir {data}": "allenai/winogrande/winogrande_xl; on a machine with",
    "winogrande": "head-schedules evaluate save",
    "mine.yaml": "tasks: there is no file 'mine.yaml'",
}


@pytest.mark.slow  # importing lm-eval takes longer than the rest
@pytest.mark.parametrize(("arguments", "words"), UNKNOWN.items())
def test_tasks_that_cannot_be_scored_are_one_line(arguments, words, folders, data_dir, capsys):
    more = [text.format(data=data_dir) for text in arguments.split()]
    assert words in refusal(capsys, evaluation.main, str(folders["run"]), "--tasks", *more)


REFUSED = {
    "{run} --tasks piqa --data_dir {root}/nowhere": "is not a folder",
    "{root} --tasks piqa": "has no config.json",
    "{root}/nowhere --tasks piqa": "does not exist",
    "{run} --limit 0": "limit: '0' is not valid",
    "{run} --include_path {root}/nowhere": "nowhere' is not a folder; give one that holds task YAMLs",
    "save --data_dir d --include_path {root}/nowhere": "include_path: ",
    "save --tasks piqa": "required: --data_dir",
}


@pytest.mark.parametrize(("arguments", "words"), REFUSED.items())
def test_bad_input_is_one_line_before_lm_eval_is_imported(arguments, words, tmp_path, capsys, monkeypatch):
    (tmp_path / "run/checkpoints/step_000002").mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "pretrain.evaluation.scores", None)
    there = {"run": tmp_path / "run", "root": tmp_path}
    assert words in refusal(capsys, evaluation.main, *(text.format(**there) for text in arguments.split()))


@pytest.mark.slow  # importing lm-eval takes longer than the rest
def test_damaged_data_sets_and_missing_splits(folders, tmp_path, capsys):
    folder = tmp_path / "baber/piqa/default"
    write(folder, piqa_items(3), ["validation"])
    arguments = [str(folders["run"]), "--tasks", "piqa", "--data_dir", str(tmp_path)]
    assert "piqa cannot be loaded (KeyError: 'train')" in refusal(capsys, evaluation.main, *arguments)
    (folder / "train.jsonl").write_text("{ not json")
    assert "piqa cannot be loaded" in refusal(capsys, evaluation.main, *arguments)
    shutil.rmtree(folder)
    write(folder, [{**piqa_items(1)[0], "label": 1.5}], ["train", "validation"])
    said = "an item of piqa cannot be scored (TypeError: "
    assert said in refusal(capsys, evaluation.main, *arguments)


@pytest.mark.slow
def test_texts_longer_than_the_context_are_cut_and_counted(small_folder, data_dir, tmp_path, capsys):
    more = ["--steps", "1", "--architecture.context_length", "16"]
    run = trained(small_folder, tmp_path / "runs", "short", *more, ranks=1, stage=1).folder
    arguments = [str(run), "--tasks", "arc_easy", "--data_dir", str(data_dir)]
    assert evaluation.main(arguments) == 0
    assert "did not fit the context of 16 with their answers" in capsys.readouterr().out


@pytest.mark.slow
def test_means_of_the_last_checkpoints(folders, data_dir, tmp_path, capsys):
    steps = checkpoint_steps(folders["run"])[-2:]
    alone = [
        figures(folders["run"], data_dir, tmp_path / "one.json", "--step", str(step), "--limit", "4")
        for step in steps
    ]
    means = figures(folders["run"], data_dir, tmp_path / "out.json", "--last", "2", "--limit", "4")
    assert alone[0] != alone[1]
    assert means == pytest.approx({name: (alone[0][name] + alone[1][name]) / 2 for name in means}, rel=1e-5)
    assert json.loads((tmp_path / "out.json").read_text())["earlier_steps"] == steps[:1]
    assert "of 2 checkpoints" in capsys.readouterr().out
    # Where the newest is damaged, the one before it takes its place, and does not count twice.
    run = tmp_path / "run"
    shutil.copytree(folders["run"], run)
    damage(run / f"checkpoints/step_{steps[1]:06d}/state.json", "flipped")
    said = refusal(capsys, evaluation.main, *score(run, data_dir, tmp_path / "x.json", "--last", "2"))
    assert f"0 checkpoints are older than the newest whole one, of step {steps[0]}" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--last", "2", "--step", "12"], "last: 2 was given with --step"),
        (["--last", "2"], "last: 2 is not valid for .*; give a run's folder"),
    ],
)
def test_means_that_cannot_be_taken(tmp_path, capsys, flags, message):
    (tmp_path / "config.json").write_text("{}")
    said = refusal(capsys, evaluation.main, str(tmp_path), *flags)
    assert re.search(message, said)
