"""The manifest of a prepared dataset: what is in it, and the checksum of every file."""

import json
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import Field

from habitus.data.split import Split
from habitus.data.users_table import UserRows
from habitus.data.windows import UserParts, Windows
from habitus.errors import DataError
from habitus.events import Schema
from habitus.files import sha256_of
from habitus.store import SplitName
from habitus.typed import Typed, content_hash

FORMAT_VERSION = 2  # 2: a test side, and windows that are cut on opening
READABLE_VERSIONS = (1, 2)
MANIFEST_FILE = "manifest.json"
_YEAR_1975_US, _YEAR_2100_US = 157_766_400_000_000, 4_102_444_800_000_000
_COARSER_UNITS = {"ms": {"s": 1_000}, "us": {"ms": 1_000, "s": 1_000_000}}
_REMEDIES: dict[SplitName, str] = {
    "train": "nothing can be trained on it; prepare a longer log, or with smaller --validation-share and --test-share",
    "validation": "nothing can be evaluated on it; prepare a longer log, or with a larger --validation-share",
    "test": "'evaluate --side test' cannot be used; prepare a longer log, or with a larger --test-share",
}


class FileEntry(Typed):
    bytes: int
    sha256: str


class SplitCounts(Typed):
    """One side of the split. Queries are events with a next event in the same window that is a target."""

    users: int
    events: int = Field(description="Events in windows.")
    queries: int
    segments: int
    windows: int
    max_segments: int = Field(description="Segments in the fullest window.")
    left_out: int = Field(
        description="Events of this side in no window: those that stand alone after cutting or follow the last target."
    )

    @classmethod
    def of(cls, users: UserParts, side: SplitName, windows: Windows) -> Self:
        """The counts of a side, given its windows."""
        begins, ends = users.part(side)
        lengths = windows.segments["length"].astype(np.int64)
        return cls(
            users=int((ends > begins).sum()),
            events=int(lengths.sum()),
            queries=int(users.count_queries(side, windows.segments).sum()),
            segments=len(lengths),
            windows=len(windows.offsets) - 1,
            max_segments=int(np.diff(windows.offsets).max(initial=0)),
            left_out=int((ends - begins).sum()) - users.num_covered(side, windows.segments),
        )

    def fill(self, seq_len: int) -> float:
        """The share of slots that hold an event."""
        return self.events / (self.windows * seq_len) if self.windows else 0.0


