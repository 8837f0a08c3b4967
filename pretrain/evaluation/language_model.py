"""Computes the log-likelihoods of texts for lm-eval, and continues texts.

lm-eval sees one process that scores every request. Here the requests are shared among the ranks, in the same
number of batches on every rank, so that a model whose forward pass is collective (ZeRO-3) can be evaluated
too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from torch import Tensor

from model.errors import UserError, quote
from pretrain.data.tokenizer import Tokenizer
from pretrain.runtime.world import World

# Logits of one batch, fp32 and once more for the softmax, should stay below this on a CPU, and below this
# share of the free memory on a GPU.
CPU_LOGIT_BYTES = 1 << 30
GPU_LOGIT_SHARE = 0.25
MOST_TOKENS = {"cpu": 8192, "cuda": 65536}
DEFAULT_WRITTEN = 256
"""Tokens that are written where a task does not say, as lm-eval's own models do."""
ANSWER_LENGTH = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call the most tokens of an answer; of several, lm-eval takes the first."""

T = TypeVar("T")
TokenRequest = tuple[Any, list[int], list[int]]
Row = tuple[int, list[int], list[int]]
"""One sequence to run: which request it answers, its tokens, and those to score, which follow the last."""


@dataclass
class Writing:
    """A text that is continued."""

    index: int
    """Of its request."""
    tokens: list[int]
    begins: int
    """Tokens of the context."""
    most: int
    """Tokens to write at most."""
    until: list[str]
    temperature: float
    """0: the most likely token."""
    text: str = ""
    """What is written, up to the first of *until*."""
    done: bool = False
    failed: bool = False
    """Whether its logits were not finite."""

    def add(self, token: int, tokenizer: Tokenizer) -> None:
        """Write a token."""
        self.tokens.append(token)
        ended = token == tokenizer.end_of_document
        text = tokenizer.decode(self.tokens[self.begins : len(self.tokens) - ended])
        found = [place for stop in self.until if (place := text.find(stop)) >= 0]
        self.text = text[: min(found)] if found else text
        self.done = ended or bool(found) or len(self.tokens) - self.begins >= self.most


def read_answer_length(of: str, wanted: dict[str, Any], max_length: int) -> int:
    """The most tokens of an answer, as a task's generation_kwargs say.

    Args:
        of: whose answer, for the message.

    Raises:
        UserError: they leave no room for the text before it; lm-eval's own models raise an AssertionError.
    """
    name = next((name for name in ANSWER_LENGTH if wanted.get(name)), "")
    most = wanted.get(name, DEFAULT_WRITTEN)
    if type(most) is not int or most < 1:
        raise UserError(f"tasks: {of} answer has {name}: {quote(most)}; give a whole number from 1")
    if most >= max_length:
        raise UserError(
            f"tasks: {of} answer of up to {most:,} tokens leaves no room for its text in the context of "
            f"{max_length:,}; set max_gen_toks in the task's YAML, leave the task out, or give a model with "
            "a longer context"
        )
    return most


class ZeroShotModel(TemplateLM):
    """A model that lm-eval can score.

    Args:
        logits_of: token ids int64 [B, T] on the rank's device -> logits [B, T, vocabulary]. Every copy of
            the model is called equally often.
        tokenizer: text to ids.
        max_length: the longest sequence that the model takes; longer texts are cut on the left.
        world: the ranks; each copy of the model scores its part of the requests.
        batch_tokens: tokens (padding included) of a forward pass; chosen by memory when None.
    """

    def __init__(
        self,
        logits_of: Callable[[Tensor], Tensor],
        tokenizer: Tokenizer,
        max_length: int,
        world: World,
        batch_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.logits_of = logits_of
        self.text_tokenizer = tokenizer
        self.max_length = max_length
        self.world = world
        if batch_tokens is None:
            kind, room = world.device.type, float(CPU_LOGIT_BYTES)
            if kind == "cuda":
                room = torch.cuda.mem_get_info(world.device)[0] * GPU_LOGIT_SHARE
            # Batches are shared among ranks by their number: all must form the same ones.
            batch_tokens = min(world.gather(min(MOST_TOKENS[kind], int(room) // (8 * tokenizer.vocab_size))))
        self.batch_tokens = batch_tokens
        self.logits_dtype = torch.float32
        """Of the last forward pass."""
        self.truncated = 0
        """Requests that did not fit the context."""

    @property
    def eot_token_id(self) -> int:
        """The token between documents; it also stands before a text that has no context."""
        return self.text_tokenizer.end_of_document

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, nothing added."""
        return list(self.text_tokenizer.encode(string))

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a context and of its answer, split as lm-eval does; where the answer has merged into the
        context's last token, which lm-eval's own models reject, the two are encoded apart."""
        before, answer = super()._encode_pair(context, continuation)
        if not answer:
            before, answer = self.tok_encode(context), self.tok_encode(continuation)
        return before or [self.eot_token_id], answer

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
        """Continue each text, as its request says: until one of ``until`` is written, ``max_gen_toks`` tokens
        are, or the document ends; greedily, or at a ``temperature`` above 0 unless ``do_sample`` is false.

        The whole text so far is run for each token: there is no cache, so that any model can be asked.
        """
        # The longest first, as when texts are scored.
        rows = [self._prepare_writing(index, *request.args) for index, request in enumerate(requests)]
        rows.sort(key=lambda row: (-len(row.tokens), row.index))
        mine = rows[self.world.data_rank :: self.world.data_parallel]
        with torch.no_grad():
            while left := self._share_work([row for row in mine if not row.done]):
                self._write(self._take_fitting(left))
        found = sorted(self._gather_copies([(row.index, row.text, row.failed) for row in mine]))
        self._check_finite(not any(failed for *_, failed in found))
        return [text for _, text, _ in found]

    def _check_finite(self, finite: bool) -> None:
        """Raises UserError, on every rank, unless all logits are *finite*: lm-eval would take the first
        answer for the likeliest."""
        if not finite:
            dtype = str(self.logits_dtype).removeprefix("torch.")
            wider = "" if dtype == "float32" else ", or compute in float32 or bfloat16"
            raise UserError(f"model: its logits are not finite in {dtype}; give an earlier checkpoint{wider}")

    def _gather_copies(self, results: list[T]) -> list[T]:
        """The *results* of all copies of the model. Collective."""
        if self.world.data_parallel == 1:
            return results
        parts: list[Any] = [None] * self.world.data_parallel
        dist.all_gather_object(parts, results, group=self.world.grid.data_group)
        return [result for part in parts for result in part]

    def _logits(self, rows: Sequence[list[int]]) -> Tensor:
        """Logits [rows, longest, vocabulary] of tokens, padded on the right: no real token sees it."""
        tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for place, row in enumerate(rows):
            tokens[place, : len(row)] = torch.tensor(row)
        logits = self.logits_of(tokens.to(self.world.device))
        self.logits_dtype = logits.dtype
        return logits

    def _prepare_writing(self, index: int, context: str, wanted: dict[str, Any]) -> Writing:
        """A request as lm-eval's models read it: the context is cut on the left where it leaves no room."""
        until = wanted.get("until") or []
        most = read_answer_length("an", wanted, self.max_length)
        tokens = self.tok_encode(context) or [self.eot_token_id]
        self.truncated += len(tokens) > self.max_length - most
        kept = tokens[-(self.max_length - most) :]
        temperature = 0.0 if wanted.get("do_sample") is False else float(wanted.get("temperature") or 0)
        stops = [until] if isinstance(until, str) else list(until)
        return Writing(index, kept, len(kept), most, [stop for stop in stops if stop], temperature)

    def _share_work(self, left: list[Writing]) -> list[Writing]:
        """What is left to write here; of a rank with nothing left, while others write, something finished."""
        if self.world.data_parallel == 1:
            return left
        if not any(self.world.gather(bool(left))):
            return []
        return left or [Writing(-1, [self.eot_token_id], 1, 0, [], 0.0, done=True)]

    def _take_fitting(self, rows: list[Writing]) -> list[Writing]:
        """The first rows, as many as a pass takes."""
        longest = max(len(row.tokens) for row in rows)
        return rows[: max(1, self.batch_tokens // longest)]

    def _write(self, rows: list[Writing]) -> None:
        """One token for each row."""
        for row, row_logits in zip(rows, self._logits([row.tokens for row in rows]), strict=True):
            if row.done:
                continue
            # An embedding may have rows that stand for no token.
            last = row_logits[len(row.tokens) - 1, : self.text_tokenizer.vocab_size].float().cpu()
            row.failed = row.done = not bool(last.max().isfinite())
            if not row.failed:
                row.add(self._choose_token(row, last), self.text_tokenizer)

    def _choose_token(self, row: Writing, logits: Tensor) -> int:
        """The next token of a row, given logits [vocabulary]. A sample depends on the row alone."""
        if row.temperature == 0:
            return int(logits.argmax())
        seed = row.index * self.max_length + len(row.tokens)
        generator = torch.Generator().manual_seed(seed)
        return int(torch.multinomial((logits / row.temperature).softmax(-1), 1, generator=generator))

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Of each (text, context, continuation): log-likelihood of the continuation; whether it is greedy."""
        rows = [self._row(index, context, scored) for index, (_, context, scored) in enumerate(requests)]
        batches, rank, copies = self._batches(rows), self.world.data_rank, self.world.data_parallel
        results = [result for batch in batches[rank::copies] for result in self._score(batch)]
        if 0 < len(batches) % copies <= rank:
            self._score(batches[0])  # the others make one pass more
        ordered = sorted(self._gather_copies(results))
        self._check_finite(not any(math.isnan(score) for _, score, _ in ordered))
        assert [index for index, *_ in ordered] == list(range(len(requests)))
        return [(score, greedy) for _, score, greedy in ordered]

    def _row(self, index: int, context: list[int], scored: list[int]) -> Row:
        if len(scored) > self.max_length:  # lm-eval's own models raise an AssertionError
            raise UserError(
                f"tasks: an answer of {len(scored):,} tokens is longer than the context of "
                f"{self.max_length:,}; leave its task out, or give a model with a longer context"
            )
        if not scored:
            raise UserError("tasks: an answer is empty; leave its task out, or correct its data set")
        whole = context + scored
        self.truncated += len(whole) > self.max_length + 1
        inputs = whole[-(self.max_length + 1) : -1]
        return index, inputs, scored

    def _batches(self, rows: list[Row]) -> list[list[Row]]:
        """Rows of similar length together, longest first: a batch that does not fit fails at the start."""
        batches: list[list[Row]] = []
        for row in sorted(rows, key=lambda row: (-len(row[1]), row[0])):
            if not batches or (len(batches[-1]) + 1) * len(batches[-1][0][1]) > self.batch_tokens:
                batches.append([])
            batches[-1].append(row)
        return batches

    @torch.no_grad()
    def _score(self, batch: list[Row]) -> list[tuple[int, float, bool]]:
        """(request, log-likelihood, greedy) for each row, from one forward pass."""
        logits = self._logits([inputs for _, inputs, _ in batch])
        results = []
        for row_logits, (index, inputs, scored) in zip(logits, batch, strict=True):
            targets = torch.tensor(scored, device=row_logits.device)
            row_logits = row_logits[len(inputs) - len(scored) : len(inputs)].float()  # [scored, vocabulary]
            likelihoods = row_logits.log_softmax(-1).gather(1, targets[:, None])
            greedy = bool((row_logits.argmax(-1) == targets).all())
            results.append((index, float(likelihoods.double().sum()), greedy))
        return results
