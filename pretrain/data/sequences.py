"""Cuts corpora into training sequences and validation windows.

The order of training sequences depends only on (seed, sequence number, blend): not on batch size, ranks,
workers, restarts or the length of the run. It is computed per sequence: the blend by weight, in O(log
corpora), the order within a corpus by a keyed permutation, in O(1) memory.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from model.errors import UserError, quote
from pretrain.data.corpus import Corpus
from pretrain.data.indexed import IndexedTokens
from pretrain.data.same_tokenizer import tokenizer_difference
from pretrain.utils.parsing import parse_fraction


def _windows(stream: IndexedTokens, context_length: int, name: str) -> int:
    """Number of windows of T+1 tokens at stride T: consecutive ones share a token, and no label is shared."""
    windows = (stream.num_tokens - 1) // context_length
    if windows < 1:
        raise UserError(
            f"data: {name} has {stream.num_tokens} tokens, fewer than one window of {context_length + 1}; "
            f"valid: more text, or a context_length of at most {max(0, stream.num_tokens - 1)}"
        )
    return windows


def _read_window(stream: IndexedTokens, window: int, context_length: int, vocab_size: int) -> np.ndarray:
    tokens = stream.read(window * context_length, context_length + 1)
    stream.check_vocabulary(tokens, vocab_size)
    return tokens


def pack_documents(starts: Iterable[np.ndarray], context_length: int) -> np.ndarray:
    """Document offsets of a micro-batch, its B rows concatenated, followed by B·T: int32 [documents + 1].

    This is what variable-length attention kernels call cu_seqlens. No document goes from one row to the next.

    Args:
        starts: for each row, the positions at which documents begin, the first being 0.
        context_length: T, tokens of a row.
    """
    rows = [row + number * context_length for number, row in enumerate(starts)]
    return np.concatenate([*rows, [len(rows) * context_length]]).astype(np.int32)


@lru_cache(maxsize=64)
def epoch_order(size: int, seed: int, corpus_index: int, epoch: int) -> Permutation:
    """The order in which an epoch reads *size* windows (or examples) of a blend's corpus."""
    return Permutation(size, f"training windows: seed {seed}, corpus {corpus_index}, epoch {epoch}")


