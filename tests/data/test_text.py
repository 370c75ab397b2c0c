"""Item texts: long ones are cut, without a change to the tokens of ordinary ones."""

import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from habitus.data.text import cut_for_training, encode_texts, join_texts, train_tokenizer

LETTERS = list("abcdefghijklmnopqrstuvwxyz")


def words(draw: np.random.Generator, count: int) -> str:
    """Words of a small language, so that the tokenizer learns long tokens."""
    return " ".join("".join(draw.choice(LETTERS[: 3 + n % 5], 2 + n % 12)) for n in draw.integers(0, 400, count))


def ordinary_texts() -> list[str]:
    """Titles, descriptions of up to 20,000 characters, languages without spaces, addresses, rules and numbers."""
    draw = np.random.default_rng(0)
    chinese = ["".join(map(chr, draw.integers(0x4E00, 0x4F00, n))) for n in draw.integers(2, 60, 400)]
    return [
        *(words(draw, int(n)) for n in draw.integers(1, 12, 400)),
        *(words(draw, int(n)) for n in draw.integers(100, 3000, 40)),
        "，".join(chinese),
        *("。".join(chinese[n : n + 9]) for n in range(0, 390, 9)),
        "https://shop.example/" + "/".join(words(draw, 150).split()),
        "-" * 200 + " Bedienungsanleitung " + "=" * 80,
        "Donaudampfschifffahrtsgesellschaftskapitänsmützenabzeichen " * 30,
        "e\u0301" * 300,
        "👩‍👩‍👧‍👦 " * 50,
        " ".join(map(str, draw.integers(0, 10**9, 800))),
        "",
    ]


@pytest.mark.parametrize("text_len", [4, 24])
def test_ordinary_texts_have_the_tokenizer_and_the_tokens_of_uncut_ones(text_len: int) -> None:
    texts = join_texts([pa.array(ordinary_texts())])
    uncut = train_tokenizer(texts.to_pylist(), 2000)
    tokenizer = train_tokenizer(cut_for_training(texts, text_len), 2000)
    assert tokenizer.to_str() == uncut.to_str()
    expected = np.zeros((len(texts), text_len), np.int32)
    for row, encoding in zip(expected, uncut.encode_batch(texts.to_pylist()), strict=True):
        row[: len(encoding.ids[:text_len])] = encoding.ids[:text_len]
    assert (encode_texts(tokenizer, texts.to_pylist(), text_len) == expected).all()


def test_a_text_has_the_tokens_of_its_words_whatever_stands_between_them() -> None:
    spaces = [" ", "\xa0", " \xa0", "\xa0 ", "\xa0 \xa0", "\x0b", "\u3000 ", "\x1f", "'s ", " 's", " ́"]
    draw = np.random.default_rng(1)
    words = ["Shoe", "red", "ΣΑΣ", "10", "10€", "e\u0301", "ﬁt", "a-b", "don't", "靴", "'", ""]
    texts = ["".join(draw.choice(words) + draw.choice(spaces) for _ in range(draw.integers(0, 30))) for _ in range(400)]
    tokenizer = train_tokenizer(texts, 400)
    expected = [(ids := tokenizer.encode(text).ids[:12]) + [0] * (12 - len(ids)) for text in texts]
    assert encode_texts(tokenizer, texts, 12).tolist() == expected


ENDLESS: dict[str, Callable[[np.random.Generator, int], str]] = {
    "letters": lambda draw, size: "".join(draw.choice(LETTERS, size)),
    "one letter": lambda draw, size: "a" * size,
    "marks": lambda draw, size: "".join(draw.choice(list("!?.,;:-"), size)),
    "ideograms": lambda draw, size: "".join(map(chr, draw.integers(0x4E00, 0x9FA5, size))),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_million_characters_without_a_space_take_seconds(kind: str) -> None:
    """Uncut, forty such texts gave no result within 300 s."""
    draw = np.random.default_rng(0)
    texts = join_texts([pa.array([ENDLESS[kind](draw, 1_000_000) for _ in range(4)] + ["a title"] * 4)])
    began = time.process_time()
    training = cut_for_training(texts, 24)
    tokenizer = train_tokenizer(training, 8192)
    tokens = encode_texts(tokenizer, texts.to_pylist(), 24)
    assert time.process_time() - began < 20
    assert max(map(len, training)) <= 1000
    assert (tokens[:4] > 0).any(axis=1).all()
    assert (tokens[4:] == tokens[4]).all()


def test_training_reads_a_bounded_part_of_a_text() -> None:
    texts = pa.array(["word " * 200_000])
    assert len(cut_for_training(texts, 24)[0]) == 1 << 15
    assert len(cut_for_training(texts, 10_000)[0]) == 640_000
