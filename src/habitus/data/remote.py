"""Object stores, through Arrow's file systems: files are fetched before they are read.

s3:// is tested against a server of the same interface; gs:// takes the same path through Arrow and is untested.
Credentials, region and endpoint are those of the environment (AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL, ...).
"""

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import repeat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from habitus.errors import DataError, HabitusError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_URL = re.compile(r"(s3|gs):/+(.+)")  # pathlib makes one slash of two
# Words of the services, after the operation that failed.
_DENIED = ("access_denied", "access denied", "invalid_access_key", "invalidaccesskey", "signature", "forbidden", "403",
           "permission_denied", "unauthenticated")  # fmt: skip
_UNREACHABLE = ("network_connection", "couldn't connect", "could not connect", "timeout", "curlcode", "resolve host")
_CREDENTIALS = {
    "s3": "check AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and the bucket's policy",
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS, and the bucket's roles",
}
_FETCHED_AT_ONCE = 8
_NO_BUCKET = ("no_such_bucket", "nosuchbucket", "bucket does not exist")


def is_remote(path: str | Path) -> bool:
    """Whether a path names an object store."""
    return _URL.fullmatch(str(path)) is not None


def fetch_table(role: str, pattern: str, folder: Path) -> dict[Path, str]:
    """The files that a URL or a glob in one names, copied into `folder`: local path -> URL, in order."""
    url = plain_url(pattern)
    with explained(url, "read"):
        store, key = open_store(url)
        keys = _matching_keys(store, key, url)
        if not keys:
            raise DataError(f"{role}: {url} does not exist", expected="an object or a glob that matches some")
        folder.mkdir(parents=True, exist_ok=True)
        # Numbers, since a key may be no name of a file; its suffixes say what it holds.
        paths = [folder / f"{n:06d}{''.join(PurePosixPath(key).suffixes[-2:])}" for n, key in enumerate(keys)]
        with ThreadPoolExecutor(_FETCHED_AT_ONCE) as pool:
            list(pool.map(fetch_file, repeat(store), keys, paths))
    return {path: f"{url.split(':')[0]}://{key}" for path, key in zip(paths, keys, strict=True)}


@contextmanager
def named_as(files: dict[Path, str]) -> Iterator[None]:
    """Errors of the block name files by their URLs and not by those of their copies."""

    def rename(text: str) -> str:
        for path, url in files.items():
            text = text.replace(str(path), url)
        return text

    try:
        yield
    except HabitusError as error:
        texts = (rename(text) for text in (error.problem, error.expected, error.next_step))
        problem, expected, next_step = texts
        raise type(error)(problem, expected=expected, next_step=next_step) from error


def plain_url(url: str | Path) -> str:
    match = _URL.fullmatch(str(url))
    assert match is not None
    return f"{match[1]}://{match[2].rstrip('/')}"


def _key(url: str) -> str:
    return url.split("://", 1)[1]


def open_store(url: str) -> "tuple[FileSystem, str]":
    """The file system of a URL, and the path in it: bucket/key."""
    from pyarrow import fs

    bucket = _key(url).split("/")[0]
    if url.startswith("gs://"):
        return fs.GcsFileSystem(), _key(url)
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    options = {"retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=5), "connect_timeout": 10}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        server = urlsplit(endpoint)
        options |= {"endpoint_override": server.netloc, "scheme": server.scheme}
        options |= {"region": region or "us-east-1"}
    else:
        options |= {"region": region or fs.resolve_s3_region(bucket)}
    return fs.S3FileSystem(**options), _key(url)


def _matching_keys(store: "FileSystem", key: str, url: str) -> list[str]:
    """Objects that a key or a glob names, sorted as the paths of files are."""
    from pyarrow import fs

    info = store.get_file_info(key)
    if info.type == fs.FileType.File:
        return [key]
    if info.type == fs.FileType.Directory:
        raise DataError(f"{url} is a folder", expected="an object or a glob", next_step=f"try '{url}/*.parquet'")
    parts = key.split("/")
    fixed = next((n for n, part in enumerate(parts) if re.search(r"[*?\[]", part)), len(parts))
    if not 0 < fixed < len(parts):
        return []
    rest = parts[fixed:]
    folder = "/".join(parts[:fixed])
    selector = fs.FileSelector(folder, recursive=len(rest) > 1 or rest == ["**"], allow_not_found=fixed > 1)
    found = [info.path for info in store.get_file_info(selector) if info.type == fs.FileType.File]
    return sorted((path for path in found if _matches(path.split("/")[fixed:], rest)), key=lambda path: path.split("/"))


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[skipped:], pattern[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def fetch_file(store: "FileSystem", key: str, path: Path) -> None:
    from pyarrow import fs

    fs.copy_files(key, str(path), store, fs.LocalFileSystem())


@contextmanager
def explained(url: str, verb: str) -> Iterator[None]:
    """Errors of an object store as errors that say what to do; those of the local disk as they are."""
    try:
        yield
    except OSError as error:
        text = str(error).strip()
        words = text.partition("AWS Error")[2].lower() or (text.lower() if "google" in text.lower() else "")
        if not words:
            raise
        reason = text.splitlines()[0]
        if any(word in words for word in _DENIED):
            raise DataError(
                f"{url} cannot be {verb}: access is denied ({reason})",
                expected="credentials that may list, read and, for --out, write and delete in this bucket",
                next_step=_CREDENTIALS[url.partition(":")[0]],
            ) from error
        if any(word in words for word in _NO_BUCKET):
            raise DataError(f"{url} cannot be {verb}: there is no such bucket ({reason})") from error
        if any(word in words for word in _UNREACHABLE):
            raise DataError(
                f"{url} cannot be {verb}: the object store does not answer ({reason})",
                next_step="check the network, AWS_REGION and AWS_ENDPOINT_URL",
            ) from error
        raise DataError(f"{url} cannot be {verb}: {reason}") from error
