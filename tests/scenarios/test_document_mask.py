"""Whole runs with --document_mask: what the model is given, the same numbers on any ranks, resuming,
memory."""

from __future__ import annotations

import json
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model.presets import preset
from model.transformer import Transformer
from pretrain.config.command_line import parse_command_line
from pretrain.engine.ds_config import EngineSettings
from pretrain.plan.command import main as plan_main
from pretrain.plan.footprint import activations
from pretrain.prepare.assemble import Selection
from pretrain.prepare.make import make_corpus
from pretrain.prepare.sources.plain_files import PlainFiles
from pretrain.runtime.world import World
from pretrain.validation.loss import Validation
from tests.helpers.distributed import run_distributed
from tests.helpers.marks import slow
from tests.helpers.small_corpus import small_paths
from tests.helpers.training import build, curve, engine_of, interrupted, nano_run, session

BOTH = ("false", "true")
MASK = "--document_mask true"
STEPS = "--steps 3 --validation.every 3 --checkpoint.every 0"


@pytest.fixture(scope="module")
def lines_folder(small, tmp_path_factory):
    """A corpus whose documents are lines of code: a window of 64 tokens holds about five."""
    folder, files = tmp_path_factory.mktemp("lines"), []
    for path in small_paths()[:8]:
        for number, line in enumerate(path.read_text().splitlines()):
            files.append((f"{path.name}:{number}", folder / f"{path.name}.{number}"))
            files[-1][1].write_text(line)
    return make_corpus(PlainFiles("lines", files), folder / "corpus", small.tokenizer, Selection(0.2))


def recording(run):
    """Train; every (tokens, labels, offsets) that the model was given, in order."""
    given = []
    original = Transformer.forward

    def forward(self, tokens, labels=None, document_offsets=None):
        given.append((torch.is_grad_enabled(), tokens.clone(), document_offsets))
        return original(self, tokens, labels, document_offsets)

    with mock.patch.object(Transformer, "forward", forward):
        assert session(run) == ([], None)
    return given


def test_the_model_gets_the_documents_of_its_windows_and_the_order_stays(small, lines_folder, tmp_path):
    runs = [nano_run(lines_folder, tmp_path, STEPS, f"--document_mask {on} --name {on}") for on in BOTH]
    plain, masked = (run_distributed(recording, 1, run, timeout=120)[0] for run in runs)
    assert len(plain) == len(masked) == 3 * 4 + 5
    end = small.tokenizer.end_of_document
    documents = 0
    for (_, tokens, offsets), (_, same, given) in zip(plain, masked, strict=True):
        assert torch.equal(tokens, same) and offsets is None and given.dtype == torch.int32
        # This corpus ends every document with that token.
        begins = F.pad(tokens[:, :-1] == end, (1, 0), value=True)
        assert given.tolist() == [*torch.nonzero(begins.flatten()).flatten().tolist(), tokens.numel()]
        documents += len(given) - 1 - len(tokens)
    assert documents > 3 * 17 * 2  # windows do hold several


class Engine(torch.nn.Module):
    """Stands for a DeepSpeed engine: the loss is the number of documents in the batch's rows that count."""

    def forward(self, tokens, labels, offsets):
        present = (labels != -100).all(1)
        rows = torch.div(offsets[:-1], tokens.shape[1], rounding_mode="floor")
        assert offsets[-1] == tokens.numel() and set(rows.tolist()) == set(range(len(tokens)))
        return present[rows].sum() / present.sum().clamp(min=1)


def test_validation_windows_have_their_documents():
    windows = np.arange(35).reshape(5, 7)
    starts = [np.array(s) for s in ([0], [0, 3], [0, 1, 2], [0, 5], [0, 1])]
    world = World(0, 0, 1, 1, torch.device("cpu"))
    found = run_distributed(validated, 1, windows, 2, world, starts)[0]
    assert found == pytest.approx(10 / 5)


def validated(windows, micro_batch, world, starts):
    return Validation(windows, 77, micro_batch, world, starts).run(Engine()).loss


