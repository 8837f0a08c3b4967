"""The description of ZeRO's flat tensors against flat tensors made by padding, joining and cutting."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pretrain.engine.layout import contiguous_pieces, sliced_pieces

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)
RANKS = st.integers(1, 7)


def values(sizes):
    """Distinct non-zero numbers, by parameter."""
    numbers = torch.arange(1, sum(sizes) + 1).split(sizes)
    return {f"p{index}": part for index, part in enumerate(numbers)}


def put_together(pieces, ranks_flats, numels):
    """Read every parameter through its pieces."""
    found = {}
    for name, parts in pieces.items():
        out = torch.zeros(numels[name], dtype=torch.int64)
        for piece in parts:
            source = ranks_flats[piece.rank][piece.offset : piece.offset + piece.numel]
            out[piece.start : piece.start + piece.numel] = source
        assert [p.start for p in parts] == sorted(p.start for p in parts)
        found[name] = out
    return found


@given(sizes=SIZES, ranks=RANKS, alignment=st.sampled_from([1, 2, 4]), padded=st.booleans())
def test_contiguous(sizes, ranks, alignment, padded):
    parameters = values(sizes)
    paddings = [(-size) % 8 if padded else 0 for size in sizes]
    padded_parts = [F.pad(part, (0, p)) for part, p in zip(parameters.values(), paddings, strict=True)]
    flat = torch.cat(padded_parts)
    whole = torch.cat([flat, torch.zeros((-len(flat)) % (alignment * ranks), dtype=torch.int64)])
    flats = whole.chunk(ranks)
    named = [(name, len(part)) for name, part in parameters.items()]
    pieces = contiguous_pieces(named, paddings if padded else None, len(flats[0]))
    found = put_together(pieces, flats, dict(named))
    assert all(torch.equal(found[name], part) for name, part in parameters.items())


@given(sizes=SIZES, ranks=RANKS)
def test_sliced(sizes, ranks):
    parameters = values(sizes)
    flats = [[] for _ in range(ranks)]
    for part in parameters.values():
        padded = torch.cat([part, torch.zeros((-len(part)) % ranks, dtype=torch.int64)])
        for flat, own in zip(flats, padded.chunk(ranks), strict=True):
            flat.append(own)
    named = [(name, len(part)) for name, part in parameters.items()]
    found = put_together(sliced_pieces(named, ranks), [torch.cat(flat) for flat in flats], dict(named))
    assert all(torch.equal(found[name], part) for name, part in parameters.items())
