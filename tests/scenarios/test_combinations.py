"""Settings in combination: every pair of levels of some 40 settings trains, stops, resumes bit-identically,
is converted, generates and is scored, or is rejected with the message that combined_settings.py declares.

    FUZZ_EXAMPLES=60 FUZZ_SEED=1 pytest -m slow -n 2 --dist load tests/scenarios/test_combinations.py

takes 60 configurations: the covering arrays of FUZZ_SEED, FUZZ_SEED + 1 and so on. Without FUZZ_EXAMPLES six
are drawn from one array, one of which is compiled. The seed and the configuration are printed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import random
import re
from unittest import mock

import pytest
import torch

from model.errors import UserError
from pretrain import convert, generate
from pretrain.classification.corpus import Task, prepare_labelled
from pretrain.classification.sources import Example
from pretrain.evaluation import command as evaluation
from pretrain.prepare.assemble import Selection
from pretrain.prepare.make import make_corpus
from pretrain.prepare.sources.plain_files import PlainFiles
from pretrain.runtime.signals import STOPPED, Stopped
from tests.helpers.combined_settings import INFEASIBLE, SETTINGS, STEPS, ds_config_of, ranks_of, run_of
from tests.helpers.covering import contradicts, covering_array, pairs_of
from tests.helpers.distributed import run_distributed
from tests.helpers.items import write_data_sets
from tests.helpers.refusals import refusal
from tests.helpers.shapes import contents, differences, newest
from tests.helpers.small_corpus import small_paths
from tests.helpers.training import build, curve, fit

LEVELS = {name: list(levels) for name, levels in SETTINGS.items()}
TOGETHER = [combination for combination, _ in INFEASIBLE]
PLAIN = {name: levels[0] for name, levels in LEVELS.items()}
COUNT = int(os.environ.get("FUZZ_EXAMPLES") or 6)


@functools.cache
def configurations():
    """The seed, and COUNT configurations."""
    seed = int(os.environ.get("FUZZ_SEED") or 1)
    if "FUZZ_EXAMPLES" not in os.environ:
        draw, array = random.Random(seed), covering_array(LEVELS, TOGETHER, seed)
        compiled, eager = ([each for each in array if each["compile"] == on] for on in ("true", "false"))
        return seed, [*draw.sample(eager, COUNT - 1), draw.choice(compiled)]
    arrays = (covering_array(LEVELS, TOGETHER, seed + more) for more in itertools.count())
    return seed, list(itertools.islice(itertools.chain.from_iterable(arrays), COUNT))


# ---------------------------------------------------------------------- the array


def test_every_pair_is_in_the_array_or_declared():
    array = covering_array(LEVELS, TOGETHER, 0)
    assert len(array) < 30 and not any(contradicts(each, TOGETHER) for each in array)
    covered = {pair for each in array for pair in pairs_of(each)}
    for (first, levels), (second, others) in itertools.combinations(sorted(LEVELS.items()), 2):
        for level, other in itertools.product(levels, others):
            declared = {first: level, second: other} in TOGETHER
            assert declared is (((first, level), (second, other)) not in covered), (first, second)


def test_other_arrays_than_this_one_are_covered():
    settings = {"a": list("123"), "b": list("12"), "c": list("1234"), "d": list("12")}
    infeasible = [{"a": "2", "b": "2"}, {"a": "3", "c": "4", "d": "2"}]
    array = covering_array(settings, infeasible, 5)
    assert array == covering_array(settings, infeasible, 5) != covering_array(settings, infeasible, 6)
    covered = {pair for each in array for pair in pairs_of(each)}
    assert len(covered) == 3 * 2 + 3 * 4 + 3 * 2 + 2 * 4 + 2 * 2 + 4 * 2 - 1
    assert not any(contradicts(each, infeasible) for each in array)


# ---------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def folders(small, tmp_path_factory):
    """Two corpora whose documents are lines, so that windows hold several, and a labelled one."""
    root, found = tmp_path_factory.mktemp("corpora"), {}
    for name, paths in (("text", small_paths()[:4]), ("other", small_paths()[4:8])):
        files = []
        for path in paths:
            for number, line in enumerate(path.read_text().splitlines()):
                files.append((f"{path.name}:{number}", root / f"{path.name}.{number}"))
                files[-1][1].write_text(line)
        found[name] = make_corpus(PlainFiles(name, files), root / name, small.tokenizer, Selection(0.2))
    draw = random.Random(1)
    texts = [["".join(draw.choices("xyz", k=draw.randint(1, 20))) for _ in range(n)] for n in (200, 30)]
    splits = [[Example(f"xyz{text}", "ab"[len(text) % 2]) for text in each] for each in texts]
    task = Task(*splits, {"name": "letters"}, {"by": "seed"})
    found["labelled"] = prepare_labelled(root / "labelled", task, None)
    return found


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    pytest.importorskip("lm_eval")
    return write_data_sets(tmp_path_factory.mktemp("data_sets"))


class Asks:
    """Stands for a StopListener that is asked to stop when *step* - 1 steps of the run are done."""

    exit_code = STOPPED

    def __init__(self, state, step):
        self.state, self.step = state, step

    @property
    def reason(self):
        return "test" if self.state.step >= self.step - 1 else None

    def mark_agreed(self):
        pass


def session(run, ds_config, stop=None):
    """Train *run* as the command does, to its end or asked to stop at step *stop*; notes, last step."""
    # To generate code takes half a minute for each rank and head count: elsewhere graphs run as captured.
    simple = "FUZZ_EXAMPLES" in os.environ and os.environ["WORLD_SIZE"] == "1" and not run.growth.active
    compiler = torch.compile if simple else functools.partial(torch.compile, backend="aot_eager")
    with mock.patch("torch.compile", compiler):  # all models of the session, grown ones too
        built = build(run, ds_config)
        if stop:
            built.trainer.control.listener = Asks(built.state, stop)
        try:
            fit(built)
        except Stopped:
            assert stop
    return built.notes, built.state.step


def all_sessions(run, broken, ds_config, stop):
    """Notes and last steps of a whole run, and of one that is stopped and resumed; or the error's line."""
    try:
        return [session(run, ds_config), session(broken, ds_config, stop), session(broken, ds_config)]
    except UserError as error:
        return str(error)


