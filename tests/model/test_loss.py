import pytest
import torch
import torch.nn.functional as F

from model import loss
from model.loss import cross_entropy

VOCABULARY, COLUMNS = 100, 128


def example(dtype, ignored=5):
    torch.manual_seed(0)
    logits = (torch.randn(4, 9, COLUMNS, dtype=torch.float64) * 5).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (4, 9))
    labels.view(-1)[:ignored] = -100
    return logits, labels


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_rows", [1, 7, 36])
def test_loss_and_gradient_against_torch_in_fp64(dtype, chunk_rows, monkeypatch):
    monkeypatch.setitem(loss.CHUNK_ELEMENTS, "cpu", chunk_rows * COLUMNS)
    logits, labels = example(dtype)
    result = cross_entropy(logits, labels, VOCABULARY)
    (3 * result).backward()

    reference = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(reference[..., :VOCABULARY].flatten(0, 1), labels.flatten())
    (3 * expected).backward()
    # The loss is exact to fp32 whatever the dtype of the logits; the gradient is rounded to that dtype once.
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert result.item() == pytest.approx(expected.item(), rel=1e-13 if dtype == torch.float64 else 1e-6)
    assert logits.grad.dtype == dtype
    relative = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(logits.grad.double(), reference.grad, rtol=relative, atol=1e-9)


def test_padded_columns_take_no_part():
    logits, labels = example(torch.float32)
    before = cross_entropy(logits, labels, VOCABULARY)
    before.backward()
    assert torch.count_nonzero(logits.grad[..., VOCABULARY:]) == 0
    with torch.no_grad():
        logits[..., VOCABULARY:] = 1e30
    assert torch.equal(cross_entropy(logits, labels, VOCABULARY), before)


def test_ignored_tokens_have_no_gradient_and_a_batch_of_them_has_loss_zero():
    logits, labels = example(torch.float32)
    cross_entropy(logits, labels, VOCABULARY).backward()
    assert torch.count_nonzero(logits.grad.flatten(0, 1)[:5]) == 0
    logits, labels = example(torch.float32, ignored=36)
    result = cross_entropy(logits, labels, VOCABULARY)
    result.backward()
    assert result.item() == 0 and torch.count_nonzero(logits.grad) == 0


def test_a_non_finite_logit_shows_in_the_loss():
    logits, labels = example(torch.float32)
    with torch.no_grad():
        logits[3, 3, 3] = float("nan")
    assert cross_entropy(logits, labels, VOCABULARY).isnan()
