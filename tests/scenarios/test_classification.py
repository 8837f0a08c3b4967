"""Sequence classification from labelled files to a trained model, over ranks, resumes, growth and
refusals."""

import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pretrain import convert, generate
from pretrain.checkpoint.state import read_features
from pretrain.classification.corpus import Task, prepare_labelled
from pretrain.classification.examples import LabelledSequences, held_out_examples
from pretrain.classification.sources import Example
from pretrain.data.corpus import Corpus
from pretrain.growth.report.command import main as report_growth
from pretrain.metrics.file import read_metrics
from pretrain.run.saved import SavedRun
from tests.helpers.distributed import run_distributed
from tests.helpers.training import curve, interrupted, nano_run, session

STEPS = 30


def sentences(count, seed):
    """Random letters, a third of them the one that says the class."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        letters = ["xy"[number % 2], *draw.choices("abcd" + 2 * "xy"[number % 2], k=draw.randint(3, 30))]
        draw.shuffle(letters)
        found.append(Example("".join(letters), ["left", "right"][number % 2]))
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A task that a small model learns in some steps, and a text corpus cannot be taken for."""
    task = Task(sentences(400, 1), sentences(61, 2), {"name": "letters"}, {"by": "seed"})
    return prepare_labelled(tmp_path_factory.mktemp("data") / "letters", task, None)


def classifying(corpus, runs, flags="", steps=STEPS):
    """A run that classifies: 16 examples a step."""
    shared = f"""--task classification --steps {steps} --global_batch_tokens 1024 --validation.every 10
        --validation.sequences 99 --checkpoint.every 10 --optimizer.learning_rate 5e-3
        --diagnostics_every 15 {flags}"""
    return nano_run(corpus, runs, *shared.split())


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """The run of one rank."""
    run = classifying(corpus, tmp_path_factory.mktemp("runs"))
    assert run_distributed(session, 1, run)[0] == ([], None)
    return run


@pytest.mark.slow
def test_it_learns_and_validation_is_that_of_the_saved_model(corpus, trained):
    saved = SavedRun.open(trained.folder)
    assert saved.model.classes == 2 and saved.load_model().classifier.out_features == 2
    inputs, labels = map(torch.from_numpy, held_out_examples(Corpus.open(corpus), 64, 99))
    rows, ends = (labels != -100).nonzero(as_tuple=True)
    with torch.no_grad():
        logits = saved.load_model()(inputs)[rows, ends].double()
    row = [row for row in read_metrics(trained.folder) if "val_accuracy" in row][-1]
    assert row["step"] == STEPS and len(rows) == 61
    assert row["val_loss"] == pytest.approx(F.cross_entropy(logits, labels[rows, ends]).item(), rel=1e-5)
    assert row["val_accuracy"] == (logits.argmax(1) == labels[rows, ends]).double().mean().item()
    assert row["val_accuracy"] > 0.9, "the larger class alone has 0.51"
    rows = [row for row in read_metrics(trained.folder) if any(key.startswith("diagnostics/") for key in row)]
    assert {row["step"] for row in rows} >= {15, 30}


@pytest.mark.slow
def test_an_interrupted_run_is_bit_identical(corpus, trained, tmp_path):
    run = classifying(corpus, tmp_path)
    assert run_distributed(interrupted, 1, run, 17, 1, 2)[0] == "stopped"
    assert run_distributed(session, 1, run)[0][1] is None
    assert curve(run.folder) == curve(trained.folder)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tensor_parallel", "stage"), [(2, 2, 1), (2, 1, 3)])