def whole_and_resumed(configuration, folders, runs, stop):
    """The whole run and the resumed one, trained."""
    run = run_of(configuration, folders, runs, "whole")
    broken = dataclasses.replace(run, name="resumed")
    ds_config, ranks = ds_config_of(configuration), ranks_of(configuration)
    for rank in run_distributed(all_sessions, ranks, run, broken, ds_config, stop, timeout=400):
        # Asked between two steps: it stops in what is due after the first, or after the second.
        assert rank in [[([], STEPS), ([], at), ([], STEPS)] for at in (stop - 1, stop)]
    return run, broken


def print_configuration(seed, number, configuration, stop):
    apart = {name: level for name, level in configuration.items() if level != PLAIN[name]}
    print(f"FUZZ_SEED={seed} configuration {number}, stopped after step {stop}: {json.dumps(apart)}")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(COUNT))
def test_a_combination(number, folders, data_dir, tmp_path, capsys):
    seed, chosen = configurations()
    configuration = chosen[number]
    stop = random.Random(f"{seed} {number}").randrange(2, STEPS)
    print_configuration(seed, number, configuration, stop)
    run, broken = whole_and_resumed(configuration, folders, tmp_path, stop)
    rows = curve(run.folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(math.isfinite(row["train_loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
    assert math.isfinite(rows[-1]["val_loss"]) and rows[-1]["skipped"] == 0
    resumed = curve(broken.folder)
    # The size of Muon's last update is not in a checkpoint: a measurement that the stop has put off lacks it.
    for at in (stop - 2, stop - 1):  # the rows of the steps after which it may stop
        for name in rows[at].keys() - resumed[at].keys():
            if name.startswith("diagnostics/") and name.endswith("/muon"):
                del rows[at][name]
    assert resumed == rows
    assert differences(contents(newest(run.folder)), contents(newest(broken.folder))) == []
    measured = any(key.startswith("diagnostics/") for row in rows for key in row)
    assert measured or configuration["diagnostics"] == "0"
    assert any(run.folder.rglob("events.out.*")) is (configuration["tensorboard"] == "true")
    language = configuration["classification"] == "false"
    commands = used_as_a_language_model if language else used_as_a_classifier
    commands(broken.folder, tmp_path / "hf", data_dir, capsys)


def used_as_a_language_model(run, out, data_dir, capsys):
    """Convert it, which compares logits, continue a text with both, and score the export."""
    assert convert.main([str(run), "--out", str(out)]) == 0
    texts = []
    for folder in (run, out):
        capsys.readouterr()
        assert generate.main([str(folder), "--prompt", "def main(", "--tokens", "12"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("def main(")
    scoring = ["--tasks", "piqa", "--limit", "2", "--data_dir", str(data_dir)]
    assert evaluation.main([str(out), *scoring]) == 0
    scores = json.loads((out / "evaluation.json").read_text())["scores"]
    assert scores and all(0 <= value <= 1 for value in scores.values())


def used_as_a_classifier(run, out, data_dir, capsys):
    """Declared: a classifier is neither sampled from nor scored; its export gives the run's scores, which
    convert compares."""
    for main, arguments, words in (
        (generate.main, ["--tokens", "3"], "cannot be sampled from or scored"),
        (evaluation.main, ["--tasks", "piqa", "--data_dir", data_dir], "cannot be sampled from or scored"),
    ):
        assert re.search(
            f"holds a classifier of 2 classes, which {words}", refusal(capsys, main, run, *arguments)
        )
    assert convert.main([str(run), "--out", str(out)]) == 0


# ---------------------------------------------------------------------- what is declared


@pytest.mark.parametrize(("combination", "message"), INFEASIBLE, ids=str)
def test_what_is_declared_is_rejected(combination, message, folders, tmp_path):
    """Else the array would leave out what works."""
    configuration = {**PLAIN, **combination}
    try:
        run = run_of(configuration, folders, tmp_path, "rejected")
    except UserError as error:
        said = str(error)
    else:
        (said,) = run_distributed(all_sessions, 1, run, run, ds_config_of(configuration), 3)
    assert isinstance(said, str) and re.search(message, said) and "\n" not in said
    assert not (tmp_path / "rejected" / "checkpoints").exists()
