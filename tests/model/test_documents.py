"""Packed documents with a mask against each document run by itself, in fp64; the kernel's offsets against the
mask."""

from __future__ import annotations

import contextlib
import inspect
from unittest import mock

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from model import documents
from model.blocks import block
from model.documents import PackedDocuments, extend_offsets, select_rows
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import GPU, needs_gpus
from tests.helpers.marks import slow
from tests.model.parallel import build, compared, example, relative, shared_grid, whole_of

TOLERANCE = 1e-12
SHAPE = {"vocab_size": 260, "context_length": 24, "ffn_width": 48, "d_model": 48}
# Every head count its own head dim and, at t > 1, its own way of being shared; grouped queries; windows that
# end inside documents and beyond them; no scale; learned positions.
GROUPED = block("llama", **SHAPE, heads=(3, 4, 6, 2, 1), kv_heads=(3, 2, 3, 2, 1), tie_embeddings=False)
WINDOWS = block("gptneo", **SHAPE, heads=(3, 4, 6, 2, 1), local_window=(5, None, 1, 9, 3))
ROPE_WINDOWS = block("llama", **SHAPE, heads=(4, 2), local_window=(4, 30), attention_scale="none")
# Rows of 24: a token alone, neighbours alone, a row that is one document, ends at every kind of place.
LENGTHS = [[1, 7, 11, 5], [24], [12, 12], [3, 1, 1, 19], [23, 1], [6] * 4, [9, 2, 13], [1] * 24]


@pytest.fixture(autouse=True)
def one_thread():
    """These tensors are too small to share, and threads that wait for each other are slow on a busy
    machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def offsets(rows):
    """The documents' lengths, row by row -> what the model takes."""
    lengths = torch.tensor([length for row in rows for length in row])
    return F.pad(lengths.cumsum(0), (1, 0)).int()


def one_by_one(model, tokens, labels, rows):
    """Logits [B, T, V] and mean loss of the documents run by themselves, each as a batch of one from position
    0."""
    logits = []
    for row, lengths in zip(tokens, rows, strict=True):
        logits.append(torch.cat([model(part[None])[0] for part in row.split(lengths)]))
    stacked = torch.stack(logits)
    return stacked, F.cross_entropy(stacked.flatten(0, 1), labels.flatten(), ignore_index=-100)


def reference_of(config, rows):
    """What the documents one by one give at t = 1, with the example that gives it."""
    tokens, labels = example(config, len(rows), sum(rows[0]))
    model = build(config, torch.float64)
    return whole_of(model, *one_by_one(model, tokens, labels, rows)), tokens, labels


def worst(found):
    return max((value, name) for name, value in found.items())


CONFIGS = {"grouped": GROUPED, "windows": WINDOWS, "rope_windows": ROPE_WINDOWS}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.mark.parametrize("checkpointing", [False, True])
@configs
def test_a_packed_window_equals_each_document_by_itself(config, checkpointing):
    model = build(config, torch.float64, checkpoint_activations=checkpointing)
    expected, *given = reference_of(config, LENGTHS)
    found = worst(compared(model, expected, *given, offsets(LENGTHS)))
    assert found[0] <= TOLERANCE, found
    with torch.no_grad():
        assert relative(model(given[0]), expected.logits) > 1e-3  # the mask is about something


def test_shorter_rows_and_empty_documents():
    model = build(WINDOWS, torch.float64)
    tokens, labels = example(WINDOWS, 2, 17)
    rows = [[4, 13], [17]]
    expected = one_by_one(model, tokens, labels, rows)[0]
    with_empty = torch.tensor([0, 4, 4, 4, 17, 17, 34, 34]).int()
    assert relative(model(tokens, None, offsets(rows)), expected) <= TOLERANCE
    assert torch.equal(model(tokens, None, with_empty), model(tokens, None, offsets(rows)))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_rows_longer_than_a_kernels_block_of_keys(dtype, tolerance):
    """Whole blocks are hidden from a query then; the tolerances are a few roundings of each dtype."""
    config = block("llama", **{**SHAPE, "context_length": 1200}, heads=(3, 6), kv_heads=(3, 2))
    rows = [[1, 560, 1, 638], [1200]]
    model = build(config, dtype)
    tokens, labels = example(config, 2, 1200)
    with torch.no_grad():
        expected = one_by_one(model, tokens, labels, rows)[0]
        assert relative(model(tokens, None, offsets(rows)).float(), expected.float()) <= tolerance
    model(tokens, labels, offsets(rows)).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_positions_and_mask_by_hand():
    packed = PackedDocuments(offsets([[2, 3], [5]]), 2, 5, torch.float32)
    assert packed.positions.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    seen = (packed.mask(None) == 0).int()
    assert packed.mask(None).shape == (2, 1, 5, 5)
    assert set(packed.mask(None).unique().tolist()) == {-float("inf"), 0}
    triangles = [torch.ones(size, size).tril() for size in (2, 3)]
    assert torch.equal(seen[0, 0], torch.block_diag(*triangles).int())
    assert torch.equal(seen[1, 0], torch.ones(5, 5).tril().int())
    assert (packed.mask(2) == 0).int()[0, 0].tolist()[4] == [0, 0, 0, 1, 1]
    assert packed.mask(5) is packed.mask(None) and packed.mask(2) is packed.mask(2)  # made once


