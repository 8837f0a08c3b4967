"""Measures attention rows chunk by chunk, so that B·h·T·T numbers are never in memory at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from model.attention import Heads
from model.exchange import Span

HEAD_MEASURES = ("attention_distance", "attention_entropy", "max_probability", "logit_spread")
"""Measures per head; ``head_sums`` defines them."""
CHUNK_ELEMENTS = 1 << 22  # of one temporary: 16 MiB in fp32, of which a chunk needs about five


def head_sums(
    found: Heads,
    *,
    scale: float | None = None,
    present: Sequence[bool] | None = None,
    window: int | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Sum each head's attention measures over the queries of the second half of each sequence.

    With A the causal softmax over the keys s that query t sees, l its logits and T the sequence's length, for
    the 0-based positions t >= floor(T/2) (the Prism paper's floor(T/2) + 1 … T counts from 1):

    - attention_distance: sum_s A[t, s] |t - s| (arXiv 2606.27449, eq. 1), in tokens;
    - attention_entropy: - sum_s A[t, s] ln A[t, s], in nats (ln of the number of visible keys when uniform);
    - max_probability: max_s A[t, s];
    - logit_spread: standard deviation of l[t, s] over the visible keys, after the attention scale.

    Computed in fp32 (fp64 for fp64 inputs), summed in fp64. Memory: a few temporaries of *chunk_elements*, or
    of one row of all heads where that is more.

    Args:
        found: queries and keys as the model attends with them; of a mask, that of a window, [T, T].
        scale: factor on the logits; None is 1/sqrt(d_h).
        present: which sequences count; None is all.
        window: how many positions a query sees, its own included, where the mask does not say so; None is
            all.

    Returns:
        fp64 [h, 5]: the four sums in the order of HEAD_MEASURES, and the number of queries.
    """
    query, key, mask, spans = found.query, found.key, found.mask, found.spans
    B, _, heads, head_dim = query.shape
    length, kv_heads = key.shape[1], key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = head_dim**-0.5 if scale is None else scale
    device = query.device
    spans = spans or [(0, length)]
    positions = torch.cat([torch.arange(*span, device=device) for span in spans])
    counted = torch.cat([torch.arange(*rows, device=device) for rows in _rows_from(length // 2, spans)])
    size = max(1, chunk_elements // (heads * length))
    sums = torch.zeros(heads, 5, dtype=torch.float64, device=device)
    for sequence in range(B):
        if present is not None and not present[sequence]:
            continue
        keys = key[sequence].to(wide).permute(1, 2, 0)  # [kv, d_h, T]
        for rows in counted.split(size):
            at = positions[rows]
            queries = query[sequence, rows].to(wide).transpose(0, 1)  # [h, rows, d_h]
            grouped = queries.reshape(kv_heads, -1, head_dim)  # [kv, (h / kv) rows, d_h]
            logits = torch.bmm(grouped, keys).view(heads, len(rows), length).mul_(factor)
            columns = torch.arange(length, device=device)
            behind = at[:, None] - columns  # [rows, T]
            seen = behind >= 0 if mask is None else mask[at]
            if mask is None and window is not None:
                seen &= behind < window
            distance = behind.abs().to(wide)
            sums += _chunk(logits, seen, distance)
    return sums


def _rows_from(position: int, spans: Sequence[Span]) -> Iterator[Span]:
    """Of each span of positions, the rows from *position* on."""
    row = 0
    for start, stop in spans:
        end = row + stop - start
        yield min(row + max(0, position - start), end), end
        row = end


def _chunk(logits: Tensor, seen: Tensor, distance: Tensor) -> Tensor:
    """[h, rows, T] logits, [rows, T] what is seen and how far it is -> fp64 [h, 5]. Overwrites the logits."""
    probabilities = logits.masked_fill(~seen, -torch.inf)
    normalizer = probabilities.logsumexp(-1)  # [h, rows]
    probabilities = probabilities.sub_(normalizer[..., None]).exp_()
    logits.masked_fill_(~seen, 0)
    number = seen.sum(-1)  # [rows]
    measures = [
        torch.linalg.vecdot(probabilities, distance),
        normalizer - torch.linalg.vecdot(probabilities, logits),
        probabilities.amax(-1),
    ]
    mean = logits.sum(-1) / number
    deviation = (logits - mean[..., None]).masked_fill_(~seen, 0)
    measures.append((torch.linalg.vecdot(deviation, deviation) / number).sqrt())
    measures.append(torch.ones_like(mean))
    return torch.stack([measure.sum(-1, dtype=torch.float64) for measure in measures], dim=-1)