class TrainingSequences:
    """The endless stream of training sequences of a run: corpora blended by weight, reshuffled each epoch.

    Windows are T+1 tokens at stride T over a corpus's concatenated training documents: T inputs, and T labels
    shifted by one. Every token is a label exactly once an epoch, except the corpus's very first (nothing
    comes before it) and the fewer than T tokens after the last whole window. Raises UserError for a corpus
    shorter than a window and for corpora with different tokenizers.
    """

    def __init__(
        self,
        corpora_and_weights: Iterable[tuple[Corpus, Fraction | int | float]],
        context_length: int,
        seed: int,
    ) -> None:
        pairs = list(corpora_and_weights)
        self.corpora = [corpus for corpus, _ in pairs]
        weights = [weight for _, weight in pairs]
        self.context_length = context_length
        self.seed = seed
        self._split = BlendSplitter(weights)
        exact = [Fraction(str(weight)) for weight in weights]
        self._shares = [weight / sum(exact) for weight in exact]
        self.windows = [
            _windows(corpus.training, context_length, f"{corpus.name}/training") for corpus in self.corpora
        ]
        """Windows of each corpus."""
        first = self.corpora[0]
        for corpus in self.corpora[1:]:
            difference = tokenizer_difference(corpus.tokenizer, first.tokenizer)
            if difference:
                raise UserError(
                    f"data: {corpus.name} was made with the tokenizer {corpus.tokenizer.name}, "
                    f"{first.name} with {first.tokenizer.name} ({difference}); valid: corpora of one "
                    "tokenizer"
                )

    def epochs(self, sequences: int) -> list[float]:
        """How often the first *sequences* sequences read each corpus's training split."""
        pairs = zip(self._shares, self.windows, strict=True)
        return [float(sequences * share / windows) for share, windows in pairs]

    def locate(self, number: int) -> tuple[int, int, int]:
        """(corpus index, epoch of that corpus, window) of sequence *number* ≥ 0."""
        if number < 0:
            raise IndexError(f"sequence {number}")
        index, local = self._split(number)
        epoch, position = divmod(local, self.windows[index])
        return index, epoch, epoch_order(self.windows[index], self.seed, index, epoch)(position)

    def sequence(self, number: int) -> np.ndarray:
        """Sequence *number* since the start of the run: int64 [T + 1], inputs [:-1] and labels [1:]."""
        index, _, window = self.locate(number)
        corpus = self.corpora[index]
        return _read_window(corpus.training, window, self.context_length, corpus.tokenizer.vocab_size)

    def batch(self, first: int, count: int) -> np.ndarray:
        """Sequences ``first … first + count - 1``, int64 [count, T + 1]."""
        rows = [self.sequence(number) for number in range(first, first + count)]
        return np.array(rows, np.int64).reshape(-1, self.context_length + 1)

    def inputs_and_labels(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """``batch(first, count)`` for Transformer.forward: the T inputs, and at each the token
        that follows."""
        tokens = self.batch(first, count)
        return tokens[:, :-1], tokens[:, 1:]

    def document_offsets(self, first: int, count: int) -> np.ndarray:
        """Where documents begin in the inputs of ``batch(first, count)``; see :func:`pack_documents`."""
        return pack_documents(map(self._document_starts, range(first, first + count)), self.context_length)

    def _document_starts(self, number: int) -> np.ndarray:
        index, _, window = self.locate(number)
        stream = self.corpora[index].training
        return stream.document_starts(window * self.context_length, self.context_length)

    def describe(self) -> str:
        """A line for each corpus: name, share, documents, tokens, windows per epoch."""
        lines = []
        for corpus, part, windows in zip(self.corpora, self._shares, self.windows, strict=True):
            share = "" if len(self.corpora) == 1 else f"{float(part):.1%} of the blend, "
            lines.append(
                f"{corpus.name}: {share}{corpus.training.num_documents:,} training documents, "
                f"{corpus.training.num_tokens:,} tokens, {windows:,} windows of {self.context_length}"
            )
        return "\n".join(lines)


class ValidationSequences:
    """A fixed set of windows of a corpus's validation split: evenly spaced, no label twice.

    Takes *count* windows, or all if there are fewer (None: all).
    """

    def __init__(self, corpus: Corpus, context_length: int, count: int | None = None) -> None:
        self.corpus = corpus
        self.context_length = context_length
        available = _windows(corpus.validation, context_length, f"{corpus.name}/validation")
        self.count = available if count is None else min(count, available)
        """Number of windows in the set."""
        self._windows = [number * available // self.count for number in range(self.count)]

    def __len__(self) -> int:
        return self.count

    def batch(self, first: int, count: int) -> np.ndarray:
        """Windows ``first … first + count - 1`` of the set, int64 [count, T + 1]; IndexError
        beyond the set."""
        if first < 0 or first + count > self.count:
            raise IndexError(f"validation windows {first}..{first + count} of {self.count}")
        vocab_size = self.corpus.tokenizer.vocab_size
        windows = self._windows[first : first + count]
        stream, T = self.corpus.validation, self.context_length
        rows = [_read_window(stream, window, T, vocab_size) for window in windows]
        return np.array(rows, np.int64).reshape(-1, T + 1)

    def document_starts(self) -> list[np.ndarray]:
        """For each window, the positions among its T inputs at which documents begin, int64, the first being
        0."""
        T = self.context_length
        return [self.corpus.validation.document_starts(window * T, T) for window in self._windows]

    def label_bytes(self) -> int:
        """UTF-8 bytes of text that all labels of the set stand for (end-of-document tokens have none).

        bits per byte = (sum of the labels' losses in nats) / ln 2 / label_bytes().
        """
        sizes = self.corpus.tokenizer.token_bytes()
        return sum(int(sizes[self.batch(number, 1)[0, 1:]].sum()) for number in range(self.count))


ROUNDS = 8
_MASK64 = (1 << 64) - 1


class Permutation:
    """Pseudo-random permutation of range(size): a Feistel network with cycle walking, called with an index.

    The network permutes the smallest power of two ≥ size; an image outside the range is permuted again until
    it falls inside (at most 2 tries on average), which leaves a permutation of the range itself. The same key
    and size give the same permutation on every machine. "Same seed, same data order" depends on it, so the
    constants below must not change.
    """

    def __init__(self, size: int, key: str) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} elements")
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = bits // 2
        # Halves may differ by one bit; after an even number of rounds each is back in its place.
        self._masks = ((1 << (bits - self._low_bits)) - 1, (1 << self._low_bits) - 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)]

    def __call__(self, index: int) -> int:
        """Image of *index*; raises IndexError outside range(size)."""
        if not 0 <= index < self.size:
            raise IndexError(f"{index} in a permutation of {self.size}")
        low_bits, masks, size = self._low_bits, self._masks, self.size
        value = index
        while True:
            left, right = value >> low_bits, value & masks[1]
            for number, key in enumerate(self._keys):
                # The finalizer of splitmix64 (Steele et al. 2014) as round function: every key bit reaches
                # all bits.
                mixed = (right + key) & _MASK64
                mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
                mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
                left, right = right, left ^ ((mixed ^ (mixed >> 31)) & masks[number & 1])
            value = left << low_bits | right
            if value < size:
                return value


