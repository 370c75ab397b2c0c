"""The HTTP side of serving without its extra."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["uvicorn", "fastapi", "prometheus_client"])
def test_a_missing_package_names_the_extra(package: str) -> None:
    script = (
        f"import sys; sys.modules[{package!r}] = None\n"  # as if it were not installed
        "from habitus.errors import ConfigError\n"
        "try:\n    from habitus.serving import Service, run_server\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "is not installed" in done.stdout and "pip install 'habitus[serve]'" in done.stdout, done.stderr
