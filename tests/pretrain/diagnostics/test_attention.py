"""Measures of attention against loops over every query and key in float64, and against answers known
beforehand."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention import Heads, local_mask
from pretrain.diagnostics.attention import HEAD_MEASURES, head_sums


def sums_of(query, key, mask=None, spans=None, **options):
    return head_sums(Heads(query, key, key, mask, spans=spans), **options)


def means(query, key, **options):
    """[h, 4] means over the queries."""
    sums = sums_of(query, key, **options)
    return sums[:, :4] / sums[:, 4:]


def by_loops(query, key, scale, visible, positions, present):
    """Sums over the queries of the second half, one query, head and sequence at a time (arXiv 2606.27449, eq.
    1)."""
    B, _, heads, head_dim = query.shape
    length, kv_heads = key.shape[1], key.shape[2]
    sums = torch.zeros(heads, 5, dtype=torch.float64)
    for b in range(B):
        for i in range(heads):
            for row, t in enumerate(positions):
                # Eq. 1 counts positions from 1: floor(T/2) + 1 … T.
                if t + 1 <= length // 2 or not present[b]:
                    continue
                keys = [s for s in range(length) if visible(t, s)]
                logits = [
                    scale
                    * sum(
                        query[b, row, i, c].item() * key[b, s, i * kv_heads // heads, c].item()
                        for c in range(head_dim)
                    )
                    for s in keys
                ]
                exponentials = [math.exp(logit) for logit in logits]
                A = [e / sum(exponentials) for e in exponentials]
                mean = sum(logits) / len(logits)
                sums[i] += torch.tensor(
                    [
                        sum(a * abs(t - s) for a, s in zip(A, keys, strict=True)),
                        -sum(a * math.log(a) for a in A),
                        max(A),
                        math.sqrt(sum((logit - mean) ** 2 for logit in logits) / len(logits)),
                        1,
                    ],
                    dtype=torch.float64,
                )
    return sums


def causal(t, s):
    return s <= t


def random_heads(batch, length, heads, kv_heads, head_dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, length, heads, head_dim, generator=generator, dtype=torch.float64)
    key = torch.randn(batch, length, kv_heads, head_dim, generator=generator, dtype=torch.float64)
    return query, key


@pytest.mark.parametrize("chunk_elements", [1, 60, 1 << 22])
@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(12, 3, 3), (9, 4, 2), (7, 4, 1)])
def test_equals_loops(length, heads, kv_heads, chunk_elements):
    query, key = random_heads(2, length, heads, kv_heads, 6)
    expected = by_loops(query, key, 6**-0.5, causal, range(length), [True, True])
    found = sums_of(query, key, chunk_elements=chunk_elements)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found[0, 4] == 2 * (length - length // 2)


def test_scale_window_spans_and_absent_sequences():
    query, key = random_heads(3, 8, 2, 2, 4)
    present = [True, False, True]
    mask = local_mask(8, 3, query.device)
    expected = by_loops(query, key, 1.0, lambda t, s: t - 3 < s <= t, range(8), present)
    found = sums_of(query, key, scale=1.0, mask=mask, present=present)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    # The rows of two spans, as a rank of the query form has them; the other rank has the rest.
    whole = sums_of(query, key)
    parts = []
    for spans in ([(0, 2), (6, 8)], [(2, 4), (4, 6)]):
        rows = torch.cat([query[:, slice(*span)] for span in spans], dim=1)
        positions = [t for span in spans for t in range(*span)]
        parts.append(sums_of(rows, key, spans=spans))
        torch.testing.assert_close(parts[-1], by_loops(rows, key, 0.5, causal, positions, [True] * 3))
    torch.testing.assert_close(sum(parts), whole)


T = 64
LATE = range(T // 2, T)


def test_uniform_attention():
    found = means(torch.zeros(1, T, 2, 4), torch.randn(1, T, 2, 4))
    expected = [
        sum(t / 2 for t in LATE) / len(LATE),
        sum(math.log(t + 1) for t in LATE) / len(LATE),
        sum(1 / (t + 1) for t in LATE) / len(LATE),
        0.0,
    ]
    torch.testing.assert_close(found, torch.tensor([expected] * 2, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("back", [0, 1])
def test_to_self_or_to_the_previous_token_only(back):
    """One-hot queries and keys: the logit is 1000 at distance *back* and 0 elsewhere."""
    key = torch.eye(T)[None, :, None]
    query = 1000 * torch.roll(torch.eye(T), back, dims=0)[None, :, None]
    distance, entropy, largest, spread = means(query, key, scale=1.0)[0].tolist()
    assert (distance, largest) == (back, 1.0) and entropy == pytest.approx(0, abs=1e-4)
    # One of t + 1 logits is 1000: standard deviation 1000 sqrt(t) / (t + 1).
    assert spread == pytest.approx(sum(1000 * math.sqrt(t) / (t + 1) for t in LATE) / len(LATE), rel=1e-5)
    assert HEAD_MEASURES == ("attention_distance", "attention_entropy", "max_probability", "logit_spread")


def test_bf16_is_computed_in_fp32():
    query, key = (tensor.bfloat16() for tensor in random_heads(2, T, 2, 2, 16))
    torch.testing.assert_close(means(query, key), means(query.double(), key.double()), rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_never_all_rows_at_once():
    heads, length = 4, 512
    query, key = random_heads(2, length, heads, heads, 8)
    with Largest() as largest:
        sums_of(query, key, chunk_elements=1 << 14)
    assert largest.elements <= max(1 << 14, query.numel())
    assert largest.elements < heads * length * length / 32
