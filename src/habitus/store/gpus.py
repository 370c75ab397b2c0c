"""GPUs: what each holds and how fast its vendor says it is."""

import re
from dataclasses import dataclass

from habitus.errors import ConfigError
from habitus.typed import suggest_name


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str  # as --gpu spells it
    model: str  # as it stands in the name that torch reports
    gibibytes: float
    peak_tflops: float  # dense bfloat16, the vendor's figure
    # One way, by the vendors' datasheets: half of NVLink's or PCIe's figure for both ways, and a port of the network
    # for each GPU (InfiniBand NDR has 400 Gb/s, HDR 200; 100 Gb/s where such GPUs are usually rented).
    link: str = "PCIe 4.0"  # to GPUs of the same machine
    link_gbytes: float = 32
    network: str = "a 100 Gb/s network"  # to other machines
    network_gbytes: float = 12.5

    @property
    def peak_flops(self) -> float:
        """Dense bfloat16 FLOP/s."""
        return self.peak_tflops * 1e12


# A new GPU is a line here.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", "H200", 139, 989, "NVLink", 450, "InfiniBand NDR", 50),
        Gpu("h100", "H100", 79, 989, "NVLink", 450, "InfiniBand NDR", 50),
        Gpu("b200", "B200", 178, 2250, "NVLink", 900, "InfiniBand NDR", 50),
        Gpu("a100", "A100", 79, 312, "NVLink", 300, "InfiniBand HDR", 25),
        Gpu("l40s", "L40S", 44, 362),
        Gpu("a10g", "A10G", 22, 70),
        Gpu("l4", "L4", 22, 121),
        Gpu("rtx4090", "RTX 4090", 23.5, 165),
    )
}


def gpu_named(name: str) -> Gpu:
    """The GPU that a user means, whatever the case: `h200`, `H200`, `NVIDIA-H200`."""
    gpu = GPUS.get(name.lower().replace("-", "").replace("_", "").replace("nvidia", "").strip())
    if gpu is None:
        raise ConfigError(
            f"--gpu {name!r} is not a GPU that habitus knows ({suggest_name(name.lower(), list(GPUS))})",
            expected=f"one of {', '.join(GPUS)}",
            next_step="omit --gpu and give --flops; laws from a study bring the rates of its own hardware",
        )
    return gpu


def gpu_reported(reported: str) -> Gpu | None:
    """The GPU behind a name that torch reports, as in 'NVIDIA H100 80GB HBM3'; None for others."""
    for gpu in GPUS.values():
        # Not L4 in 'NVIDIA L40', nor a desktop card in 'RTX 4090 Laptop GPU'.
        if re.search(rf"{re.escape(gpu.model)}(?![0-9A-Za-z]| Laptop)", reported):
            return gpu
    return None