def losses(run, stage, steps=4):
    """Losses and norms of some steps of the run's own batches."""
    session = build(run, stage)
    world = session.world
    engine = engine_of(run, session.model_config, session.decisions.ds_config.value, world.grid)
    found = []
    for step in range(steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-3
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(session.batch.accumulation):
            batch = session.micro_batch(0, step * session.batch.accumulation + micro)
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            total += loss.detach().double() / session.batch.accumulation
        found += [world.sum(total).item() / world.data_parallel, float(engine.get_global_grad_norm())]
    return found


# The heads 3 and 6 of prism-nano do not divide by 2 or 4; windows in half of the layers.
SAVING = "--sequence_parallel true --activation_checkpointing true"
ARCHITECTURE = json.dumps({"context_length": 64, "positions": "learned", "local_window": [None, 9, None, 30]})


@pytest.fixture(scope="module")
def reference(lines_folder, tmp_path_factory):
    run = masked_run(lines_folder, tmp_path_factory.mktemp("runs"))
    return run_distributed(losses, 1, run, 2, timeout=120)[0]


def masked_run(folder, runs, *more):
    return nano_run(folder, runs, MASK, "--architecture", ARCHITECTURE, *more)


SLOW = [
    (1, 3, "--tensor_parallel 1"),
    (2, 2, "--tensor_parallel 2 --compile true"),
    (2, 3, f"--tensor_parallel 2 {SAVING}"),
    (4, 1, "--tensor_parallel 4"),
]
WORLDS = [(2, 1, "--tensor_parallel 2"), *slow(SLOW)]


@pytest.mark.parametrize(("world", "stage", "options"), WORLDS)
def test_the_same_numbers_on_any_ranks(reference, lines_folder, tmp_path, world, stage, options):
    run = masked_run(lines_folder, tmp_path, options)
    for found in run_distributed(losses, world, run, stage, timeout=240):
        assert found == pytest.approx(reference, rel=1e-6)  # the design's bound in fp32


def test_the_mask_changes_the_numbers(reference, lines_folder, tmp_path):
    run = nano_run(lines_folder, tmp_path, "--architecture", ARCHITECTURE)
    plain = run_distributed(losses, 1, run, 2, timeout=120)[0]
    assert abs(plain[0] - reference[0]) > 1e-4 * reference[0]


@pytest.mark.slow
def test_a_resumed_run_is_bit_identical_and_the_mask_is_fixed(lines_folder, tmp_path):
    names, settings = ("whole", "broken"), f"{MASK} --steps 8 --validation.every 4"
    whole, broken = (nano_run(lines_folder, tmp_path, settings, f"--name {name}") for name in names)
    assert run_distributed(session, 1, whole, timeout=120) == [([], None)]
    assert run_distributed(interrupted, 1, broken, 6, 1, 2, timeout=120) == ["stopped"]
    ((_, error),) = run_distributed(session, 1, broken, document_mask=False, timeout=120)
    assert "document_mask: True != False" in error and "\n" not in error
    assert run_distributed(session, 1, broken, timeout=120) == [([], None)]
    assert curve(broken.folder) == curve(whole.folder)
    assert "val_loss" in curve(whole.folder)[-1]


# ---------------------------------------------------------------------- memory


def document_bytes(model, micro_batch, element, tensor_parallel, device):
    """Bytes that a document mask adds."""
    settings = EngineSettings(bf16=element == 2, document_mask=True)
    return activations(model, micro_batch, settings, tensor_parallel, device).documents


def test_memory_of_the_mask(capsys):
    model = parse_command_line(["--model", "prism-124m"]).run.build_model_config()
    T, dims = 1024, 256 + 128 + 96 + 64
    tables = 8 * T * (8 + 4 * dims)
    assert document_bytes(model, 8, 2, 1, "cuda") == tables  # the kernel takes every layer
    assert document_bytes(model, 8, 4, 1, "cuda") == tables + 8 * T * T * 4
    assert document_bytes(model, 8, 2, 1, "cpu") == tables + 8 * T * T * 2
    assert document_bytes(model, 8, 2, 4, "cuda") == tables  # batch form
    assert document_bytes(model, 1, 2, 4, "cuda") == (tables + 8 * T * T * 2) / 8  # some layers in query form
    windows = model.replace(local_window=(256, None) * 6)
    assert document_bytes(windows, 8, 4, 1, "cuda") == tables + 2 * 8 * T * T * 4
    settings = [EngineSettings(bf16=False, document_mask=on) for on in (False, True)]
    plain, masked = (activations(windows, 8, each) for each in settings)
    assert plain.documents == 0 and masked.documents == tables + 2 * 8 * T * T * 4
    # Windowed layers no longer keep masks of their own.
    assert sum(plain.kept) - sum(masked.kept) == 6 * T * T * 4
    assert plan_main(["--model", "prism-124m", "--document_mask", "true"]) == 0
    assert "document mask" in capsys.readouterr().out


def kept_by_autograd(documents, T=64, B=8):
    """Bytes of distinct storages that a masked forward pass keeps, parameters left out."""
    config = preset("prism-nano").replace(vocab_size=300, context_length=T)
    model = Transformer(config)
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    tokens = torch.zeros(B, T, dtype=torch.int64)
    offsets = torch.arange(0, B * T + 1, T // 4, dtype=torch.int32) if documents else None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, tokens, offsets)
        assert loss.requires_grad
    return sum(size for pointer, size in storages.items() if pointer not in parameters), config


def test_the_prediction_is_what_autograd_keeps():
    """One mask, and tables for each head dim: nothing that grows with the layers or the heads."""
    masked, config = kept_by_autograd(True)
    plain, _ = kept_by_autograd(False)
    expected = document_bytes(config, 8, 4, 1, "cpu") - 8 * 8 * 64  # but for the positions
    unbatched = 64 * 4 * sum({config.layer_head_dim(layer) for layer in range(config.num_layers)})
    assert masked - plain == pytest.approx(expected - unbatched, rel=0.02)