class DatasetManifest(Typed):
    """manifest.json. Nothing in it depends on when or where the dataset was made."""

    format_version: int = FORMAT_VERSION
    seq_len: int = Field(description="Windows hold so many events unless a length is given on opening.")
    seed: int
    split: Split
    schema_: Schema = Field(alias="schema")
    num_users: int
    num_events: int
    num_items: int
    time_span: tuple[int, int]
    train: SplitCounts
    validation: SplitCounts
    test: SplitCounts | None = Field(None, description="Absent where there is no test side.")
    item_fields_filled: dict[str, int]
    event_fields_filled: dict[str, int]
    dropped: dict[str, int]
    user_rows: UserRows | None = Field(None, description="Of the users table; absent without one.")
    versions: dict[str, str]
    files: dict[str, FileEntry]
    checksum: str = Field("", description="The dataset's identity: this manifest, and so all bytes of all files.")

    def sides(self) -> dict[SplitName, SplitCounts]:
        """The sides of the split that exist, with their counts at the dataset's own seq_len."""
        counts: dict[SplitName, SplitCounts] = {"train": self.train, "validation": self.validation}
        return counts if self.test is None else {**counts, "test": self.test}

    def warnings(self) -> list[str]:
        """What a user should know before training: times that are surely misread, sides without a query."""
        return [
            *self._time_warnings(),
            *self._side_warnings(),
            *self._field_warnings(),
            *(self.user_rows.warnings(self.num_users) if self.user_rows else ()),
        ]

    def _time_warnings(self) -> list[str]:
        """Seconds declared as milliseconds all fall into January 1970; no log is from then."""
        events, last = self.schema_.events, self.time_span[1]
        if events.time_unit == "order" or not 0 <= self.time_span[0] <= last < _YEAR_1975_US:
            return []
        days = " to ".join(f"{np.datetime64(moment, 'us').astype('datetime64[s]')}" for moment in self.time_span)
        coarser = _COARSER_UNITS.get(events.time_unit, {})
        units = [unit for unit, factor in coarser.items() if _YEAR_1975_US <= last * factor < _YEAR_2100_US]
        advice = f" As time_unit = {units[0]!r} they are of this age" if units else ""
        return [f"all times of {events.timestamp!r} read as {days}: is time_unit = {events.time_unit!r} right?{advice}"]

    def _side_warnings(self) -> list[str]:
        return [
            f"the {side} side has no queries: it holds {counts.users:,} of {self.num_users:,} users, "
            f"none with an event to predict and one before it; {_REMEDIES[side]}"
            for side, counts in self.sides().items()
            if counts.queries == 0
        ]

    def _field_warnings(self) -> list[str]:
        """Fields that can teach nothing, as numbers with a decimal comma that --on-bad drop made missing."""
        events = {name: self.event_fields_filled.get(name) for name in self.schema_.events.fields}
        empty = [f"items.{name}" for name, count in self.item_fields_filled.items() if count == 0]
        empty += [f"events.{name}" for name, count in events.items() if count == 0]
        warnings = []
        for name in empty:
            reasons = [f"{rows:,} × {what}" for what, rows in self.dropped.items() if what.startswith(f"{name}: ")]
            why = f" ({'; '.join(reasons).replace(f'{name}: ', '')})" if reasons else ""
            warnings.append(f"{name} has no value at all{why}: correct the column, or take it out of the schema")
        return warnings

    def with_checksum(self) -> Self:
        """This manifest with its checksum."""
        return self.model_copy(update={"checksum": self._compute_checksum()})

    def _compute_checksum(self) -> str:
        return content_hash({key: value for key, value in self.to_values().items() if key != "checksum"})

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The manifest of a dataset folder, after its version and its checksum are checked."""
        path = folder / MANIFEST_FILE
        if not path.exists():
            raise DataError(
                f"{folder} holds no {MANIFEST_FILE}" if folder.exists() else f"{folder} does not exist",
                expected="a folder that 'habitus prepare' wrote",
                next_step="name the dataset's folder"
                if folder.exists()
                else f"habitus prepare EVENTS ITEMS --schema schema.toml --out {folder}",
            )
        try:
            version = json.loads(path.read_text(encoding="utf-8")).get("format_version")
        except (ValueError, AttributeError) as error:
            raise DataError(f"{path} cannot be read: {error}", next_step="prepare the dataset again") from error
        if version not in READABLE_VERSIONS:
            raise DataError(
                f"{folder} has format version {version}",
                expected=f"version {' or '.join(map(str, READABLE_VERSIONS))}",
                next_step="prepare the dataset again with this version of habitus",
            )
        manifest = cls.read(path)
        if manifest.checksum != manifest._compute_checksum():
            raise DataError(f"{path} has changed since it was written", next_step="prepare the dataset again")
        return manifest


def list_files(folder: Path) -> dict[str, FileEntry]:
    """Size and checksum of every file below `folder` that is not hidden, by relative name."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {
        name: FileEntry(bytes=(folder / name).stat().st_size, sha256=sha256_of(folder / name))
        for name in names
        if name != MANIFEST_FILE and not name.startswith(".")
    }


def verify_files(folder: Path, manifest: DatasetManifest, contents: bool) -> None:
    """Refuse a folder whose files are not those of the manifest; `contents` also compares every byte's hash."""
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.exists():
            problem = f"{path} is missing"
        elif path.stat().st_size != entry.bytes:
            problem = f"{path} has {path.stat().st_size:,} bytes, the manifest says {entry.bytes:,}"
        elif contents and sha256_of(path) != entry.sha256:
            problem = f"{path} has changed since it was prepared: its checksum is not the manifest's"
        else:
            continue
        raise DataError(problem, expected="the files as preparation wrote them", next_step="prepare the dataset again")


def require_file(folder: Path, manifest: DatasetManifest, name: str) -> Path:
    """The path of a file of the dataset; refused where the manifest does not have it, as with item arrays in parts."""
    if name not in manifest.files:
        raise DataError(
            f"{folder} has no {name}", next_step="use a newer version of habitus, or prepare the dataset again"
        )
    return folder / name
