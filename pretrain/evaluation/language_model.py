"""Computes the log-likelihoods of texts for lm-eval.

lm-eval sees one process that scores every request. Here the requests are shared among the ranks, in the same
number of batches on every rank, so that a model whose forward pass is collective (ZeRO-3) can be evaluated
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from torch import Tensor

from model.errors import UserError
from pretrain.data.tokenizer import Tokenizer

# Logits of one batch, fp32 and once more for the softmax, should stay below this on a CPU.
CPU_LOGIT_BYTES = 1 << 30
CPU_TOKENS = 8192
# On a GPU we begin here; a batch that does not fit is halved, and those after it too.
GPU_TOKENS = 65536

TokenRequest = tuple[Any, list[int], list[int]]


@dataclass(frozen=True)
class Share:
    """The part of the requests that a rank scores."""

    index: int = 0
    count: int = 1
    group: Any = None
    """Process group of the *count* ranks that have one part each; None: all ranks."""

    @classmethod
    def of_this_rank(cls) -> Share:
        """Give every rank a part of its own."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()


@dataclass(frozen=True)
class Row:
    """One sequence to run."""

    index: int
    """Which request it answers."""
    inputs: list[int]
    scored: list[int]
    """The tokens to score: those that follow the last of the inputs."""


class ZeroShotModel(TemplateLM):
    """A model that lm-eval can score.

    Args:
        logits_of: token ids int64 [B, T] on *device* -> logits [B, T, vocabulary].
        tokenizer: text to ids.
        max_length: the longest sequence that the model takes; longer texts are cut on the left.
        batch_tokens: tokens (padding included) of a forward pass; chosen by memory when None.
        collective: whether a forward pass is collective over the ranks, so that none may make one more or
            less.
        share: this rank's part; ranks that hold parts of one model (tensor parallelism) have the same one.
    """

    def __init__(
        self,
        logits_of: Callable[[Tensor], Tensor],
        tokenizer: Tokenizer,
        max_length: int,
        device: torch.device,
        batch_tokens: int | None = None,
        collective: bool = False,
        share: Share | None = None,
    ) -> None:
        super().__init__()
        self.logits_of = logits_of
        self.text_tokenizer = tokenizer
        self.max_length = max_length
        self._device = device
        self.collective = collective
        self.share = share
        if batch_tokens is None:
            by_memory = CPU_LOGIT_BYTES // (8 * tokenizer.vocab_size)
            batch_tokens = GPU_TOKENS if device.type == "cuda" else min(CPU_TOKENS, by_memory)
        self.batch_tokens = batch_tokens
        self.most_tokens = batch_tokens
        """Tokens of a forward pass that fit into memory, as far as is known: less after one that did not."""
        self.truncated = 0
        """Requests that were longer than the context."""

    @property
    def eot_token_id(self) -> int:
        """The token between documents; it also stands before a text that has no context."""
        return self.text_tokenizer.end_of_document

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, nothing added."""
        return list(self.text_tokenizer.encode(string))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts in nats, in windows of max_length that share no label."""
        windows: list[TokenRequest] = []
        owners = []
        for number, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(utils.make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += score
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Not supported: base models of this size are scored by likelihood."""
        names = {request.task_name for request in requests}
        raise UserError(
            f"tasks: {', '.join(sorted(map(str, names)))} lets the model write text; valid: tasks that are "
            "scored by likelihood, such as the group papers"
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Of each (text, context, continuation): log-likelihood of the continuation; whether it is greedy."""
        rows = [self._row(index, context, scored) for index, (_, context, scored) in enumerate(requests)]
        share = self.share or Share.of_this_rank()
        batches = self._batches(rows)
        results = [result for batch in batches[share.index :: share.count] for result in self._score(batch)]
        if self.collective and 0 < len(batches) % share.count <= share.index:
            self._score(batches[0])  # the others make one pass more
        if share.count > 1:
            parts: list[Any] = [None] * share.count
            dist.all_gather_object(parts, results, group=share.group)
            results = [result for part in parts for result in part]
        ordered = sorted(results)
        assert [index for index, *_ in ordered] == list(range(len(requests)))
        return [(score, greedy) for _, score, greedy in ordered]

    def _row(self, index: int, context: list[int], scored: list[int]) -> Row:
        whole = context + scored
        self.truncated += len(whole) > self.max_length + 1
        inputs = whole[-(self.max_length + 1) : -1]
        return Row(index, inputs, scored[-len(inputs) :])

    def _batches(self, rows: list[Row]) -> list[list[Row]]:
        """Rows of similar length together, longest first: a batch that does not fit fails at the start."""
        batches: list[list[Row]] = []
        for row in sorted(rows, key=lambda row: (-len(row.inputs), row.index)):
            if not batches or (len(batches[-1]) + 1) * len(batches[-1][0].inputs) > self.batch_tokens:
                batches.append([])
            batches[-1].append(row)
        return batches

    def _score(self, batch: list[Row]) -> list[tuple[int, float, bool]]:
        """(request, log-likelihood, greedy) for each row, in as many forward passes as memory takes."""
        width, results = len(batch[0].inputs), []
        while batch:
            count = len(batch) if self.collective else max(1, min(len(batch), self.most_tokens // width))
            pass_results = self._forward(batch[:count])
            if pass_results is None:
                torch.cuda.empty_cache()
                self.most_tokens = count * width // 2  # kept: every later batch would fail the same way
            else:
                results += pass_results
                batch = batch[count:]
        return results

    @torch.no_grad()
    def _forward(self, batch: list[Row]) -> list[tuple[int, float, bool]] | None:
        """What _score returns, from one forward pass; None when a smaller one is needed for the memory."""
        tokens = torch.zeros(len(batch), len(batch[0].inputs), dtype=torch.int64)
        for place, row in enumerate(batch):  # padding on the right: no real token sees it
            tokens[place, : len(row.inputs)] = torch.tensor(row.inputs)
        try:
            logits = self.logits_of(tokens.to(self._device))
        except torch.OutOfMemoryError:
            if self.collective or len(batch) == 1:
                raise
            return None
        results = []
        for place, row in enumerate(batch):
            targets = torch.tensor(row.scored, device=self._device)
            end = len(row.inputs)
            row_logits = logits[place, end - len(row.scored) : end].float()  # [scored, vocabulary]
            likelihoods = row_logits.log_softmax(-1).gather(1, targets[:, None])
            greedy = bool((row_logits.argmax(-1) == targets).all())
            results.append((row.index, float(likelihoods.double().sum()), greedy))
        return results
