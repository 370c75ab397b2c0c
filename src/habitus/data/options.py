"""How to prepare, and what of it cannot work: refused before anything is read."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from habitus.data.split import Split
from habitus.data.text import MAX_TEXT_LEN, MIN_VOCABULARY
from habitus.data.windows import MAX_SEQ_LEN
from habitus.errors import ConfigError, DataError
from habitus.events import Schema
from habitus.store import SplitKind
from habitus.units import MAX_THREADS, parse_bytes


@dataclass(frozen=True)
class PrepareOptions:
    """How to prepare; the defaults suit most logs."""

    seq_len: int = 256
    text_len: int = 24
    vocabulary_size: int = 8192
    split: SplitKind = "user"
    validation_share: float = 0.1
    test_share: float = 0.1  # 0: no test side
    on_bad: Literal["error", "drop"] = "error"
    memory: str = "4GiB"
    threads: int = os.cpu_count() or 1
    seed: int = 0
    backend: Literal["local", "ray"] = "local"
    parts: int | None = None  # in which events are sorted; None: as many as the memory demands


@dataclass(frozen=True)
class InputTables:
    """Paths or globs of the tables."""

    events: str
    items: str
    users: str | None = None


def check_options(options: PrepareOptions, out: Path, schema: Schema) -> None:
    """Refuse options that cannot work, before anything is read."""
    if os.path.lexists(out):
        raise DataError(
            f"{out} exists already", expected="a name that is free", next_step="remove it or choose another --out"
        )
    for name, least in (("seq_len", 2), ("text_len", 1), ("vocabulary_size", MIN_VOCABULARY), ("threads", 1)):
        if getattr(options, name) < least:
            raise ConfigError(f"{name} is {getattr(options, name)}", expected=f"at least {least}")
    for name, most in (("seq_len", MAX_SEQ_LEN), ("text_len", MAX_TEXT_LEN), ("threads", MAX_THREADS)):
        if getattr(options, name) > most:
            raise ConfigError(f"{name} is {getattr(options, name):,}", expected=f"at most {most:,}")
    if options.split == "time" and schema.events.time_unit == "order":
        raise ConfigError(
            "split 'time' needs real times, but the schema says time_unit = 'order'",
            expected="split user or last for a log that has positions only",
        )
    split = split_of(options)
    if split.kind != "last" and split.validation_share + split.test_share >= 1:
        raise ConfigError(
            f"validation_share is {split.validation_share} and test_share {split.test_share}: nothing is left to train",
            expected="shares that sum to less than 1",
            next_step="lower one of them; --test-share 0 leaves the test side out",
        )
    parse_bytes(options.memory)


def split_of(options: PrepareOptions) -> Split:
    """The split that the options name, without the cuts of 'time', which depend on the log."""
    values = {
        "kind": options.split,
        "validation_share": options.validation_share,
        "test_share": options.test_share,
        "seed": options.seed,
    }
    return Split.parse(values, "the split's options")


def check_users(users: str | None, schema: Schema) -> None:
    """Refuse a users table that no schema describes, and the other way round."""
    if users is not None and schema.users is None:
        raise ConfigError(
            f"the users table {users} was given, and the schema has no [users]",
            expected='[users] with user = "the column of the id", and its fields under [users.fields]',
            next_step="add it to the schema, or let 'habitus prepare --guess --users' propose it",
        )
    if users is None and schema.users is not None:
        raise ConfigError(
            f"the schema has user fields ({', '.join(schema.users.fields)}), and no users table was given",
            expected="the table that holds them",
            next_step="pass --users USERS.parquet, or leave [users] out of the schema",
        )