def test_offsets_of_some_rows_and_of_widened_ones():
    whole = offsets([[2, 3], [5], [1, 4]])
    assert select_rows(whole, 1, 3, 5).tolist() == [0, 0, 0, 5, 6, 10]
    assert extend_offsets(whole, 5, 2).tolist() == [0, 2, 7, 14, 15, 21]


def test_masks_are_made_once_a_micro_batch(monkeypatch):
    made = []
    original = torch.full
    monkeypatch.setattr(torch, "full", lambda *a, **k: made.append(a[0]) or original(*a, **k))
    tokens, labels = example(WINDOWS, 2, 24)
    build(WINDOWS, torch.float64)(tokens, labels, offsets([[24], [3, 21]])).backward()
    assert made == [(2, 24, 24)] * 5  # WINDOWS has five windows, each with a mask of B T² elements
    made.clear()
    build(GROUPED, torch.float64)(tokens, labels, offsets([[24], [3, 21]])).backward()
    assert made == [(2, 24, 24)]


# ---------------------------------------------------------------------- the kernel for offsets


def reference_varlen(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """varlen_attn of torch 2.13 by its documentation: [tokens, heads, d_h], one softmax a document."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and window_size[1] == 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    result = []
    for start, stop in zip(cu_q.tolist()[:-1], cu_q.tolist()[1:], strict=True):
        assert stop - start <= max_q == max_k
        q = query[start:stop]
        k, v = (x[start:stop].repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        logits = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        hidden = (distance < 0) | ((distance > window_size[0]) if window_size[0] >= 0 else False)
        result.append(torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(result)


@contextlib.contextmanager
def kernel(stands_for):
    """The model with that varlen_attn, on a device that has it; the shapes of its queries."""
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments[0].shape)
        return stands_for(*arguments, **options)

    with (
        mock.patch("model.documents.varlen_attn", counted, create=True),
        mock.patch("model.attention.has_varlen_kernel", return_value=True),
    ):
        yield calls


@pytest.fixture
def reference_kernel():
    with kernel(reference_varlen) as calls:
        yield calls


def test_the_installed_torch_has_the_kernel():
    assert (torch.version.cuda is not None) == documents.HAS_VARLEN
    taken = [name.replace("seq_", "") for name in inspect.signature(varlen_attn).parameters]
    ours = list(inspect.signature(reference_varlen).parameters)
    assert taken[:7] == ours[:7] and set(ours) <= set(taken)


@configs
def test_offsets_give_what_the_mask_gives(config, reference_kernel):
    expected, *given = reference_of(config, LENGTHS)
    assert not reference_kernel  # without documents nothing changes
    found = worst(compared(build(config, torch.float64), expected, *given, offsets(LENGTHS)))
    assert len(reference_kernel) == 2 * config.num_layers and found[0] <= TOLERANCE, found


def traceable_varlen(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """varlen_attn for heads of every query, without reading the offsets on the host."""
    tokens = torch.arange(query.shape[0])
    document = torch.searchsorted(cu_q, tokens, right=True)
    seen = (document[:, None] == document) & (tokens[:, None] >= tokens)
    heads = (x.transpose(0, 1)[None] for x in (query, key, value))
    return F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale)[0].transpose(0, 1)


@pytest.mark.slow
def test_a_graph_serves_every_number_of_documents(monkeypatch):
    monkeypatch.setattr("model.documents.varlen_attn", traceable_varlen, raising=False)
    monkeypatch.setattr("model.attention.has_varlen_kernel", lambda hidden, head_dim: True)
    model = build(block("llama", **SHAPE, heads=(4, 4)), torch.float64)
    counter = torch._dynamo.testing.CompileCounter()
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)
    for rows in ([[24], [12, 12]], LENGTHS[:2], [[1] * 24, [9, 2, 13]], [[24], [24]]):
        tokens, labels = example(model.config, 2, 24)
        found = model(tokens, labels, offsets(rows))
        found.backward()
        expected = one_by_one(build(model.config, torch.float64), tokens, labels, rows)[1]
        assert relative(found, expected) <= TOLERANCE
    assert counter.frame_count == 1


@needs_gpus(1)
@configs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(config, dtype):
    """bf16 takes the kernel in layers whose head dim it has.

    Rounding to bf16 alone moves the largest logit by up to 3e-2, so what counts is how much further from fp64
    on the CPU the packed documents are than the same documents one by one; a forgotten mask is five times as
    far at least.
    """
    model = build(config, dtype).to(GPU)
    tokens, labels = example(config, len(LENGTHS), 24)
    loss = model(tokens.to(GPU), labels.to(GPU), offsets(LENGTHS).to(GPU))
    loss.backward()
    with torch.no_grad():
        exact, _ = one_by_one(build(config, torch.float64), tokens, labels, LENGTHS)
        alone, _ = one_by_one(model, tokens.to(GPU), labels.to(GPU), LENGTHS)
        found = model(tokens.to(GPU), None, offsets(LENGTHS).to(GPU))
    rounding = relative(alone.double().cpu(), exact)
    assert rounding <= (1e-4 if dtype == torch.float32 else 1e-1)
    assert relative(found.double().cpu(), exact) <= (1e-4 if dtype == torch.float32 else 2 * rounding)
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


# ---------------------------------------------------------------------- tensor parallelism


def parallel_differences(config, rows, reference, offsets_too=False, **options):
    """On every rank: largest differences of the packed model from *reference*."""
    expected, *given = reference
    grid = shared_grid(options.pop("sequence_parallel", False))
    model = build(config, torch.float64, grid, **options)
    result = compared(model, expected, *given, offsets(rows))
    if offsets_too:
        with kernel(reference_varlen):
            again = compared(model, expected, *given, offsets(rows))
        result |= {f"{name} with the kernel": value for name, value in again.items()}
    return result


def many_parallel_differences(cases):
    return [parallel_differences(*case, **options) for *case, options in cases]


def assert_same_on_ranks(tensor_parallel, cases):
    given = [(config, rows, reference_of(config, rows), options) for config, rows, options in cases]
    for results in zip(*run_distributed(many_parallel_differences, tensor_parallel, given), strict=True):
        found = max(map(worst, results))
        assert found[0] <= TOLERANCE, found


@pytest.mark.parametrize("tensor_parallel", [2, *slow([3, 4])])
def test_real_ranks_equal_documents_one_by_one(tensor_parallel):
    """Batch form (as many rows as ranks), query form (one row), both with the kernel's offsets where it may
    run."""
    rows = LENGTHS[:tensor_parallel]
    cases = [
        (GROUPED, rows, {"offsets_too": True}),
        (GROUPED, LENGTHS[3:4], {"offsets_too": True}),
        (WINDOWS, rows, {"checkpoint_activations": True}),
        (WINDOWS, LENGTHS[6:7], {}),
        (ROPE_WINDOWS, LENGTHS[:1], {}),
    ]
    assert_same_on_ranks(tensor_parallel, cases)


@pytest.mark.parametrize("tensor_parallel", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sequence_parallel_ranks_equal_documents_one_by_one(tensor_parallel):
    gpt2 = block("gpt2", **SHAPE, heads=(3, 4))
    cases = [
        (GROUPED, LENGTHS[:4], {"sequence_parallel": True}),
        (gpt2, LENGTHS[:4], {"sequence_parallel": True}),
        (WINDOWS, LENGTHS[3:4], {"sequence_parallel": True, "checkpoint_activations": True}),
        # An odd number of positions: rows are padded, and their documents with them.
        (WINDOWS, [[23], [3, 20], [1, 1, 21], [11, 12]], {"sequence_parallel": True}),
    ]
    assert_same_on_ranks(tensor_parallel, cases)