def test_other_worlds_give_the_same_losses_and_go_on_from_each_other(
    corpus, trained, tmp_path, ranks, tensor_parallel, stage
):
    run = classifying(corpus, tmp_path, f"--tensor_parallel {tensor_parallel} --micro_batch 2")
    assert set(run_distributed(interrupted, ranks, run, 10, ranks, stage, timeout=120)) == {"stopped"}
    alone = classifying(corpus, tmp_path, "--micro_batch 2")
    assert run_distributed(session, 1, alone, 2, timeout=120)[0][1] is None
    rows = [[row for row in curve(r.folder) if "train_loss" in row] for r in (trained, run)]
    expected, found = ([row["train_loss"] for row in each] for each in rows)
    assert len(found) == len(expected) == STEPS
    # fp32 sums in another order, over 30 steps of a rate of 5e-3.
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-4)
    assert np.allclose(found[:3], expected[:3], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_grow_and_padding_is_not_measured(corpus, tmp_path, capsys, ranks):
    growth = "--growth.criterion incrt --growth.maximum 3 --growth.interval 2 --growth.average 0"
    growth += " --growth.calibration 1"
    flags = f"{growth} --checkpoint.keep_last 9 --tensor_parallel {ranks}"
    run = classifying(corpus, tmp_path, flags, steps=12)
    assert run_distributed(session, ranks, run, timeout=120)[0] == ([], None)
    saved = SavedRun.open(run.folder)
    assert sum(saved.model.heads) > 4 and saved.model.classes == 2
    # The second moment of the first layer at an event, where a checkpoint was written.
    step = saved.state.record("growth")["events"][-1]["step"]
    folder = run.folder / f"checkpoints/step_{step:06d}"
    before = SavedRun.open(run.folder, step)
    sequences = LabelledSequences([(Corpus.open(corpus), 1)], 64, run.seed)
    count = run.global_batch_tokens // 64  # of the whole step
    inputs, labels = map(torch.from_numpy, sequences.inputs_and_labels(before.state.sequences, count))
    embedding = before.checkpoint.parameter("token_embedding.weight")[inputs].double()
    normalized = embedding / (embedding.square().mean(-1, keepdim=True) + before.model.norm_eps).sqrt()
    normalized = normalized * before.checkpoint.parameter("layers.0.attention_norm.weight").double()
    real = torch.arange(64)[None] <= (labels != -100).int().argmax(1)[:, None]
    expected = normalized[real].T @ normalized[real] / real.sum()
    found = read_features(folder)["growth/second_moment/layer_0"]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    assert report_growth(["report", str(run.folder), "--sequences", "99"]) == 0
    report = json.loads((run.folder / "growth/report.json").read_text())
    row = [row for row in read_metrics(run.folder) if "val_loss" in row][-1]
    assert report["loss"] == pytest.approx(row["val_loss"], rel=1e-5), "the same examples as validation"
    assert [len(worths) for worths in report["worths"]] == list(saved.model.heads)
    assert "held-out examples of letters" in capsys.readouterr().out


@pytest.mark.slow
def test_a_classifier_is_no_language_model(trained, capsys):
    assert generate.main([str(trained.folder), "--prompt", "a"]) == 2
    error = capsys.readouterr().err
    assert "classifier of 2 classes, which cannot be sampled from" in error and error.count("\n") == 1


@pytest.mark.slow
def test_an_exported_classifier_has_the_runs_accuracy(corpus, trained, tmp_path, capsys):
    """Loaded as a user would: texts of the validation split through AutoTokenizer, classes by name."""
    assert convert.main([str(trained.folder), "--out", str(tmp_path / "hf")]) == 0
    assert "hf upload ORGANISATION/hf" in capsys.readouterr().out
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    examples = sentences(61, 2)
    batch = tokenizer([example.text for example in examples], padding=True, return_tensors="pt")
    with torch.no_grad():
        found = model.eval()(**batch).logits.argmax(-1).tolist()
    right = [
        model.config.id2label[label] == example.label for label, example in zip(found, examples, strict=True)
    ]
    row = [row for row in read_metrics(trained.folder) if "val_accuracy" in row][-1]
    assert sum(right) / 61 == pytest.approx(row["val_accuracy"])
    assert "pipeline_tag: text-classification" in (tmp_path / "hf/README.md").read_text()


@pytest.mark.slow
def test_text_without_labels_and_another_task_are_refused(corpus, small_folder, trained, tmp_path):
    run = classifying(small_folder, tmp_path)
    assert "has no labels; valid: one written by" in run_distributed(session, 1, run)[0][1]
    assert not run.folder.exists()
    blend = classifying(f"{corpus}:0.5,{corpus}:0.5", tmp_path)
    assert "data: a blend of 2 corpora cannot be classified" in run_distributed(session, 1, blend)[0][1]
    other = classifying(corpus, trained.folder.parent, "--task language")
    assert "classes: 2 != None" in run_distributed(session, 1, other)[0][1]
    # A labelled corpus is text, too, and a language model takes its shape from a classifier's run.
    language = nano_run(corpus, tmp_path, "--model", str(trained.folder), "--steps", "2")
    line = run_distributed(session, 1, language)[0][1]
    assert "bytes of characters-8's tokens are not defined" in line
