"""An axis under design: sizes cells, refuses them with a reason, and collects them as recipes. No torch."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from habitus.errors import ConfigError
from habitus.recipe import DataRecipe, EvaluateRecipe, ModelRecipe, Recipe, TrainRecipe
from habitus.sizing import Cell, Request, cell_of, joint_dims, solve, stage2_step_flops
from habitus.sweeps.cells import Design, Facts, LeftOut, Planned, row_of
from habitus.sweeps.preset import Axis, Preset
from habitus.sweeps.prior_results import Known
from habitus.sweeps.rates import Rates, rate_grid

Init = Literal["default", "mup_lr", "mup"]
_ONE_EPOCH = 1.001  # a rounded-up last window is no second pass


@dataclass(frozen=True)
class Asked:
    """What a user may change about an axis of a preset."""

    budgets: tuple[float, ...] = ()  # empty: the preset's
    learning_rates: Rates = None
    seeds: int | None = None
    allow_repeats: bool = False  # run cells that pass one epoch, instead of listing them


@dataclass
class Draft:
    """Collects the cells of one axis, and what had to be left out."""

    axis: str
    preset: Preset
    facts: Facts
    known: Known
    asked: Asked
    winners: dict[float, Planned] = field(default_factory=dict)  # budget: the stage-1 winner in the store
    cells: list[Planned] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    parents: list[Planned] = field(default_factory=list)
    decided: list[str] = field(default_factory=list)

    @property
    def choice(self) -> Axis:
        return self.preset.axis(self.axis)

    def budgets(self) -> tuple[float, ...]:
        return self.asked.budgets or self.preset.budgets_of(self.axis)

    def share(self) -> float:
        """The share that later axes use, noted with its source."""
        share, why = self.known.share(self.preset.common.share)
        self.decided.append(why)
        return share

    def finished(self) -> Design:
        cells = tuple(self._each_once())
        return Design(self.axis, cells, tuple(self.left_out), tuple(self.parents), tuple(dict.fromkeys(self.decided)))

    def add_solved(
        self, budget: float, label: str, wanted: dict[str, Any], *, init: Init = "default", **request: Any
    ) -> None:
        """Size the cell nearest to a request at the budget's batch and add it, or list why not."""
        batch = self.preset.batch_sequences(budget)
        cell = self.solved(budget, batch, wanted, **request)
        if cell is not None:
            self._add(cell, budget, label, wanted, init=init)

    def add_share(self, budget: float, label: str, wanted: dict[str, Any], **embedder: Any) -> None:
        """Size the cell of a share, or of a joint_dim, at the preset's D/N and add it, or list why not."""
        cell = self.of_share(budget, wanted, **embedder)
        if cell is not None:
            self._add(cell, budget, label, wanted)

    def of_share(
        self, budget: float, wanted: dict[str, Any], *, share: float | None = None, joint_dim: int | None = None
    ) -> Cell | None:
        """The cell of a share or a joint_dim at the preset's D/N."""
        choice, common = self.preset.share, self.preset.common
        batch, head_dim = self.preset.batch_sequences(budget), choice.head_dim or common.head_dim
        if choice.depth is None:
            return self.solved(
                budget, batch, wanted, share=share, joint_dim=joint_dim, data_ratio=common.data_ratio, head_dim=head_dim
            )
        # Small models come in few widths: take the nearest D/N there is at each joint_dim, then the nearest share.
        at_depth = list(self._of_depth(budget, batch, choice.depth, head_dim or 8, joint_dim))
        if not at_depth:
            self._leave_out(budget, wanted, f"cannot be built: no width of depth {choice.depth} fits the budget")
            return None
        found = min(at_depth, key=lambda c: abs(math.log(c.embedder_share / (share or c.embedder_share))))
        return found.model_copy(update={"wanted": {"flops": budget, "data_ratio": common.data_ratio}})

    def _of_depth(self, budget: float, batch: int, depth: int, head_dim: int, joint_dim: int | None) -> Iterator[Cell]:
        """For each joint_dim the cell of that depth whose D/N is nearest to the preset's, while within a factor 1.5."""
        for h in [joint_dim] if joint_dim else joint_dims():
            best, best_miss = None, math.log(1.5)
            for width in range(head_dim, 4096, head_dim):
                model = ModelRecipe(
                    joint_dim=h,
                    text_len=self.facts.text_len,
                    text_depth=self.preset.common.text_depth,
                    width=width,
                    depth=depth,
                    head_dim=head_dim,
                    copying=self.preset.common.copying,
                )
                steps = round(budget / self._cell(model, batch, 1).flops_per_step)
                if steps < 1:
                    break
                cell = self._cell(model, batch, steps)
                miss = math.log(cell.data_ratio / self.preset.common.data_ratio)
                if abs(miss) < best_miss:
                    best, best_miss = cell, abs(miss)
                if miss < -1:
                    break
            if best is not None:
                yield best
            elif h > 4 and h != joint_dim:
                return

    def add_model(self, model: ModelRecipe, budget: float, flops: float, batch: int, label: str) -> None:
        """Add a given model at another batch size, with a constant rate and a trajectory, for as much compute."""
        step = self._cell(model, batch, 1).flops_per_step
        cell = self._cell(model, batch, max(1, round(flops / step)), {"flops": flops})
        self._add(cell, budget, label, {"batch_sequences": batch}, trajectory=True)

    def add_stage_two(self, budget: float, parent: Planned, num_negatives: int) -> None:
        """Add the frozen stage with K extra negatives, or list why not."""
        choice, wanted = self.preset.negatives, {"num_negatives": num_negatives}
        if num_negatives > self.facts.num_items:
            self._leave_out(budget, wanted, f"K is more than the catalogue's {self.facts.num_items:,} items")
            return
        model, batch = parent.recipe.model, choice.batch_sequences
        step = stage2_step_flops(
            parent.cell.contextualizer_params, B=batch, L=self.facts.seq_len, h=model.joint_dim, K=num_negatives
        )
        steps = round(budget / step)
        cell = self._cell(model, batch, max(1, steps), {"flops": budget}, stage=2, num_negatives=num_negatives)
        if self._affordable(cell, budget, wanted, choice.min_steps, steps):
            stage = {"stage": 2, "parent": parent.hash, "num_negatives": num_negatives}
            rates = rate_grid(self.asked.learning_rates, choice.learning_rates, self.preset.rule_rate(batch, budget))
            self._add_runs(cell, model, budget, f"K={num_negatives}", wanted, rates, 0, stage)

    def solved(self, budget: float, batch: int, wanted: dict[str, Any], **request: Any) -> Cell | None:
        """The cell nearest to a request, or None with a line among those left out."""
        common = self.preset.common
        values = {
            "flops": budget,
            "batch_sequences": batch,
            "seq_len": self.facts.seq_len,
            "text_len": self.facts.text_len,
            "text_depth": common.text_depth,
            "head_dim": common.head_dim,
            "copying": common.copying,
            **request,
        }
        try:
            found = solve(Request(**values), self.facts.inputs)
        except ConfigError as error:
            self._leave_out(budget, wanted, f"cannot be built: {error.problem}")
            return None
        return self._cell(found.model, batch, found.steps, found.wanted)

    def _add(
        self,
        cell: Cell,
        budget: float,
        label: str,
        wanted: dict[str, Any],
        *,
        init: Init = "default",
        trajectory: bool = False,
    ) -> None:
        if not self._affordable(cell, budget, wanted, self.preset.common.min_steps):
            return
        choice = self.preset.batch
        every = max(1, min(choice.max_every, cell.steps // choice.evaluations)) if trajectory else 0
        rule = self.preset.rule_rate(cell.batch_sequences, budget)
        rates = rate_grid(self.asked.learning_rates, self.choice.learning_rates, rule)
        if self.axis == "init" and self.asked.learning_rates is None:
            rates = sorted(self.preset.init.rates)
        model = cell.model.model_copy(update={"init": init})
        changed = {"schedule": "constant"} if trajectory else {}
        self._add_runs(cell, model, budget, label, wanted, rates, every, changed)

    def _add_runs(
        self,
        cell: Cell,
        model: ModelRecipe,
        budget: float,
        label: str,
        wanted: dict[str, Any],
        rates: Iterable[float],
        every: int,
        changed: dict[str, Any],
    ) -> None:
        """One row per learning rate and seed."""
        common = self.preset.common
        train = {
            "batch_sequences": cell.batch_sequences,
            "steps": cell.steps,
            "optimizer": common.optimizer,
            "schedule": common.schedule,
            "warmup": common.warmup,
            "weight_decay": common.weight_decay,
            "dropout": common.dropout,
            "clip": common.clip,
            "precision": common.precision,
            "log_q": common.log_q,
            **changed,
        }
        for rate in rates:
            for seed in range(self.asked.seeds or self.choice.seeds):
                recipe = Recipe(
                    data=DataRecipe(seq_len=self.facts.seq_len),
                    model=model,
                    train=TrainRecipe(**train, learning_rate=rate, seed=seed),
                    evaluate=EvaluateRecipe(
                        **self.preset.evaluate.to_values(), every=every, regimes=self.choice.regimes
                    ),
                )
                self.cells.append(row_of(recipe, cell, self.facts, budget=budget, label=label, wanted=wanted))

    def _cell(self, model: ModelRecipe, batch: int, steps: int, wanted: Any = None, **stage: Any) -> Cell:
        return cell_of(
            model,
            batch_sequences=batch,
            steps=steps,
            seq_len=self.facts.seq_len,
            inputs=self.facts.inputs,
            precision=self.preset.common.precision,
            optimizer=self.preset.common.optimizer,
            wanted=wanted,
            catalogue_items=self.facts.num_items,
            **stage,
        )

    def _affordable(
        self, cell: Cell, budget: float, wanted: dict[str, Any], min_steps: int, steps: int | None = None
    ) -> bool:
        steps = cell.steps if steps is None else steps
        epochs = self.facts.epochs(cell.batch_sequences, steps)
        if steps < min_steps:
            reason = (
                f"not affordable: the budget buys {steps:,} steps of {cell.flops_per_step:.3g} FLOPs, "
                f"fewer than {min_steps}"
            )
        elif epochs > _ONE_EPOCH and not self.asked.allow_repeats:
            passes = f"{epochs:.2f}" if epochs > 1.005 else "just over 1"
            reason = (
                f"beyond one epoch: {passes} passes over {self.facts.train_windows:,} training windows, which "
                "the laws leave out (--allow-repeats runs it)"
            )
        else:
            return True
        self._leave_out(budget, {**cell.wanted, **wanted}, reason)
        return False

    def _leave_out(self, budget: float, wanted: dict[str, Any], reason: str) -> None:
        out = LeftOut(flops_budget=budget, wanted=wanted, reason=reason)
        if out not in self.left_out:
            self.left_out.append(out)

    def _each_once(self) -> Iterator[Planned]:
        """The cells without those that came out as one and the same model, which are listed."""
        seen: dict[str, Planned] = {}
        for planned in self.cells:
            first = seen.setdefault(planned.hash, planned)
            if first is planned:
                yield planned
            else:
                reason = f"the same cell as {first.row.cell_id}: the nearest model that can be built"
                self._leave_out(planned.row.flops_budget, planned.row.wanted, reason)
