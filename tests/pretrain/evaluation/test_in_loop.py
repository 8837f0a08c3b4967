"""Zero-shot scores while training: the numbers of the training do not know of them, and they are the
command's."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from model.process_grid import start_grid
from pretrain import convert
from pretrain.evaluation import command as evaluation
from pretrain.metrics.file import read_metrics
from pretrain.runtime.world import World
from tests.helpers.distributed import run_distributed
from tests.helpers.items import write_data_sets
from tests.helpers.launch import launch
from tests.helpers.marks import slow
from tests.helpers.training import curve, nano_arguments, nano_run, session

pytest.importorskip("lm_eval")

FIGURES = {f"evaluation/{task}/{metric}" for task in ("piqa", "arc_easy") for metric in ("acc", "acc_norm")}
# A context that the items fit in; one sequence a micro-batch makes many batches of few items.
CONTEXT = ["--architecture.context_length", "128", "--micro_batch", "1", "--global_batch_tokens", "512"]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return write_data_sets(tmp_path_factory.mktemp("data_sets"))


def evaluating(data_dir, every=4, tasks="piqa,arc_easy"):
    flags = f"--evaluation.every {every} --evaluation.tasks {tasks} --evaluation.limit 11"
    return [*flags.split(), "--evaluation.data_dir", str(data_dir)]


def without_scores(rows):
    return [{key: value for key, value in row.items() if not key.startswith("evaluation/")} for row in rows]


WORLDS = [
    (2, 3, "--activation_checkpointing true"),
    (4, 2, "--tensor_parallel 4 --micro_batch 4 --sequence_parallel true"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stage", "more"), WORLDS)
def test_curves_are_bit_identical_with_and_without(small_folder, data_dir, tmp_path, ranks, stage, more):
    """Also where the last evaluation was before a checkpoint, and with scores between two steps of any
    kind."""
    common = [*CONTEXT, *more.split(), "--evaluation.limit", "5"]
    plain = nano_run(small_folder, tmp_path, *common, "--name", "plain")
    scored = nano_run(small_folder, tmp_path, *evaluating(data_dir), *common, "--name", "scored")
    for run in (plain, scored):
        assert run_distributed(session, ranks, run, stage, timeout=300) == [([], None)] * ranks
    rows = curve(scored.folder)
    assert without_scores(rows) == curve(plain.folder)
    found = {row["step"]: {key for key in row if key.startswith("evaluation/")} for row in rows}
    due = {step for step in found if step % 4 == 0 or step == len(rows)}
    assert {step for step, keys in found.items() if keys} == due
    assert all(found[step] == FIGURES for step in due)


@pytest.mark.slow
@pytest.mark.parametrize("degree", ["--context_parallel 1", "--context_parallel 2"])
def test_scores_equal_the_commands_on_the_checkpoint_of_the_step(
    small_folder, data_dir, tmp_path, capsys, degree
):
    """Two ranks of ZeRO-3 against one process that reads their checkpoint; 1e-5 for the order of sums."""
    tasks = "piqa,arc_easy,wikitext"
    scored = evaluating(data_dir, 8, tasks)
    run = nano_run(small_folder, tmp_path, *CONTEXT, *scored, *degree.split(), "--checkpoint.every", "8")
    assert run_distributed(session, 2, run, 3, timeout=300) == [([], None)] * 2
    rows = {row["step"]: row for row in read_metrics(run.folder)}
    for step in (8, 12):
        out = tmp_path / f"{step}.json"
        flags = f"--tasks {tasks} --limit 11 --step {step}".split()
        places = [str(run.folder), "--data_dir", str(data_dir), "--out", str(out)]
        assert evaluation.main([*places, *flags]) == 0
        expected = json.loads(out.read_text())["scores"]
        parts = [(key.partition("/"), value) for key, value in rows[step].items()]
        found = {name: value for (kind, _, name), value in parts if kind == "evaluation"}
        assert found == pytest.approx(expected, rel=1e-5) and len(found) == 7
    # The model card has the scores of its own step.
    assert convert.main([str(run.folder), "--out", str(tmp_path / "hf")]) == 0
    assert (
        f"| evaluation/piqa/acc | {rows[12]['evaluation/piqa/acc']:.5g} |"
        in (tmp_path / "hf/README.md").read_text()
    )


def count_passes(tensor_parallel, requests, batch_rows):
    """Score requests of 5 tokens with a model whose pass is collective; passes made, results, and truth."""
    from pretrain.data.tokenizer import SentencePieceTokenizer
    from pretrain.evaluation.language_model import ZeroShotModel

    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, rank, size, size, torch.device("cpu"), start_grid(tensor_parallel))
    table = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    shapes = []

    def logits_of(tokens):
        shapes.append(tuple(tokens.shape))
        everyone = torch.ones(())
        dist.all_reduce(everyone)  # waits for ever if a rank makes one pass less
        assert everyone == size
        same = [torch.empty_like(tokens) for _ in range(tensor_parallel)]
        if tensor_parallel > 1:  # the parts of one model see the same tokens
            dist.all_gather(same, tokens, group=world.grid.tensor_group)
            assert all(torch.equal(part, tokens) for part in same)
        return table[tokens]

    tokenizer = SentencePieceTokenizer.train(["some text, " * 200 + "with other pieces"], 280)
    model = ZeroShotModel(logits_of, tokenizer, 16, world, 4 * batch_rows)
    ids = torch.randint(0, 280, (requests, 5), generator=torch.Generator().manual_seed(1)).tolist()
    found = model._loglikelihood_tokens([(None, row[:3], row[3:]) for row in ids])
    scores = table.double().log_softmax(-1)
    truth = [float(scores[row[2], row[3]] + scores[row[3], row[4]]) for row in ids]
    return len(shapes), [score for score, _ in found], truth


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "requests"), [(2, 1, 1), (2, 1, 5), (2, 1, 8), *slow([(4, 2, 5)])]
)
def test_uneven_shares_make_as_many_passes_on_every_rank(ranks, tensor_parallel, requests):
    """Batches of two over two copies of the model: 1 to 5 batches, so that a rank is often left without
    one."""
    results = run_distributed(count_passes, ranks, tensor_parallel, requests, 2)
    batches = -(-requests // 2)
    assert {passes for passes, _, _ in results} == {-(-batches // 2)}
    for _, found, truth in results:
        assert found == pytest.approx(truth, rel=1e-5)


@pytest.mark.slow  # importing lm-eval takes longer than the rest of it
def test_bad_input_is_refused_on_every_rank_before_anything_is_written(small_folder, data_dir, tmp_path):
    run = nano_run(small_folder, tmp_path, *evaluating(data_dir), "--evaluation.tasks helaswag")
    for notes, error in run_distributed(session, 2, run, 2, timeout=120):
        assert notes == [] and "evaluation.tasks: 'helaswag' is unknown; did you mean 'hellaswag'?" in error
    run = nano_run(small_folder, tmp_path, *evaluating(data_dir, tasks="winogrande"))
    for _, error in run_distributed(session, 2, run, 2, timeout=120):
        assert "evaluation.data_dir: no data set in" in error and "winogrande_xl" in error
    assert not run.folder.exists()


@pytest.mark.slow
def test_a_changed_evaluation_is_no_obstacle_to_a_resume(small_folder, data_dir, tmp_path):
    run = nano_run(small_folder, tmp_path, *CONTEXT, "--steps", "4")
    assert run_distributed(session, 1, run, 2, timeout=120) == [([], None)]
    longer = nano_run(small_folder, tmp_path, *CONTEXT, *evaluating(data_dir, 6), "--steps", "6")
    [(notes, error)] = run_distributed(session, 1, longer, 2, timeout=120)
    assert error is None and not any("evaluation" in note for note in notes)
    assert read_metrics(run.folder)[-1].keys() >= FIGURES


@pytest.mark.slow
def test_the_program_shows_scores(small_folder, data_dir, tmp_path):
    arguments = nano_arguments(small_folder, tmp_path, *CONTEXT, "--ds_config ds_configs/zero2.json")
    finished = launch([*arguments, *evaluating(data_dir)], 2)
    assert finished.returncode == 0, finished.output
    assert finished.output.count("scores   step 8: ") == 1 and "piqa/acc 0." in finished.output
    assert "it/s" not in finished.output  # lm-eval's progress bars


@pytest.mark.slow
def test_answers_that_do_not_fit_end_no_training(small_folder, data_dir, tmp_path):
    short = ["--architecture.context_length 4 --global_batch_tokens 64", "--ds_config ds_configs/zero2.json"]
    arguments = nano_arguments(small_folder, tmp_path, *short)
    finished = launch([*arguments, *evaluating(data_dir, tasks="piqa")], 2)
    assert finished.returncode == 0, finished.output
    assert "scores of step 4 are left out (tasks: an answer of " in finished.output
    assert not [key for row in read_metrics(tmp_path / "nano") for key in row if key in FIGURES]