# A number after the last colon, valid or not.
_LIKE_A_WEIGHT = re.compile(r":\s*[+-]?[\d.][\d._/]*(e[+-]?\d+)?\s*$", re.IGNORECASE)
_TOLERANCE = Fraction(1, 10**6)  # "0.333333" three times is meant as thirds


def parse_blend(text: str) -> list[tuple[str, Fraction]]:
    """Parse ``"a:0.7,b:0.3"`` (or ``"a:2/3,b:1/3"``, or one folder without a weight) into (folder, weight).

    Raises UserError for an unreadable or non-positive weight, and weights that do not sum to 1.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UserError(
            "data: no corpus given; valid: FOLDER or FOLDER:WEIGHT,FOLDER:WEIGHT,… with weights summing to 1"
        )
    if len(parts) == 1 and not _LIKE_A_WEIGHT.search(parts[0]):
        return [(parts[0], Fraction(1))]
    blend = []
    for part in parts:
        folder, colon, weight = part.rpartition(":")
        if not colon or not folder:
            raise UserError(
                f"data: {part!r} has no weight; valid in a blend: FOLDER:WEIGHT, such as {part}:0.5"
            )
        blend.append((folder, _weight(weight, folder)))
    total = sum((weight for _, weight in blend), Fraction(0))
    if abs(total - 1) > _TOLERANCE:
        share = ",".join(f"{folder}:{weight / total}" for folder, weight in blend)
        raise UserError(f"data: the weights of {text!r} sum to {total}, not to 1; in the same ratio: {share}")
    return blend


def _weight(text: str, folder: str) -> Fraction:
    weight = parse_fraction(text)
    if weight is None or weight <= 0:
        raise UserError(
            f"data: {quote(text)} is not a weight for {folder!r}; valid: a positive number such as 0.3 or 1/3"
        )
    return weight


class BlendSplitter:
    """Assigns sequence n of the blend to (corpus, number within that corpus).

    A balanced binary tree over the corpora: each node with integer weights a and b sends round(n·a / (a+b))
    of its first n sequences left (Bresenham's line), the rest right. After any n sequences corpus i has
    received n·w_i up to rounding (½ per level of the tree). The error never grows, and the result depends on
    n alone.
    """

    def __init__(self, weights: Sequence[Fraction | int | float]) -> None:
        # str() first: a float stands for the decimal that the user wrote, not for its binary neighbour.
        fractions = [
            Fraction(str(weight)) if isinstance(weight, float) else Fraction(weight) for weight in weights
        ]
        if not fractions or min(fractions) <= 0:
            raise UserError(
                f"data: blend weights {[str(w) for w in fractions]}; valid: one or more positive numbers"
            )
        scale = math.lcm(*(fraction.denominator for fraction in fractions))
        integer_weights = [int(fraction * scale) for fraction in fractions]
        divisor = math.gcd(*integer_weights)
        self._prefix = [0]
        for weight in integer_weights:
            self._prefix.append(self._prefix[-1] + weight // divisor)

    def __call__(self, number: int) -> tuple[int, int]:
        """(index of the corpus, number of the sequence within it) for sequence *number* ≥ 0."""
        prefix, low, high = self._prefix, 0, len(self._prefix) - 1
        while high - low > 1:
            middle = (low + high) // 2
            left_weight, node_weight = prefix[middle] - prefix[low], prefix[high] - prefix[low]
            left_before = (number * left_weight + node_weight // 2) // node_weight
            left_after = ((number + 1) * left_weight + node_weight // 2) // node_weight
            if left_after > left_before:
                number, high = left_before, middle
            else:
                number, low = number - left_before, middle
        return low, number
