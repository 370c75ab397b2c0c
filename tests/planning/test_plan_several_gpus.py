"""What several GPUs exchange and how long a step of theirs takes, worked by hand."""

import math

import pytest

from habitus.planning.hardware import memory_of, rate_on
from habitus.planning.several_gpus import SharedStep, Sharing, reached
from habitus.sizing import H200_RATES, CellRequest, solve
from habitus.store import gpu_named

H200 = gpu_named("h200")


def test_bytes_of_a_step_by_hand() -> None:
    """Two GPUs, a million parameters, 1,000 queries and 500 items of width 100."""
    step = SharedStep(flops=1e12, trained=1_000_000, slots=1_000, joint_dim=100)
    assert step.gradient_bytes(2) == 4_000_000  # 2 · 1/2 · 4 bytes
    # Half of: 500 · 100 float32 there and back (400,000), and 1,000 · (600 + 32); the log-sum-exps, 8 bytes each.
    assert step.row_bytes(2) == (400_000 + 632_000) / 2 + 8_000
    # Stage 2: vectors once in bfloat16 (100,000), and two pools.
    frozen = SharedStep(flops=1e12, trained=1_000_000, slots=1_000, joint_dim=100, stage=2, pools=2)
    assert frozen.row_bytes(2) == 100_000 / 2 + 2 * (632_000 / 2 + 8_000)
    # One GPU sends nothing; of many, each sends nearly all gradients twice.
    assert step.gradient_bytes(1) == step.row_bytes(1) == 0
    assert step.gradient_bytes(1000) == pytest.approx(8e6, rel=2e-3)


def test_seconds_of_a_step_by_hand() -> None:
    """4·10¹⁴ FLOPs on four GPUs that reach 10¹⁴ each: one second, and what NVLink takes of 450 GB/s."""
    step = SharedStep(flops=4e14, trained=30_000_000_000, slots=1 << 20, joint_dim=128)
    on_four = Sharing(step, H200, 4, 1e14)
    gradients, rows = 1.5 * 4 * 30e9 / 450e9, step.row_bytes(4) / 450e9  # 0.4 s: hidden behind 2/3 s of backward
    assert gradients == pytest.approx(0.4)
    assert on_four.fast_seconds == pytest.approx(1 + rows)
    # Slow: half the bandwidth, nothing hidden, 12 + 3,577 messages of 25 µs; a step of 10¹⁴ reaches less than 4·10¹⁴.
    assert math.ceil(4 * 30e9 / 2**25) == 3577
    expected = reached(4e14) / reached(1e14) + 2 * (gradients + rows) + 3589 * 25e-6
    assert on_four.slow_seconds == pytest.approx(expected)
    # Sixteen leave the machine: the 225 GB of gradients pass its links at 450 GB/s and its eight ports at 400.
    on_sixteen = Sharing(step, H200, 16, 1e14)
    assert on_sixteen.send_seconds(225e9) == pytest.approx(0.5 + 0.5625)
    late = 1.0625 - 2 / 3 * 0.25
    assert on_sixteen.fast_seconds == pytest.approx(0.25 + late + step.row_bytes(16) * (1 / 450e9 + 1 / 400e9))


def test_smaller_steps_reach_less_and_the_smallest_take_as_long() -> None:
    assert reached(3.0e12) == pytest.approx(H200_RATES[1e16])
    assert reached(math.sqrt(3.0e12 * 2.0e13)) == pytest.approx(math.sqrt(H200_RATES[1e16] * H200_RATES[1e17]))
    assert reached(4.7e11 / 4) == pytest.approx(H200_RATES[1e15] / 4)
    assert reached(1e17) == pytest.approx(H200_RATES[1e18])


def test_more_gpus_widen_the_range_and_say_what_is_assumed() -> None:
    cell = solve(CellRequest(flops=1e18, share=0.02, data_ratio=15, batch_sequences=512))
    one = rate_on(H200, 1, 1e18)
    eight, sixteen = (rate_on(H200, gpus, 1e18, [(1e18, cell)]) for gpus in (8, 16))
    assert one.measured and not eight.measured
    assert one.fast / one.slow == pytest.approx(2)
    assert one.fast < eight.slow < eight.fast < 8 * one.fast
    assert eight.fast / eight.slow > 2 and sixteen.fast / sixteen.slow > eight.fast / eight.slow
    assert "NVLink (450 GB/s" in eight.how and "InfiniBand NDR (50 GB/s" in sixteen.how
    assert "PCIe 4.0 (32 GB/s" in rate_on(gpu_named("l4"), 2, 1e16).how
    # Without a cell the measured step of the budget stands for it.
    assert rate_on(H200, 8, 1e18).fast == pytest.approx(eight.fast, rel=0.1)


def test_replicated_weights_are_not_divided() -> None:
    """Below 500M parameters every GPU holds all weights, gradients and moments; the rest is shared."""
    cell = solve(CellRequest(flops=1e17, share=0.02, data_ratio=15, batch_sequences=64))
    fixed = sum(cell.bytes[part] for part in ("weights", "gradients", "optimizer"))
    rest = cell.bytes["total"] - fixed
    room = int(22 * 1024**3 * 0.88)

    def fits(weights: int, others: int, gpus: int) -> bool | None:
        scaled = cell.bytes | {"weights": weights, "gradients": 0, "optimizer": 0, "total": weights + others}
        return memory_of(cell.model_copy(update={"bytes": scaled}), gpu_named("l4"), gpus).fits

    assert fixed > 0 and rest > 0
    assert fits(room // 2, 4 * (room // 2 - 8), 4) is True
    assert fits(room // 2 + 64, 4 * (room // 2), 4) is False
    assert fits(2 * room, 0, 4) is False  # more GPUs do not help what each of them holds
