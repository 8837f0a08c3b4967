"""The loop itself: what it asks of the device, of the data, and that it learns."""

import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from model.initialization import initialize
from model.transformer import Transformer
from pretrain.assembly.data import open_data
from pretrain.data.sequences import TrainingSequences
from pretrain.prepare.assemble import Selection
from pretrain.prepare.make import make_corpus
from pretrain.prepare.sources.plain_files import PlainFiles, files_below
from pretrain.validation.loss import compare_baselines
from tests.helpers.distributed import run_distributed
from tests.helpers.marks import slow
from tests.helpers.training import curve, nano_run, session


def session_with_infinite_loss(run, at_call):
    """Train; the forward pass number *at_call* on rank 1 returns infinity, with gradients that look sound."""
    from model.transformer import Transformer

    original, calls = Transformer.forward, []

    def forward(self, tokens, labels=None):
        loss = original(self, tokens, labels)
        calls.append(loss)
        return loss + float("inf") if len(calls) == at_call and torch.distributed.get_rank() == 1 else loss

    with mock.patch.object(Transformer, "forward", forward):
        return session(run)


def test_an_infinite_loss_skips_the_update_even_if_gradients_are_finite(small_folder, tmp_path):
    run = nano_run(small_folder, tmp_path, "--steps 4 --validation.every 0")
    for _, error in run_distributed(session_with_infinite_loss, 2, run, 5, timeout=120):  # two passes a step
        assert error is None
    rows = curve(run.folder)
    assert [row["skipped"] for row in rows] == [0, 0, 1, 1]
    assert rows[2]["train_loss"] == float("inf") and rows[3]["train_loss"] < 10
    assert [row["tokens"] for row in rows] == [512, 1024, 1536, 2048]  # data and rate go on
    assert rows[3]["lr/base/decay"] != rows[2]["lr/base/decay"]


def session_recording_sequences(run):
    """Train, and return the numbers of the sequences this rank read."""
    numbers = []
    original = TrainingSequences.sequence

    def sequence(self, number):
        numbers.append(number)
        return original(self, number)

    with mock.patch.object(TrainingSequences, "sequence", sequence):
        assert session(run)[1] is None
    return numbers


def test_each_sequence_is_read_once_in_order(small_folder, tmp_path):
    ranks = 2
    run = nano_run(small_folder, tmp_path, "--steps 5 --validation.every 0")
    per_rank = run_distributed(session_recording_sequences, ranks, run, timeout=120)
    ahead = 2 * 2  # batches the prefetcher may have made beyond the end
    numbers = sorted(number for rank in per_rank for number in rank)
    assert numbers[:40] == list(range(40))
    assert len(numbers) <= 40 + ranks * (ahead + 2) and len(set(numbers)) == len(numbers)


LOSS_PATHS = [
    (1, 0.0, "--fused all --micro_batch 2"),
    (2, 0.01, "--fused none --micro_batch 1"),
    *slow(
        [
            (2, 0.01, "--tensor_parallel 2 --sequence_parallel true"),
            (1, 0.01, "--compile true"),
            (2, 0.01, "--precision bf16"),
        ]
    ),
]


@pytest.mark.parametrize(("ranks", "z_loss", "flags"), LOSS_PATHS)
def test_train_loss_is_the_cross_entropy_of_the_global_batch(small_folder, tmp_path, ranks, flags, z_loss):
    """And the z loss has a value of its own, whatever computes them; by torch in fp64, from the seed's
    weights."""
    flags = f"--steps 1 --validation.every 0 --architecture.z_loss {z_loss} {flags}"
    run = nano_run(small_folder, tmp_path, flags)
    assert run_distributed(session, ranks, run, timeout=120)[0] == ([], None)
    [row] = curve(run.folder)
    data = open_data(run, lambda progress: None)
    network = Transformer(run.build_model_config(**data.model_fields())).double()
    initialize(network, run.seed)
    inputs, labels = map(torch.from_numpy, data.training_sequences(64, run.seed).inputs_and_labels(0, 8))
    with torch.no_grad():
        logits = network(inputs).flatten(0, 1)
    bound = 2e-3 if "bf16" in flags else 1e-6
    assert row["train_loss"] == pytest.approx(F.cross_entropy(logits, labels.flatten()).item(), rel=bound)
    penalty = z_loss * logits.logsumexp(-1).square().mean().item()
    assert row.get("z_loss") == (pytest.approx(penalty, rel=bound) if z_loss else None)


