"""A keyed pseudo-random permutation of 0 … N-1 that is computed per index in O(1) memory."""

from __future__ import annotations

import hashlib

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
