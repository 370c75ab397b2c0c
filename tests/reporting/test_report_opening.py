"""The sentence beside the first picture."""

from types import SimpleNamespace

from habitus.laws import saturating
from habitus.reporting.opening import _describe
from habitus.store import RunRow


def run(axis: str, budget: float, batch: float, recall: float) -> RunRow:
    return RunRow(axis=axis, budget=budget, cell_id=f"{axis}{batch}", learning_rate=1e-3, seed=0, init="default",
                  chosen=True, knobs={"batch_sequences": batch},
                  metrics={"catalogue/recall@10": recall, "train/loss": -recall})  # fmt: skip


def test_a_batch_that_reached_more_than_all_sizes_is_said() -> None:
    sizes = {1e11: [run("allocation", 1e11, 8, 0.17)], 3e11: [run("allocation", 3e11, 8, 0.186)]}
    batches = [run("batch_size", 6e11, 8, 0.18), run("batch_size", 6e11, 32, 0.1952)]
    study = SimpleNamespace(best_rate_runs=lambda axis, needs: batches, law=lambda *_: None, plan=None)
    said = "The best of these runs has {} {}, at 3\u00b710\u00b9\u00b9 FLOPs"
    told = _describe(study, "catalogue/recall@10", sizes)  # type: ignore[arg-type]
    best = said.format("catalogue/recall@10", "0.1860")
    assert told == best + ". With 32 windows per step it reached 0.1952 at 6\u00b710\u00b9\u00b9."
    # More compute at the sizes' own batch says nothing of batches.
    batches[:] = [run("batch_size", 6e11, 8, 0.1952), run("batch_size", 6e11, 32, 0.19)]
    assert _describe(study, "catalogue/recall@10", sizes) == best + "."  # type: ignore[arg-type]
    # Batches of other sizes have other candidates: their training losses are not compared.
    assert "windows" not in _describe(study, "train/loss", sizes)  # type: ignore[arg-type]


def test_the_frontier_is_of_the_batch_that_its_runs_have() -> None:
    """Another batch may reach more there, which these runs cannot tell."""
    compute = [1e11, 2e11, 4e11, 8e11, 1.6e12]
    sizes = {C: [run("allocation", C, 8, 0.5 - 40 * C**-0.2)] for C in compute}
    law = saturating(compute, [runs[0].metrics["catalogue/recall@10"] for runs in sizes.values()], direction="max")
    study = SimpleNamespace(best_rate_runs=lambda axis, needs: [], law=lambda *_: law, plan=None)
    assert "The frontier of 8 windows per step reaches 0." in _describe(study, "catalogue/recall@10", sizes)  # type: ignore[arg-type]
    sizes[1.6e12] = [run("allocation", 1.6e12, 16, 0.36)]
    assert "The frontier reaches 0." in _describe(study, "catalogue/recall@10", sizes)  # type: ignore[arg-type]
