"""How several GPUs divide a step: what each computes, what they send each other, and how long that takes.

Not measured: no run on several GPUs has been timed. The bytes are those that `habitus.training` sends; the bandwidths
are of the vendors' datasheets; the two ends of the range differ in what overlaps and in what a smaller step reaches.

Letters: W GPUs, F nominal FLOPs of a step, P trained parameters, M queries (slots), n distinct items, h joint_dim.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from habitus.sizing import H200_RATES, Cell
from habitus.store import Gpu

GPUS_PER_MACHINE = 8  # beyond it messages leave the machine
_UNIQUE = 0.5  # distinct items per slot, as sizing takes them before any data is known
_BACKWARD = 2 / 3  # of a step's time, in which gradients leave
_REACHED = 0.5  # of a link's bandwidth, at the slow end
_MESSAGE_SECONDS = 25e-6  # that a message takes however short it is, at the slow end; assumed
_GRADIENT_MESSAGE = 32 * 2**20  # bytes
_ROW_MESSAGES = 12  # of one pool: rows there and back, queries, scores, sums, weights

# The measured steps of one H200 by budget (benchmarks/results/train-h200.json): nominal FLOPs, parameters, slots and
# joint_dim, for a budget whose cell is not known yet.
_MEASURED_CELLS = {
    1e15: (4.7e11, 2_433_901, 64 * 256, 28),
    1e16: (3.0e12, 7_160_197, 128 * 256, 52),
    1e17: (2.0e13, 21_351_745, 256 * 256, 96),
    1e18: (1.3e14, 68_228_265, 512 * 256, 168),
}
# Nominal FLOPs of these steps and what they reached: a smaller step reaches less.
MEASURED_STEPS = {_MEASURED_CELLS[budget][0]: rate for budget, rate in H200_RATES.items()}


@dataclass(frozen=True)
class SharedStep:
    """A step that several GPUs take together."""

    flops: float  # F
    trained: int  # P
    slots: int  # M
    joint_dim: int  # h
    stage: int = 1
    pools: int = 1  # of candidates

    @classmethod
    def of_cell(cls, cell: Cell) -> "SharedStep":
        """The step of a planned cell."""
        first = cell.stage == 1
        trained = cell.contextualizer_params + (cell.embedder_params + cell.vocabulary_params if first else 0)
        slots, pools = cell.batch_sequences * cell.seq_len, 2 if cell.num_negatives else 1
        return cls(cell.flops_per_step, trained, slots, cell.model.joint_dim, cell.stage, pools)

    @classmethod
    def measured_near(cls, flops: float) -> "SharedStep":
        """The measured step of a budget, between two of them by logarithms."""
        step, trained, slots, joint_dim = (
            _between({budget: cell[part] for budget, cell in _MEASURED_CELLS.items()}, flops) for part in range(4)
        )
        return cls(step, round(trained), round(slots), round(joint_dim))

    def gradient_bytes(self, gpus: int) -> float:
        """That each GPU sends: an all-reduce of float32, 2 (W-1)/W · 4P."""
        return 2 * (gpus - 1) / gpus * 4 * self.trained

    def row_bytes(self, gpus: int) -> float:
        """That each GPU sends of rows, and waits for.

        The items' vectors, there and back in float32 in stage 1, there alone in bfloat16 in stage 2: (W-1)/W · n·h of
        each. For every pool the queries in bfloat16, their gradients in float32, places, scores, sums and weights:
        (W-1)/W · M·(6h + 32), and the log-sum-exp of every query from every process: (W-1) · 8M.
        """
        share, items = (gpus - 1) / gpus, _UNIQUE * self.slots
        vectors = items * self.joint_dim * (2 * 4 if self.stage == 1 else 2)
        scores = share * self.slots * (6 * self.joint_dim + 32) + (gpus - 1) * 8 * self.slots
        return share * vectors + self.pools * scores


@dataclass(frozen=True)
class Sharing:
    """A step on so many GPUs, one of which takes it at `rate` FLOP/s."""

    step: SharedStep
    gpu: Gpu
    gpus: int
    rate: float

    def send_seconds(self, sent: float) -> float:
        """For bytes that each GPU sends: within a machine by its link; between machines, each of which sends them once,
        through the ports of all of its GPUs."""
        within = sent / (1e9 * self.gpu.link_gbytes)
        if self.gpus <= GPUS_PER_MACHINE:
            return within
        return within + sent / GPUS_PER_MACHINE / (1e9 * self.gpu.network_gbytes)

    @cached_property
    def fast_seconds(self) -> float:
        """Every GPU as fast as alone; gradients leave during backward; rows at the full bandwidth."""
        compute = self.step.flops / self.gpus / self.rate
        late = self.send_seconds(self.step.gradient_bytes(self.gpus)) - _BACKWARD * compute
        return compute + self.send_seconds(self.step.row_bytes(self.gpus)) + max(0.0, late)

    @cached_property
    def slow_seconds(self) -> float:
        """A smaller step reaches less; nothing overlaps; half the bandwidth; every message takes a while."""
        alone = reached(self.step.flops / self.gpus) / reached(self.step.flops)
        compute = self.step.flops / self.gpus / (self.rate * min(1.0, alone))
        sent = self.step.gradient_bytes(self.gpus) + self.step.row_bytes(self.gpus)
        messages = _ROW_MESSAGES * self.step.pools + math.ceil(4 * self.step.trained / _GRADIENT_MESSAGE)
        return compute + self.send_seconds(sent) / _REACHED + messages * _MESSAGE_SECONDS

    def describe(self) -> str:
        """What is assumed, in a sentence."""
        rows, gradients = self.step.row_bytes(self.gpus) / 1e6, self.step.gradient_bytes(self.gpus) / 1e6
        link = f"{self.gpu.link} ({self.gpu.link_gbytes:g} GB/s one way, datasheet)"
        if self.gpus > GPUS_PER_MACHINE:
            link += f" and between machines of eight {self.gpu.network} ({self.gpu.network_gbytes:g} GB/s per device)"
        single = self.step.flops / self.gpus / self.rate
        low, high = single / self.slow_seconds, single / self.fast_seconds
        return (
            f"{self.gpus} devices at {low:.0%} to {high:.0%} of their sum, not measured: each sends {rows:.3g} MB of "
            f"rows and {gradients:.3g} MB of gradients per step by {link}; at best gradients hide behind backward, "
            "at worst nothing does, half the bandwidth is reached and a smaller step is slower, as measured on one H200"
        )


def reached(step_flops: float) -> float:
    """FLOP/s of an H200 in steps of so many; below the smallest that was measured a step takes as long as that one."""
    smallest = min(MEASURED_STEPS)
    return _between(MEASURED_STEPS, step_flops) * min(1.0, step_flops / smallest)


def _between(values: Mapping[float, float], at: float) -> float:
    """Straight lines in logarithms between the known values, level beyond them."""
    known = sorted(values)
    for low, high in itertools.pairwise(known):
        if at <= high:
            share = max(0.0, math.log(at / low) / math.log(high / low))
            return values[low] ** (1 - share) * values[high] ** share
    return values[known[-1]]
