import numpy as np
import pytest
import torch

from habitus.randomness import Stream, permute_index, philox, random_words, shuffle_keys, to_uniform

# Known answers of the Random123 distribution for philox4x32-10.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers_in_numpy_and_torch(counter, key, expected) -> None:
    in_numpy = philox(tuple(np.array([c], dtype=np.int64) for c in counter), key)
    in_torch = philox(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(word[0]) for word in in_numpy) == expected
    assert tuple(int(word[0]) for word in in_torch) == expected


def test_numpy_and_torch_draw_the_same_words() -> None:
    index = np.array([0, 1, 2**31, 2**32 + 5, 2**40], dtype=np.int64)
    drawn = random_words(7, Stream.NEGATIVES, 2**33 + 1, index)
    for a, b in zip(drawn, random_words(7, Stream.NEGATIVES, 2**33 + 1, torch.from_numpy(index)), strict=True):
        assert a.tolist() == b.tolist()


def uniforms(seed: int, stream: Stream, step: int, index: np.ndarray) -> np.ndarray:
    high, low, _, _ = random_words(seed, stream, step, index)
    return to_uniform(high, low)


def test_any_part_of_a_draw_stands_alone() -> None:
    full = uniforms(3, Stream.WORLD, 9, np.arange(1000))
    assert np.array_equal(uniforms(3, Stream.WORLD, 9, np.arange(400, 500)), full[400:500])
    assert not np.array_equal(uniforms(3, Stream.WORLD, 10, np.arange(1000)), full)
    assert not np.array_equal(uniforms(3, Stream.INIT, 9, np.arange(1000)), full)


def test_uniforms_are_uniform() -> None:
    counts = np.bincount((uniforms(1, Stream.WORLD, 0, np.arange(100_000)) * 100).astype(int), minlength=100)
    assert counts.size == 100
    assert ((counts - 1000) ** 2 / 1000).sum() < 149  # chi-square with 99 degrees: 0.999 quantile is 148.2


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10, 97, 1000, 4096, 10_007])
def test_a_shuffle_is_a_permutation_in_numpy_and_torch(size: int) -> None:
    keys = shuffle_keys(5, Stream.WINDOWS, 3)
    there = permute_index(np.arange(size), size, keys)
    assert np.array_equal(np.sort(there), np.arange(size))
    assert permute_index(torch.arange(size), size, torch.from_numpy(keys)).tolist() == there.tolist()


def test_a_slice_of_a_large_shuffle_is_distinct_in_range_and_uniform() -> None:
    size = 10**9
    drawn = permute_index(np.arange(200_000), size, shuffle_keys(1, Stream.NEGATIVES, 0))
    assert np.unique(drawn).size == drawn.size
    assert drawn.min() >= 0
    assert drawn.max() < size
    counts = np.bincount(drawn // (size // 100), minlength=100)
    assert ((counts - 2000) ** 2 / 2000).sum() < 149


def test_every_item_is_equally_likely_at_every_place() -> None:
    size, repeats = 6, 6000
    counts = np.zeros((size, size))
    for step in range(repeats):
        counts[np.arange(size), permute_index(np.arange(size), size, shuffle_keys(11, Stream.WINDOWS, step))] += 1
    assert ((counts - repeats / size) ** 2 / (repeats / size)).sum() < 62  # 25 degrees, 0.9999 quantile: 61.2
