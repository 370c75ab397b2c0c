"""Item text to tokens: cleaning, a byte-level BPE trained on the catalogue, fixed-length rows."""

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from habitus.data.fields import PADDING_TOKEN, SEPARATOR_TOKEN

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Control characters never survive cleaning, so no item text can spell one of the two special tokens.
PADDING, SEPARATOR = "\x00", "\x1f"
MAX_TEXT_LEN = 1 << 16
MAX_TRAINING_TEXTS = 1_000_000
MIN_VOCABULARY = 256 + 2  # every byte, and the two special tokens

# A text is cut where its first text_len tokens surely end: tokens of ordinary text have some five characters and never
# cross a space. Training looks further, since what it reads decides the vocabulary of every text.
_CHARACTERS_PER_TOKEN = 64
_TRAINING_CHARACTERS = 1 << 15
# Merging is quadratic in the length of a word. Whatever is longer is no word.
_WORD_CHARACTERS = 1000

# C0 without white space, and DEL. Right-to-left letters and marks are text like any other, and so are the
# C1 codes, which real catalogues hold where Windows-1252 quotes and dashes were decoded as Latin-1.
_CONTROL = r"[\x{00}-\x{08}\x{0E}-\x{1F}\x{7F}]"
_SPACE = r"\s+"
# White space that cleaning leaves: the tokenizer groups it with the spaces around it.
_OTHER_SPACE = r"[\x{0B}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}]|^ |  "


def has_control_characters(column: pa.Array) -> np.ndarray:
    """Which texts hold control characters (white space is not counted)."""
    matches = pc.match_substring_regex(column, _CONTROL)
    return pc.fill_null(matches, False).to_numpy(zero_copy_only=False)


def join_texts(columns: list[pa.Array]) -> pa.Array:
    """One text per item: the text fields in the schema's order, cleaned, with separators in between."""
    texts = [_clean(column) for column in columns]
    if len(texts) == 1:
        return texts[0]
    joined = pc.binary_join_element_wise(*texts, SEPARATOR)
    return pc.replace_substring_regex(joined, f"^{SEPARATOR}+$", "")  # no text at all has no tokens at all


def _clean(column: pa.Array) -> pa.Array:
    text = pc.replace_substring_regex(pc.fill_null(column, ""), _CONTROL, " ")
    return pc.utf8_trim_whitespace(pc.replace_substring_regex(text, _SPACE, " "))


def cut_for_training(texts: pa.Array, text_len: int) -> list[str]:
    """The beginnings of texts, as far as training reads them, without the ends of endless words."""
    cut = pc.utf8_slice_codeunits(texts, 0, max(_TRAINING_CHARACTERS, text_len * _CHARACTERS_PER_TOKEN))
    is_suspect = pc.match_substring_regex(cut, rf"\S{{{_WORD_CHARACTERS}}}").to_pylist()
    return [_cut_words(text) if suspect else text for text, suspect in zip(cut.to_pylist(), is_suspect, strict=True)]


def _cut_words(text: str) -> str:
    """The text with the first characters only of each word, as the tokenizer splits them, that is too long."""
    from tokenizers import pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return "".join(text[start : min(end, start + _WORD_CHARACTERS)] for _, (start, end) in words)


def train_tokenizer(texts: list[str], vocabulary_size: int) -> "Tokenizer":
    """A byte-level BPE of at most `vocabulary_size` tokens: every text has an encoding, none is unknown."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[PADDING, SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    assert tokenizer.token_to_id(PADDING) == PADDING_TOKEN
    assert tokenizer.token_to_id(SEPARATOR) == SEPARATOR_TOKEN
    return tokenizer


def encode_texts(tokenizer: "Tokenizer", texts: list[str], text_len: int) -> np.ndarray:
    """The first `text_len` tokens of each text, padded with zeros: int32 [n, text_len].

    No token crosses a space, and words recur: each distinct one is encoded once.
    """
    cut = pc.utf8_slice_codeunits(pa.array(texts, pa.string()), 0, text_len * _CHARACTERS_PER_TOKEN)
    whole = pc.match_substring_regex(cut, _OTHER_SPACE).to_numpy(zero_copy_only=False)
    rows = _encode_by_word(tokenizer, pc.if_else(pa.array(whole), "", cut), text_len)
    if whole.any():
        rows[whole] = _encode_whole(tokenizer, cut.filter(pa.array(whole)).to_pylist(), text_len)
    return rows


def _encode_by_word(tokenizer: "Tokenizer", texts: pa.Array, text_len: int) -> np.ndarray:
    """The rows of texts whose words stand between single spaces, a space being part of the word after it."""
    pieces = pc.list_slice(
        pc.split_pattern(texts, " ", max_splits=text_len + 1), 0, text_len + 1
    )  # a token or more each
    num_words = pc.list_value_length(pieces).to_numpy(zero_copy_only=False).astype(np.int64)
    text = np.repeat(np.arange(len(texts)), num_words)
    is_first = np.concatenate([[True], text[1:] != text[:-1]]) if len(text) else np.empty(0, bool)
    words = pc.if_else(pa.array(is_first), pieces.flatten(), pc.binary_join_element_wise(" ", pieces.flatten(), ""))
    coded = words.dictionary_encode()
    word = coded.indices.to_numpy()
    tokens = [encoding.ids[:text_len] for encoding in tokenizer.encode_batch_fast(coded.dictionary.to_pylist())]
    sizes = np.fromiter(map(len, tokens), np.int64, len(tokens))
    flat = np.fromiter(chain.from_iterable(tokens), np.int32, int(sizes.sum()))
    starts = np.cumsum(sizes) - sizes

    counts = sizes[word]
    before = np.cumsum(counts) - counts
    place = before - np.repeat(before[is_first], num_words)  # of each word's first token in its text
    counts = np.minimum(counts, np.maximum(text_len - place, 0))
    ends = np.cumsum(counts)
    within = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
    rows = np.zeros((len(texts), text_len), np.int32)
    rows[np.repeat(text, counts), np.repeat(place, counts) + within] = flat[np.repeat(starts[word], counts) + within]
    return rows


def _encode_whole(tokenizer: "Tokenizer", texts: list[str], text_len: int) -> np.ndarray:
    """The rows of any texts."""
    rows = np.zeros((len(texts), text_len), np.int32)
    for row, encoding in zip(rows, tokenizer.encode_batch_fast(texts), strict=True):
        ids: Any = encoding.ids[:text_len]
        row[: len(ids)] = ids
    return rows
