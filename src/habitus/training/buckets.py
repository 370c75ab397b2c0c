"""Sizes that a captured step comes in: one that nearly every batch fits, and by √2 larger ones for the rest."""

from dataclasses import dataclass

_GRAIN = 64  # sizes are multiples of this, and
_STEPS = 32  # of a 32nd of the power of two below: few sizes, so that another run may find them compiled


@dataclass(frozen=True)
class Buckets:
    """Bucket k holds up to base·√2^k items and tokens; nothing is ever cut to fit, the next bucket takes it."""

    items: int  # of bucket 0
    tokens: int
    most_items: int  # no batch can hold more
    most_tokens: int

    @classmethod
    def fitted(cls, seen: list[tuple[int, int]], most_items: int, most_tokens: int) -> "Buckets":
        """Buckets whose first one holds batches such as those seen: (items, tokens) each."""
        items, tokens = ([pair[axis] for pair in seen] for axis in (0, 1))
        return cls(_roomy(items, most_items), _roomy(tokens, most_tokens), most_items, most_tokens)

    def size(self, number: int) -> tuple[int, int]:
        """(items, tokens) of a bucket."""
        grown = 2 ** (number / 2)
        return (
            min(_rounded(self.items * grown), self.most_items),
            min(_rounded(self.tokens * grown), max(1, self.most_tokens)),
        )

    def holding(self, items: int, tokens: int) -> int:
        """The first bucket that holds so many."""
        number = 0
        while True:
            room, token_room = self.size(number)
            if items <= room and tokens <= token_room:
                return number
            number += 1


def _roomy(counts: list[int], most: int) -> int:
    """More than the largest count by the whole spread that was seen, and by one in a hundred."""
    return min(_rounded(1.01 * max(counts) + (max(counts) - min(counts))), max(1, most))


def _rounded(count: float) -> int:
    whole = int(count + 0.5)
    grain = max(_GRAIN, 2 ** (whole.bit_length() - 1) // _STEPS)
    return max(grain, -(-whole // grain) * grain)
