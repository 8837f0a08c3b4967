"""Tensor-parallel attention for any head count: even columns, exchanged into whole heads and back.

Every rank holds A_l/t columns of q (and its share of k and v) for any h_l. With g = gcd(kv heads, t) groups
of r = t/g neighbours, a group's columns are whole key/value heads and the query heads that go with them.
Inside a group:

- batch form (r divides B): each rank attends for B/r sequences; one all-to-all before attention, one after;
- query form (2r divides T): each rank attends for two chunks of T/2r query positions, the i-th and the
  (2r-1-i)-th, so that causal work is the same for all ("zigzag"); q and output are exchanged, k and v
  gathered.

Rotary positions are applied by the caller after ``scatter``, on whole heads. Bytes sent are computed in
pretrain/plan/tensor_parallel.py. The idea of exchanging heads for sequences is DeepSpeed-Ulysses' (arXiv
2309.14509), the zigzag order that of ring attention implementations; neither splits a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.collectives import all_gather, all_to_all
from model.config import ModelConfig
from model.parallel_plan import FormName, choose_form, head_groups
from model.process_grid import ProcessGrid

Span = tuple[int, int]


@dataclass
class Form:
    """How columns are exchanged for whole heads: c_q and c_k columns per rank, r times as many per group.

    As it is here for r = 1, where the rank's columns are whole heads already; the forms below are for more
    ranks.
    """

    ranks: int
    """r"""
    index: int
    """Which rank of its group this is."""
    group: Any
    """The process group."""
    batch: int
    """B"""
    length: int
    """T"""

    @property
    def spans(self) -> list[Span]:
        """Query positions [start, stop) that this rank attends for, in the order of its rows."""
        return [(0, self.length)]

    @property
    def sequences(self) -> Span:
        """First and last + 1 of the B sequences that this rank attends for."""
        return 0, self.batch

    def scatter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's columns [B, T, c_q or c_k] -> the group's: this rank's query rows, and keys and
        values."""
        return query, key, value

    def gather(self, output: Tensor) -> Tensor:
        """Attention output on this rank's query rows, the group's columns -> its columns [B, T, c_q]."""
        return output


class HeadExchange:
    """Distributes one layer's attention over the tensor group.

    Args:
        config: the model, whose widths t divides.
        layer: which layer.
        grid: this rank's place, with t > 1.
    """

    def __init__(self, config: ModelConfig, layer: int, grid: ProcessGrid) -> None:
        self.layer = layer
        self.groups, self.ranks = head_groups(config.layer_kv_heads(layer), grid.tensor_parallel)
        """g and r of the layer."""
        self.index = grid.tensor_rank % self.ranks
        """Which rank of its group this is."""
        self.process_group: Any = grid.head_groups[self.ranks]

    def form(self, batch: int, length: int, *, packed: bool = False) -> Form:
        """The form for B sequences of T positions.

        Raises:
            UserError: neither form can split them, and gradients are enabled or the sequences are packed
                documents. Else, without gradients (sampling), the batch is padded instead.
        """
        if self.ranks == 1:
            form = Form
        elif torch.is_grad_enabled() or packed:
            form = FORMS[choose_form(self.ranks, batch, length, self.layer)]
        else:
            form = QueryForm if batch % self.ranks and length % (2 * self.ranks) == 0 else BatchForm
        return form(self.ranks, self.index, self.process_group, batch, length)


class BatchForm(Form):
    """B/r sequences per rank. A batch that r does not divide is padded with empty sequences (sampling
    only)."""

    @property
    def sequences(self) -> Span:
        """The index-th of r equal parts."""
        return self.index * self.batch // self.ranks, (self.index + 1) * self.batch // self.ranks

    def scatter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, c] -> [B/r, T, r c] of q, k and v, in one all-to-all."""
        widths = [query.shape[-1], key.shape[-1], value.shape[-1]]
        columns = torch.cat((query, key, value), dim=-1)  # [B, T, c_q + 2 c_k]
        if self.batch % self.ranks:
            columns = F.pad(columns, (0, 0, 0, 0, 0, -self.batch % self.ranks))
        rows = columns.unflatten(0, (self.ranks, -1))  # [r, B/r, T, …]: the sequences of each rank
        received = all_to_all(rows, self.group)  # [r, B/r, T, …]: the columns of each rank
        # Each [B/r, T, r c].
        query, key, value = (part.movedim(0, 2).flatten(2) for part in received.split(widths, dim=-1))
        return query, key, value

    def gather(self, output: Tensor) -> Tensor:
        """[B/r, T, r c_q] -> [B, T, c_q]."""
        columns = output.unflatten(2, (self.ranks, -1)).movedim(2, 0)  # [r, B/r, T, c_q]
        return all_to_all(columns, self.group).flatten(0, 1)[: self.batch]


class QueryForm(Form):
    """2T/2r query positions per rank, against all keys and values."""

    @property
    def spans(self) -> list[Span]:
        """The i-th chunk from the front and the i-th from the back."""
        size = self.length // (2 * self.ranks)
        chunks = (self.index, 2 * self.ranks - 1 - self.index)
        return [(chunk * size, (chunk + 1) * size) for chunk in chunks]

    def scatter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, c_q] -> [B, T/r, r c_q]; k and v [B, T, c_k] -> [B, T, r c_k] each."""
        chunks = query.unflatten(1, (2 * self.ranks, -1))  # [B, 2r, T/2r, c_q]
        front, back = chunks.chunk(2, dim=1)  # [B, r, T/2r, c_q] each
        rows = torch.cat((front, back.flip(1)), dim=2).transpose(0, 1)  # [r, B, T/r, c_q]: rows of each rank
        received = all_to_all(rows, self.group)  # [r, B, T/r, c_q]: columns of each rank
        pair = all_gather(torch.stack((key, value)), self.group)  # [r, 2, B, T, c_k]
        key, value = pair.movedim(0, 3).flatten(3).unbind(0)  # [B, T, r c_k] each
        return received.movedim(0, 2).flatten(2), key, value

    def gather(self, output: Tensor) -> Tensor:
        """[B, T/r, r c_q] -> [B, T, c_q]."""
        columns = output.unflatten(2, (self.ranks, -1)).movedim(2, 0)  # [r, B, T/r, c_q]
        rows = all_to_all(columns, self.group).transpose(0, 1)  # [B, r, T/r, c_q]: rows of each rank
        front, back = rows.chunk(2, dim=2)  # [B, r, T/2r, c_q] each
        return torch.cat((front, back.flip(1)), dim=1).flatten(1, 2)


FORMS: dict[FormName, type[Form]] = {"none": Form, "batch": BatchForm, "query": QueryForm}
