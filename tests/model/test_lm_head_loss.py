"""The LM head fused with the loss, against torch's own formulas in fp64 and against the unfused path."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from model import lm_head_loss
from model.initialization import initialize
from model.lm_head_loss import lm_head_cross_entropy, loss_and_residual, token_chunks, token_products
from model.loss import cross_entropy
from model.presets import preset
from model.transformer import Transformer

VOCABULARY, COLUMNS, WIDTH = 100, 128, 24
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def compiled_form(logits, targets, vocab_size, wanted, *terms):
    return lm_head_loss._compute_in_one_kernel(logits, targets, vocab_size, wanted, *terms)


TERMS = [(None, 0.0), (2.5, 0.0), (None, 0.3), (2.5, 0.3)]


@pytest.mark.parametrize("step", [loss_and_residual, compiled_form])
@pytest.mark.parametrize(("softcap", "z_loss"), TERMS)
def test_softcap_and_z_loss_fused_or_not_against_torch_in_fp64(softcap, z_loss, step, monkeypatch):
    monkeypatch.setitem(lm_head_loss.CHUNK_ELEMENTS, "cpu", 7 * COLUMNS)
    hidden, weight, labels = example(torch.float64)
    logits = F.linear(hidden, weight)[..., :VOCABULARY]
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    counted = logits[labels != -100]
    entropy = F.cross_entropy(counted, labels[labels != -100])
    penalty = z_loss * counted.logsumexp(-1).square().mean()
    expected = entropy + penalty
    gradients = torch.autograd.grad(expected, (hidden, weight))
    reported = []
    terms = (softcap, z_loss, lambda both: reported.append(both.tolist()))
    unfused = cross_entropy(F.linear(hidden, weight), labels, VOCABULARY, *terms)
    for found in (lm_head_cross_entropy(hidden, weight, labels, VOCABULARY, step, *terms), unfused):
        assert found.item() == pytest.approx(expected.item(), rel=1e-13)
        for mine, reference in zip(torch.autograd.grad(found, (hidden, weight)), gradients, strict=True):
            assert relative(mine, reference) <= 1e-13
    parts = [pytest.approx([entropy.item(), penalty.item()], rel=1e-13)]
    assert reported == (2 * parts if z_loss else [])


def example(dtype, ignored=5):
    torch.manual_seed(0)
    hidden = (torch.randn(4, 9, WIDTH, dtype=torch.float64) * 3).to(dtype).requires_grad_()
    weight = torch.randn(COLUMNS, WIDTH, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (4, 9))
    labels.view(-1)[:ignored] = -100
    return hidden, weight, labels


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("step", [loss_and_residual, compiled_form])
@pytest.mark.parametrize(("chunk_rows", "product_tokens"), [(1, 0), (1, 5), (7, 0), (7, 14), (36, 36)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradients_against_torch_in_fp64(dtype, chunk_rows, product_tokens, step, monkeypatch):
    monkeypatch.setitem(lm_head_loss.CHUNK_ELEMENTS, "cpu", chunk_rows * COLUMNS)
    monkeypatch.setitem(lm_head_loss.PRODUCT_TOKENS, "cpu", product_tokens)
    hidden, weight, labels = example(dtype)
    result = lm_head_cross_entropy(hidden, weight, labels, VOCABULARY, step)
    (3 * result).backward()

    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits = F.linear(*wide)
    if dtype == torch.bfloat16:  # the logits are rounded once; what follows is in fp32
        logits = logits + (logits.detach().bfloat16().double() - logits.detach())
    expected = F.cross_entropy(logits[..., :VOCABULARY].flatten(0, 1), labels.flatten())
    (3 * expected).backward()
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert result.item() == pytest.approx(expected.item(), rel=1e-13 if dtype == torch.float64 else 1e-6)
    bound = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    for tensor, reference in zip((hidden, weight), wide, strict=True):
        assert tensor.grad.dtype == dtype
        assert relative(tensor.grad, reference.grad) <= bound
    assert torch.count_nonzero(hidden.grad.flatten(0, 1)[:5]) == 0, "ignored tokens"
    assert torch.count_nonzero(weight.grad[VOCABULARY:]) == 0, "padded rows"


@pytest.mark.parametrize("step", [loss_and_residual, compiled_form])
def test_without_gradients_the_loss_is_the_same(step):
    hidden, weight, labels = example(torch.float32)
    expected = lm_head_cross_entropy(hidden, weight, labels, VOCABULARY, step)
    with torch.no_grad():
        found = lm_head_cross_entropy(hidden, weight, labels, VOCABULARY, step)
    assert not found.requires_grad and found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_extreme_logits_and_a_batch_without_labels():
    hidden = torch.tensor([[200.0, -300.0]]).requires_grad_()
    weight = torch.eye(2).requires_grad_()
    assert lm_head_cross_entropy(hidden, weight, torch.tensor([1]), 2).item() == 500
    ignored = lm_head_cross_entropy(hidden, weight, torch.tensor([-100]), 2)
    ignored.backward()
    assert ignored.item() == 0 and not hidden.grad.any() and not weight.grad.any()
    with torch.no_grad():
        hidden[0, 0] = float("nan")
    assert lm_head_cross_entropy(hidden, weight, torch.tensor([1]), 2).isnan()


def test_chunks_cover_the_tokens_and_are_nearly_equal(monkeypatch):
    monkeypatch.setitem(lm_head_loss.CHUNK_ELEMENTS, "cpu", 1000)
    for tokens in (1, 9, 10, 11, 100, 101):
        chunks = token_chunks(tokens, 100, "cpu")
        covered = [token for rows in chunks for token in range(tokens)[rows]]
        assert covered == list(range(tokens))
        sizes = [rows.stop - rows.start for rows in chunks]
        assert max(sizes) <= 10 and len(chunks) == -(-tokens // 10)
        assert len(set(sizes[:-1])) <= 1, "only the last may need a graph of its own"
    assert len(token_chunks(3, 5000, "cpu")) == 3


def test_products_take_as_many_whole_chunks_as_they_may(monkeypatch):
    monkeypatch.setitem(lm_head_loss.CHUNK_ELEMENTS, "cpu", 1000)
    for most, together in ((0, 1), (19, 1), (20, 2), (29, 2), (100, 10)):
        monkeypatch.setitem(lm_head_loss.PRODUCT_TOKENS, "cpu", most)
        products = token_products(55, 100, "cpu")
        assert [chunk for chunks in products for chunk in chunks] == token_chunks(55, 100, "cpu")
        assert {len(chunks) for chunks in products[:-1]} <= {together} and len(products[-1]) <= together


def test_hooks_are_called_in_evaluation_though_everything_is_fused():
    """tests/model/test_transformer.py has the numbers."""
    network, calls = Transformer(preset("prism-nano"), fused="all"), []
    initialize(network, 1)
    tokens = torch.randint(0, 260, (3, 32))
    network.layers[0].attention.q.register_forward_hook(lambda *_: calls.append(1))
    network(tokens)
    assert not calls
    network.eval()(tokens)
    assert calls


def test_the_logits_of_all_tokens_never_exist(monkeypatch):
    monkeypatch.setitem(lm_head_loss.CHUNK_ELEMENTS, "cpu", 4 * COLUMNS)
    monkeypatch.setitem(lm_head_loss.PRODUCT_TOKENS, "cpu", 11)
    largest = together = 0

    def watch(logits, targets, vocab_size, wanted):
        nonlocal largest, together
        largest, together = max(largest, logits.numel()), max(together, logits._base.numel())
        return loss_and_residual(logits, targets, vocab_size, wanted)

    hidden, weight, labels = example(torch.float32)
    saved = 0

    def pack(tensor):
        nonlocal saved
        saved += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        lm_head_cross_entropy(hidden, weight, labels, VOCABULARY, watch)
    assert largest == 4 * COLUMNS and together == 2 * largest
    assert saved == hidden.numel() + weight.numel() + labels.numel() + 1
