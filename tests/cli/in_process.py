"""The command line in this process: what it prints and its exit code, without the seconds that imports take."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from habitus import cli


def habitus_here(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`habitus` with these arguments, as `main` runs it."""
    words, stdout, stderr = [*map(str, arguments)], io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        _restored(words),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return subprocess.CompletedProcess(words, code, stdout.getvalue(), stderr.getvalue())


@contextlib.contextmanager
def _restored(words: list[str]) -> Iterator[None]:
    """Arguments for `main`; those of before and the environment afterwards."""
    arguments, environment = sys.argv, dict(os.environ)
    sys.argv = ["habitus", *words]
    try:
        yield
    finally:
        sys.argv = arguments
        os.environ.clear()
        os.environ.update(environment)
