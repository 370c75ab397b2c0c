"""Counter-based random numbers: step t needs no history, and numpy and torch draw the same integers.

Philox 4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), written
on int64 arrays with masks so that the same lines run on numpy arrays and on torch tensors of any device.
Every number is keyed by (seed, stream, step, index).
"""

from enum import IntEnum
from typing import Any, TypeVar

import numpy as np

Ints = TypeVar("Ints", bound=Any)  # an int64 numpy array or torch tensor

MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_SHUFFLE_ROUNDS = 8


class Stream(IntEnum):
    """What the numbers are for. Streams of one seed are independent. Numbers never change; 5 is not in use."""

    INIT = 0
    WINDOWS = 1
    NEGATIVES = 2
    DROPOUT = 3
    WORLD = 4
    TOKENIZER = 6
    EVALUATION = 7
    USERS = 8
    ITEM_DROPOUT = 9


def random_words(seed: int, stream: int, step: Any, index: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Four 32-bit words, as int64, for each entry of `index`; a step may be a 0-dim array or tensor."""
    zero = index ^ index
    counter = (index & MASK, (index >> 32) & MASK, zero + (step & MASK), zero + ((step >> 32) & MASK))
    return philox(counter, (seed & MASK, int(stream) & MASK))


def philox(counter: tuple[Ints, Ints, Ints, Ints], key: tuple[int, int]) -> tuple[Ints, Ints, Ints, Ints]:
    """The Philox 4x32-10 block function on int64 arrays that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps modulo 2^64, and the mask after the arithmetic shift leaves its true upper half.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & MASK) ^ c1 ^ k0, p1 & MASK, ((p0 >> 32) & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + _WEYL[0]) & MASK, (k1 + _WEYL[1]) & MASK
    return c0, c1, c2, c3


def to_uniform(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """A float64 in [0, 1) with 53 random bits, from two words."""
    return ((high >> 5) * 67108864.0 + (low >> 6)) * 2.0**-53


def shuffle_keys(seed: int, stream: int, step: int) -> np.ndarray:
    """The round keys of one shuffle: eight 32-bit words as int64."""
    words = random_words(seed, stream, step, np.arange(_SHUFFLE_ROUNDS // 4, dtype=np.int64))
    return np.stack(words, axis=1).reshape(-1)


def permute_index(index: Ints, size: int, keys: Any) -> Ints:
    """Where the random permutation of range(size) that `keys` choose sends each entry of `index`.

    A Feistel network on the rectangle a x b with a*b just above `size`; entries that land outside walk on
    until they are inside. Any slice of the permutation costs only its own length, and for tensors the number
    of walks is fixed beforehand, so that nothing waits for the host when `index` lives on a device.
    """
    a = max(1, round(size**0.5))
    b = -(-size // a)
    result = _feistel(index, a, b, keys)
    for _ in range(_walks(size, a * b) - 1):
        outside = result >= size
        if isinstance(result, np.ndarray) and not outside.any():
            break
        moved = _feistel(result, a, b, keys)
        result = result + outside * (moved - result)
    return result


def _walks(size: int, domain: int) -> int:
    """Walks after which an entry is still outside with probability below 2^-64."""
    if domain == size:
        return 1
    return int(np.ceil(64 / np.log2(domain / (domain - size)))) + 1


def _feistel(index: Ints, a: int, b: int, keys: Any) -> Ints:
    left, right = index // b, index % b
    for number in range(_SHUFFLE_ROUNDS):
        if number % 2:
            right = (right + mix_bits(left, keys[number])) % b
        else:
            left = (left + mix_bits(right, keys[number])) % a
    return left * b + right


def mix_bits(value: Ints, key: Any) -> Ints:
    """A 32-bit avalanche of value ^ key (multiply and xor-shift)."""
    value = ((value ^ key) * 0x7FEB352D) & MASK
    value = ((value ^ (value >> 15)) * 0x846CA68B) & MASK
    return value ^ (value >> 16)
