"""How a log is split: the ways to hold events out, and the names of the sides."""

from typing import Literal, get_args

SplitKind = Literal["user", "time", "last"]  # whole users, everything after a time, each user's last events
SplitName = Literal["train", "validation", "test"]
EvaluationSide = Literal["validation", "test"]  # choices are made on validation; test is for the final report

SPLIT_KINDS: tuple[SplitKind, ...] = get_args(SplitKind)
SPLIT_NAMES: tuple[SplitName, ...] = get_args(SplitName)
EVALUATION_SIDES: tuple[EvaluationSide, ...] = get_args(EvaluationSide)