@pytest.mark.slow
def test_curve_is_the_same_under_1_and_2_ranks_and_every_stage(small_folder, tmp_path):
    """The whole program, validation included, within the design's 1e-6 in fp32."""
    curves = {}
    for ranks, stage in ((1, 2), (2, 1), (2, 2), (2, 3)):
        run = nano_run(small_folder, tmp_path, f"--name r{ranks}z{stage} --optimizer.learning_rate 2e-4")
        assert run_distributed(session, ranks, run, stage, timeout=120)[0] == ([], None)
        curves[ranks, stage] = curve(run.folder)
    reference = curves.pop((1, 2))
    for name, rows in curves.items():
        for row, expected in zip(rows, reference, strict=True):
            assert row == pytest.approx(expected, rel=1e-6), name


@pytest.mark.slow
def test_it_learns(small_folder, tmp_path):
    settings = "--steps 250 --optimizer.learning_rate 4e-3 --validation.every 250 --schedule.minimum 0.1"
    run = nano_run(small_folder, tmp_path, settings, "--checkpoint.every 0")
    run_distributed(session, 1, run, timeout=120)
    last = curve(run.folder)[-1]
    guessing = compare_baselines(open_data(run, lambda progress: None), 64, 10).token_frequency
    assert last["val_bpb"] < 0.95 * guessing


def test_activation_checkpointing_changes_no_number(small_folder, tmp_path):
    curves = []
    for name in ("false", "true"):
        run = nano_run(small_folder, tmp_path, f"--name {name} --activation_checkpointing {name} --steps 4")
        run_distributed(session, 1, run, timeout=120)
        curves.append(curve(run.folder))
    assert curves[0] == curves[1]


def test_too_little_to_validate_on_is_refused_before_anything_is_written(small, tmp_path):
    """The training split is long enough, the held-out one is not."""
    tokenizer = small.tokenizer
    for number in range(50):
        (tmp_path / f"{number:02}.txt").write_text(f"{'word ' * 6}{number}")
    source = PlainFiles("text", files_below(tmp_path))
    data = make_corpus(source, tmp_path / "data", tokenizer, Selection(validation_fraction=1e-9))
    run = nano_run(data, tmp_path / "runs")
    ((_, error),) = run_distributed(session, 1, run, timeout=120)
    assert re.search(r"data: data/validation has \d+ tokens, fewer than one window of 65", error)
    assert not run.folder.exists()


@pytest.mark.slow
def test_a_streak_of_skipped_updates_costs_no_good_checkpoint(small_folder, tmp_path):
    """The rate explodes after a sound checkpoint; a restart with a sane one goes on from that."""
    settings = "--steps 40 --checkpoint.every 4 --validation.every 0 --max_skipped_steps 10"
    run = nano_run(small_folder, tmp_path, settings, "--optimizer.gradient_clipping 0")
    error = run_distributed(session_that_explodes, 1, run, 5, timeout=120)[0][1]
    assert error is not None and "10 updates in a row were skipped" in error
    assert "4] are kept" in error
    kept = sorted(path.name for path in (run.folder / "checkpoints").glob("step_*"))
    assert kept == ["step_000004"]
    assert run_distributed(session, 1, run, timeout=120)[0][1] is None
    rows = curve(run.folder)
    assert [row["step"] for row in rows] == list(range(1, 41)) and rows[-1]["skipped"] == 0


def session_that_explodes(run, at_step):
    """Train; from *at_step* on every loss is infinite, as with weights that are beyond repair."""
    from model.transformer import Transformer

    original, calls = Transformer.forward, []

    def forward(self, tokens, labels=None):
        loss = original(self, tokens, labels)
        calls.append(loss)
        return loss * float("inf") if len(calls) > 4 * at_step else loss  # four passes a step

    with mock.patch.object(Transformer, "forward", forward):
        return session(run)
