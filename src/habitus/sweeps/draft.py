"""An axis under design: sizes cells, refuses them with a reason, and collects them as recipes. No torch."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from habitus.errors import ConfigError
from habitus.recipe import DataRecipe, EvaluateRecipe, Init, ModelRecipe, Recipe, TrainRecipe
from habitus.sizing import Cell, CellRequest, cell_of, joint_dims, solve, stage2_step_flops
from habitus.store import LeftOut
from habitus.sweeps.cells import DatasetFacts, Design, PlannedRun, plan_run
from habitus.sweeps.preset import AxisSettings, Preset
from habitus.sweeps.prior_results import PriorResults
from habitus.sweeps.request import SweepRequest, rate_grid

Shape = tuple[int, int]  # width, depth
_ONE_EPOCH = 1.001  # a rounded-up last window is no second pass


@dataclass
class Draft:
    """Collects the cells of one axis, and what had to be left out."""

    axis: str
    preset: Preset
    facts: DatasetFacts
    prior: PriorResults
    request: SweepRequest
    winners: dict[float, PlannedRun] = field(default_factory=dict)  # budget: the stage-1 winner in the store
    cells: list[PlannedRun] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    parents: list[PlannedRun] = field(default_factory=list)
    decided: list[str] = field(default_factory=list)

    @property
    def settings(self) -> AxisSettings:
        return self.preset.axis(self.axis)

    def budgets(self) -> tuple[float, ...]:
        return self.request.budgets or self.preset.budgets_of(self.axis)

    def share(self) -> float:
        """The share that later axes use, noted with its source."""
        share, why = self.prior.share(self.preset.common.share)
        self.decided.append(why)
        return share

    def to_design(self) -> Design:
        cells = tuple(self._distinct_runs())
        return Design(self.axis, cells, tuple(self.left_out), tuple(self.parents), tuple(dict.fromkeys(self.decided)))

    def add_solved(
        self, budget: float, label: str, wanted: dict[str, Any], *, init: Init = "default", **sizes: Any
    ) -> None:
        """Add the cell nearest to the requested sizes at the budget's batch, or list why not."""
        batch = self.preset.batch_sequences(budget)
        cell = self.solve_cell(budget, batch, wanted, **sizes)
        if cell is not None:
            self._add(cell, budget, label, wanted, init=init)

    def add_share(self, budget: float, label: str, wanted: dict[str, Any], **embedder: Any) -> None:
        """Add the cell of a share, or of a joint_dim, at the preset's D/N, or list why not."""
        cell = self.share_cell(budget, wanted, **embedder)
        if cell is not None:
            self._add(cell, budget, label, wanted)

    def share_cell(
        self, budget: float, wanted: dict[str, Any], *, share: float | None = None, joint_dim: int | None = None
    ) -> Cell | None:
        """The cell of a share or a joint_dim at the preset's D/N."""
        settings, common = self.preset.share, self.preset.common
        batch, head_dim = self.preset.batch_sequences(budget), settings.head_dim or common.head_dim
        if settings.depth is None:
            return self.solve_cell(
                budget, batch, wanted, share=share, joint_dim=joint_dim, data_ratio=common.data_ratio, head_dim=head_dim
            )
        # Small models come in few widths: take the nearest D/N there is at each joint_dim, then the nearest share.
        cells = list(self._cells_of_depth(budget, batch, settings.depth, head_dim or 8, joint_dim))
        if not cells:
            self._leave_out(budget, wanted, f"cannot be built: no width of depth {settings.depth} fits the budget")
            return None
        nearest = min(cells, key=lambda c: abs(math.log(c.embedder_share / (share or c.embedder_share))))
        return nearest.model_copy(update={"wanted": {"flops": budget, "data_ratio": common.data_ratio}})

    def _cells_of_depth(
        self, budget: float, batch: int, depth: int, head_dim: int, joint_dim: int | None
    ) -> Iterator[Cell]:
        """For each joint_dim the cell of that depth whose D/N is nearest to the preset's, while within a factor 1.5."""
        every = [h for h in joint_dims() if h >= self.preset.common.min_joint_dim]
        for h in [joint_dim] if joint_dim else every:
            best, best_distance = None, math.log(1.5)
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
                log_ratio = math.log(cell.data_ratio / self.preset.common.data_ratio)
                if abs(log_ratio) < best_distance:
                    best, best_distance = cell, abs(log_ratio)
                if log_ratio < -1:
                    break
            if best is not None:
                yield best
            elif h > every[0] and h != joint_dim:
                return

    def add_shape(self, budget: float, shape: Shape, share: float) -> None:
        """Add the allocation cell of a (width, depth), or list why not."""
        width, depth = shape
        wanted = {"width": width, "depth": depth, "embedder_share": share}
        least, sizes = self.preset.common.min_joint_dim, {"width": width, "depth": depth}
        cell = self.solve_cell(budget, self.preset.batch_sequences(budget), wanted, share=share, **sizes)
        if cell is not None and cell.model.joint_dim < least:
            cell = self.solve_cell(budget, self.preset.batch_sequences(budget), wanted, joint_dim=least, **sizes)
        if cell is not None:
            self._add(cell, budget, f"{width}x{depth}", wanted)

    def repeat_sizes(self, budget: float) -> None:
        """Run a small, the middle and a large size of a budget with more seeds, and of the largest with more rates.

        Of six sizes and more the outermost are left out: they cost most and say least about where the best one is.
        """
        settings = self.preset.allocation
        ordered = sorted(self._nearest_rule(budget), key=lambda planned: planned.cell.params)
        if len(ordered) < 3 or self.request.learning_rates is not None or self.request.seeds is not None:
            return  # the user says how often cells are run
        ordered = ordered[1:-1] if len(ordered) >= 6 else ordered
        top = budget == max(self.budgets())
        for planned in (ordered[0], ordered[len(ordered) // 2], ordered[-1]):
            rule = self.preset.rule_rate(planned.cell.batch_sequences, budget)
            for seed in range(1, settings.replicates_at(budget)):
                self.cells.append(planned.with_seed(seed, self.facts))
            for multiple in settings.top_rates if top else ():
                rate = float(f"{multiple * rule:.12g}")
                self.cells.append(planned.with_learning_rate(rate, self.facts))

    def repeat_counts(self, budget: float) -> None:
        """Run the fewest, the middle and the most extra negatives of a budget with more seeds."""
        counts = [planned for planned in self._nearest_rule(budget) if planned.recipe.train.num_negatives]
        ordered = sorted(counts, key=lambda planned: planned.recipe.train.num_negatives)
        if len(ordered) < 3 or self.request.learning_rates is not None or self.request.seeds is not None:
            return
        for planned in (ordered[0], ordered[len(ordered) // 2], ordered[-1]):
            for seed in range(1, self.preset.negatives.replicates_at(budget)):
                self.cells.append(planned.with_seed(seed, self.facts))

    def _nearest_rule(self, budget: float) -> list[PlannedRun]:
        """Of each cell of a budget the run whose rate is nearest to the rule's."""
        cells: dict[str, PlannedRun] = {}
        for planned in self.cells:
            first = cells.get(planned.row.cell_id, planned)
            if planned.row.flops_budget == budget and self._off_rule(planned) <= self._off_rule(first):
                cells[planned.row.cell_id] = planned
        return list(cells.values())

    def _off_rule(self, planned: PlannedRun) -> float:
        """How far a run's rate is from the rule's, in logarithms."""
        rule = self.preset.rule_rate(planned.cell.batch_sequences, planned.row.flops_budget)
        return abs(math.log(planned.row.learning_rate / rule))

    def add_batch(
        self, model: ModelRecipe, budget: float, batch: int, *, pool: int | None = None, times: int = 1
    ) -> None:
        """Add a model at another batch size for the same compute, with a constant rate, evaluated all along.

        With `pool`, candidates are those of so many windows. With `times`, the same run goes on for so long.
        """
        flops = self.preset.batch.flops_multiple * budget
        steps = max(1, round(flops / self._cell(model, batch, 1).flops_per_step))
        cell = self._cell(model, batch, times * steps, {"flops": times * flops})
        label, pools = f"B={batch}", {} if pool in (None, batch) else {"pool_sequences": pool}
        if pools:
            label += f"-pool={pool}"
        train: dict[str, Any] = {"schedule": "constant", **pools}
        if times > 1:
            label += f"-x{times}"
            train["warmup_steps"] = round(self.preset.common.warmup * steps)
        wanted = {"batch_sequences": batch, **pools}
        settings = self.preset.batch
        self._add(cell, budget, label, wanted, train, max(1, min(settings.max_every, steps // settings.evaluations)))

    def add_batch_size(self, model: ModelRecipe, budget: float, batch: int) -> None:
        """Add a model at another batch size for the same compute, with the schedule of all other runs."""
        wanted = {"batch_sequences": batch}
        steps = round(budget / self._cell(model, batch, 1).flops_per_step)
        cell = self._cell(model, batch, max(1, steps), {"flops": budget})
        if self._is_affordable(cell, budget, wanted, self.preset.batch_size.min_steps, steps):
            rule = self.preset.rule_rate(batch, budget)
            rates = rate_grid(self.request.learning_rates, self.settings.learning_rates, rule)
            self._add_runs(cell, model, budget, f"B={batch}", wanted, rates, 0, {})

    def add_stage_two(self, budget: float, parent: PlannedRun, num_negatives: int) -> None:
        """Add the frozen stage with K extra negatives, or list why not."""
        settings, wanted = self.preset.negatives, {"num_negatives": num_negatives}
        most = self.facts.num_candidates or self.facts.num_items
        if num_negatives > most:
            self._leave_out(budget, wanted, f"K is more than the catalogue's {most:,} items")
            return
        model, batch = parent.recipe.model, settings.batch_sequences
        step = stage2_step_flops(
            parent.cell.contextualizer_params, B=batch, L=self.facts.seq_len, h=model.joint_dim, K=num_negatives
        )
        steps = round(budget / step)
        cell = self._cell(model, batch, max(1, steps), {"flops": budget}, stage=2, num_negatives=num_negatives)
        if self._is_affordable(cell, budget, wanted, settings.min_steps, steps):
            stage = {"stage": 2, "parent": parent.hash, "num_negatives": num_negatives}
            rates = rate_grid(
                self.request.learning_rates, settings.learning_rates, self.preset.rule_rate(batch, budget)
            )
            self._add_runs(cell, model, budget, f"K={num_negatives}", wanted, rates, 0, stage)

    def add_lengths(self, model: ModelRecipe, data: DataRecipe, dropout: float) -> None:
        """Add a model that passes over a share of the users, once for each number of passes; or list why not."""
        settings = self.preset.passes
        batch, windows = settings.batch_sequences, self.facts.windows_of(data)
        lengths = {passes: max(1, round(passes * windows / batch)) for passes in sorted(settings.passes)}
        lengths = {passes: steps for passes, steps in lengths.items() if self._is_long(model, data, passes, steps)}
        train = {
            "schedule": "wsd",
            "warmup_steps": round(settings.warmup * min(lengths.values(), default=0)),
            "decay_share": settings.decay_share,
            "optimizer": settings.optimizer,
            "dropout": dropout,
            "log_q": settings.log_q,
        }
        rule = settings.learning_rate * math.sqrt(batch / 512)
        rates = rate_grid(self.request.learning_rates, settings.learning_rates, rule)
        for passes, steps in lengths.items():
            wanted = {"passes": passes, "dropout": dropout, "user_share": data.user_share, "user_part": data.user_part}
            users = f"{data.user_share:g}" + (f".{data.user_part}" if settings.num_parts > 1 else "")
            label = f"{model.joint_dim}+{model.width}x{model.depth}-users={users}-dropout={dropout:g}-passes={passes:g}"
            cell = self._cell(model, batch, steps)
            if not self.request.budgets or cell.flops in self.request.budgets:
                self._add_runs(cell, model, cell.flops, label, wanted, rates, 0, train, data)

    def _is_long(self, model: ModelRecipe, data: DataRecipe, passes: float, steps: int) -> bool:
        settings = self.preset.passes
        if steps >= settings.min_steps:
            return True
        flops = self._cell(model, settings.batch_sequences, steps).flops
        wanted = {"passes": passes, "user_share": data.user_share, "user_part": data.user_part}
        windows = self.facts.windows_of(data)
        self._leave_out(
            flops, wanted, f"too short: {steps} steps over {windows:,} windows, fewer than {settings.min_steps}"
        )
        return False

    def solve_cell(self, budget: float, batch: int, wanted: dict[str, Any], **sizes: Any) -> Cell | None:
        """The cell nearest to the requested sizes; None, and listed with the reason, where there is none."""
        common = self.preset.common
        values = {
            "flops": budget,
            "batch_sequences": batch,
            "seq_len": self.facts.seq_len,
            "text_len": self.facts.text_len,
            "text_depth": common.text_depth,
            "head_dim": common.head_dim,
            "copying": common.copying,
            **sizes,
        }
        try:
            cell = solve(CellRequest(**values), self.facts.inputs)
        except ConfigError as error:
            self._leave_out(budget, wanted, f"cannot be built: {error.problem}")
            return None
        return self._cell(cell.model, batch, cell.steps, cell.wanted)

    def _add(
        self,
        cell: Cell,
        budget: float,
        label: str,
        wanted: dict[str, Any],
        train: dict[str, Any] | None = None,
        every: int = 0,
        *,
        init: Init = "default",
    ) -> None:
        # Steps to a target are what a trajectory measures, so that few of them are no reason to leave it out.
        if not self._is_affordable(cell, budget, wanted, 1 if every else self.preset.common.min_steps):
            return
        rule = self.preset.rule_rate(cell.batch_sequences, budget)
        rates = rate_grid(self.request.learning_rates, self.settings.learning_rates, rule)
        if self.axis == "init" and self.request.learning_rates is None:
            rates = sorted(self.preset.init.rates)
        model = cell.model.model_copy(update={"init": init})
        self._add_runs(cell, model, budget, label, wanted, rates, every, train or {})

    def add_cell(
        self,
        cell: Cell,
        budget: float,
        label: str,
        wanted: dict[str, Any],
        rates: Iterable[float],
        train: dict[str, Any],
        evaluate: dict[str, Any] | None = None,
    ) -> bool:
        """Add a cell of any window length at given rates; False, and listed with the reason, where it is too dear."""
        if not self._is_affordable(cell, budget, wanted, self.preset.common.min_steps):
            return False
        data = DataRecipe(seq_len=cell.seq_len)
        self._add_runs(cell, cell.model, budget, label, wanted, rates, 0, train, data, evaluate)
        return True

    def _add_runs(
        self,
        cell: Cell,
        model: ModelRecipe,
        budget: float,
        label: str,
        wanted: dict[str, Any],
        rates: Iterable[float],
        every: int,
        train_changes: dict[str, Any],
        data: DataRecipe | None = None,
        evaluate_changes: dict[str, Any] | None = None,
    ) -> None:
        """Add one run per learning rate and seed."""
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
            **train_changes,
        }
        for rate in rates:
            for seed in range(self.request.seeds or self.settings.seeds):
                recipe = Recipe(
                    data=data or DataRecipe(seq_len=self.facts.seq_len),
                    model=model,
                    train=TrainRecipe(**train, learning_rate=rate, seed=seed),
                    evaluate=EvaluateRecipe(
                        **{
                            **self.preset.evaluate.to_values(),
                            "every": every,
                            "regimes": self.settings.regimes,
                            **(evaluate_changes or {}),
                        }
                    ),
                )
                self.cells.append(plan_run(recipe, cell, self.facts, budget=budget, label=label, wanted=wanted))

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

    def _is_affordable(
        self, cell: Cell, budget: float, wanted: dict[str, Any], min_steps: int, steps: int | None = None
    ) -> bool:
        steps = cell.steps if steps is None else steps
        data = DataRecipe(seq_len=cell.seq_len)
        epochs = self.facts.epochs(cell.batch_sequences, steps, data)
        if steps < min_steps:
            reason = (
                f"not affordable: the budget buys {steps:,} steps of {cell.flops_per_step:.3g} FLOPs, "
                f"fewer than {min_steps}"
            )
        elif epochs > _ONE_EPOCH and not self.request.allow_repeats:
            passes = f"{epochs:.2f}" if epochs > 1.005 else "just over 1"
            reason = (
                f"beyond one epoch: {passes} passes over {self.facts.windows_of(data):,} training windows, which "
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

    def _distinct_runs(self) -> Iterator[PlannedRun]:
        """Every run once; those that came out as the same model as an earlier one are listed."""
        by_hash: dict[str, PlannedRun] = {}
        for planned in self.cells:
            first = by_hash.setdefault(planned.hash, planned)
            if first is planned:
                yield planned
            else:
                reason = f"the same cell as {first.row.cell_id}: the nearest model that can be built"
                self._leave_out(planned.row.flops_budget, planned.row.wanted, reason)


def centred_shapes(preset: Preset, prior: PriorResults, budget: float, share: float) -> tuple[list[Shape], str]:
    """The neighbouring shapes of the ladder whose middle is nearest to the expected best size.

    The preset's table holds at the preset's share. At another share a parameter costs more or less per event, since
    those of the embedder work on all tokens of an item, and the best size goes as the root of what compute buys.
    """
    settings = preset.allocation
    expected = prior.size(budget)
    if expected is None:
        table_budget, params = min(settings.centres, key=lambda row: abs(math.log(row[0] / budget)))
        tokens = preset.world.text_len
        relative_cost = (1 + (tokens - 1) * share) / (1 + (tokens - 1) * preset.common.share)
        expected = params * (budget / table_budget / relative_cost) ** 0.5, "the preset's table"
    size, why = expected
    sizes = [12 * depth * width * width / (1 - share) for width, depth in settings.ladder]
    count = min(settings.num_shapes, len(sizes))

    def distance(first: int) -> float:
        middle = sum(math.log(s) for s in sizes[first : first + count]) / count
        return abs(middle - math.log(size))

    first = min(range(len(sizes) - count + 1), key=distance)
    return list(settings.ladder[first : first + count]), f"{size:.3g} parameters ({why})"
