"""How a log is split: the ways to choose validation events, and the names of the two parts."""

from typing import Literal, get_args

SplitKind = Literal["user", "time", "last"]  # whole users, everything after a time, each user's last event
SplitName = Literal["train", "validation"]

SPLIT_KINDS: tuple[SplitKind, ...] = get_args(SplitKind)
SPLIT_NAMES: tuple[SplitName, ...] = get_args(SplitName)
