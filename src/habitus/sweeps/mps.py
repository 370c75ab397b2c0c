"""Several processes on one GPU at the same time, by NVIDIA's multi-process service where it is installed.

Without it kernels of different processes take turns, and small models leave most of the chip idle. The service is
started once per process that runs sweeps, with pipes of its own, and ends with it. Where CUDA_MPS_PIPE_DIRECTORY is
set already, the user has decided, and nothing is started.
"""

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from habitus.progress import Note

_CONTROL = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_SECONDS = 20.0
# A context on the first device, without the seconds that importing torch takes.
_PROBE = """
import ctypes
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
"""


def mps_environment(note: Note) -> dict[str, str]:
    """The environment in which processes share this machine's GPU; empty where they take turns."""
    if _PIPES in os.environ:
        return {}
    environment, outcome = _start_service()
    note(outcome)
    return environment


@cache
def _start_service() -> tuple[dict[str, str], str]:
    """Start the service, once; its environment, and a sentence on the outcome."""
    control = shutil.which(_CONTROL)
    if control is None:
        return {}, f"no {_CONTROL} here: workers take turns on the GPU"
    folder = Path(tempfile.mkdtemp(prefix="habitus-mps-"))  # short: it holds sockets
    environment = {_PIPES: str(folder / "pipes"), _LOGS: str(folder / "logs")}
    for name in environment.values():
        Path(name).mkdir()
    atexit.register(_stop_service, control, environment, folder)
    variables = os.environ | environment
    try:
        subprocess.run([control, "-d"], env=variables, check=True, capture_output=True, timeout=_SECONDS)
        subprocess.run([sys.executable, "-c", _PROBE], env=variables, check=True, capture_output=True, timeout=_SECONDS)
    except (subprocess.SubprocessError, OSError) as error:
        return {}, f"{_CONTROL} does not work here ({type(error).__name__}): workers take turns on the GPU"
    return environment, "workers share the GPU (MPS)"


def _stop_service(control: str, environment: dict[str, str], folder: Path) -> None:
    """Stop the service and leave nothing behind."""
    with contextlib.suppress(subprocess.SubprocessError, OSError):  # it never ran, or is gone
        subprocess.run([control], input=b"quit\n", env=os.environ | environment, capture_output=True, timeout=_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
