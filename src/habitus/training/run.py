"""A run while it lasts: the model, the engine that trains it, and the folder that it is written to."""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from habitus.data import Dataset
from habitus.errors import ModelError, RunError
from habitus.evaluation import Evaluation, Ranks
from habitus.model import BehaviorModel, EmbeddingCache, check_same_fields, load_bundle, save_bundle
from habitus.progress import Note
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.training.checkpoints import Best, Checkpoint, State, newest_good, prune, save_checkpoint
from habitus.training.checks import Parent
from habitus.training.compiling import compiler_loading, is_worth_it, without_collecting
from habitus.training.cuda_graph import CapturedEngine
from habitus.training.engine import Engine
from habitus.training.engines import build_engine
from habitus.training.evaluating import evaluate_finished, evaluate_now, trajectory_points
from habitus.training.journal import Journal
from habitus.training.meter import Meter
from habitus.training.options import TrainOptions
from habitus.training.recording import Outcome, make_record, publish
from habitus.training.sharding import load_weights, must_shard, plain_model, shard, whole
from habitus.training.stages import Work
from habitus.training.vectors import catalogue_of

_LESS_IS_BETTER = ("loss", "perplexity", "entropy")


class Run:
    """One stage of one run in this process; under torchrun the first process writes for all."""

    def __init__(
        self, recipe: Recipe, dataset: Dataset, out: Path, parent: Parent | None, options: TrainOptions, *,
        device: torch.device, meter: Meter, on_save: Callable[[int], None], note: Note,
    ) -> None:  # fmt: skip
        self.recipe, self.dataset, self.out, self.parent, self.options = recipe, dataset, out, parent, options
        self.device, self.meter, self.on_save, self.note = device, meter, on_save, note
        self.ranks = Ranks()
        self.cache: EmbeddingCache | None = None  # of the frozen embedder, in stage 2
        found = self._checkpoint()
        self.state = found.state if found else self._fresh_state()
        with without_collecting():
            if device.type == "cuda" and is_worth_it(recipe, dataset, device, options.compile):
                compiler_loading()  # beside all that follows
            self.model = self._start()
            self.engine = self._engine()
        if found:
            self._go_on(found)
        if self.ranks.is_first:
            recipe.write(out / "recipe.toml")
        self.journal = Journal(out / "journal.jsonl", self.state.step, wanted=self.ranks.is_first)

    def _fresh_state(self) -> State:
        checksum = self.dataset.checksum
        return State(step=0, recipe_hash=self.recipe.hash(checksum), dataset_checksum=checksum, work={})

    def _checkpoint(self) -> Checkpoint | None:
        """The checkpoint to go on from; refused where it is of another recipe or dataset."""
        found = newest_good(self.out, self.note) if self.options.resume else None
        if found and found.state.recipe_hash != self._fresh_state().recipe_hash:
            raise RunError(
                f"{found.path} belongs to the run {found.state.recipe_hash[:12]}, "
                f"and this recipe on this dataset is {self._fresh_state().recipe_hash[:12]}",
                expected="the recipe and the dataset that the run was started with",
                next_step=f"see {self.out / 'recipe.toml'}, or name another folder",
            )
        return found

    def _start(self) -> BehaviorModel:
        """The model at its start: fresh in stage 1, the parent's with a frozen embedder in stage 2."""
        if self.parent is None:
            with self.device:  # millions of draws, which a GPU makes at once
                model = BehaviorModel(self.dataset.fields, self.recipe.model, seed=self.recipe.train.seed)
            return self._spread(model)
        bundle = load_bundle(self.parent.path, self.device)
        check_same_fields(bundle, self.dataset)
        self.cache = catalogue_of(bundle, self.dataset, self.out / "catalogue", self.parent.path, self.meter.phase)
        return self._spread(bundle.model.freeze().train())

    def _spread(self, model: BehaviorModel) -> BehaviorModel:
        if must_shard(model, self.options.shard, self.ranks.world):
            shard(model)
            self.note(f"weights are spread over {self.ranks.world} processes")
        return model

    def _engine(self) -> Engine | CapturedEngine:
        return build_engine(
            self.model, self.dataset, self.recipe, self.options, self.cache, self.device, self.ranks, self.note
        )

    def _go_on(self, found: Checkpoint) -> None:
        try:
            load_weights(self.model, found.weights)
        except RuntimeError as error:
            raise ModelError(f"{found.path} does not fit the recipe's model: {error}") from error
        self.engine.load_state(found.tensors, Work(**found.state.work))
        self.meter.take_over(found.state.seconds)
        self.note(f"going on from {found.path} at step {found.state.step:,}")

    def agreed(self, here: bool) -> bool:
        """Whether it holds on some process: a signal may reach them at different steps."""
        if self.ranks.world == 1:
            return here
        return any(bool(there) for there in self.ranks.gathered(torch.tensor([here], device=self.device)))

    def must_evaluate(self, step: int) -> bool:
        """Whether the recipe asks for an evaluation after this step that has not been made yet."""
        every = self.recipe.evaluate.every
        if not every or step % every or not 0 < step < self.recipe.train.steps:
            return False
        return not self.state.trajectory or self.state.trajectory[-1].step < step

    def must_save(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        every = self.options.save_every
        return bool(every) and step > 0 and step % every == 0

    def evaluate(self, step: int) -> None:
        """Evaluate in the middle of the run; the best checkpoint so far is saved at once."""
        with self.meter.evaluating():
            found = evaluate_now(
                plain_model(self.model), self.recipe, self.dataset, self.out, self.cache, self.meter.phase
            )
        self._take(found, step)
        if self.state.best is not None and self.state.best.step == step:
            self.save(step)

    def save(self, step: int) -> None:
        """Write a checkpoint and remove those that are no longer kept."""
        self.on_save(step)
        self.journal.flush()
        update = {"step": step, "work": asdict(self.engine.work()), "seconds": self.meter.seconds()}
        self.state = self.state.model_copy(update=update)
        weights, tensors = whole(self.model.state_dict()), whole(self.engine.state_tensors())
        if self.ranks.is_first:
            save_checkpoint(self.out, self.state, weights, tensors, self.recipe, self.dataset)
            prune(self.out, self.options.keep, self.state.best)
        self.ranks.wait()

    def finish(self, step: int) -> Record:
        """Write the bundle, evaluate it, and publish the Record."""
        if self.options.save_every or self.options.keep_checkpoints_at_end:
            self.save(step)
        bundle, model = self.out / "bundle", plain_model(self.model)
        if self.ranks.is_first:
            shutil.rmtree(bundle, ignore_errors=True)  # of a run that was killed after it had written it
            save_bundle(model, self.recipe, self.dataset, bundle)
        self.ranks.wait()
        with self.meter.evaluating():
            found = evaluate_finished(model, self.recipe, self.dataset, self.out, self.cache, self.meter.phase)
        if self.recipe.evaluate.every:
            self._take(found, step)
        return self._publish(step, evaluation=found)

    def fail(self, step: int, problem: str) -> Record:
        """Publish the Record of a run that cannot go on."""
        return self._publish(step, problem=problem)

    def _publish(self, step: int, evaluation: Evaluation | None = None, problem: str | None = None) -> Record:
        outcome = Outcome(
            steps=step,
            work=self.engine.work(),
            tail=self.engine.tail_means(),
            seconds=self.meter.seconds(),
            trajectory=list(self.state.trajectory),
            evaluation=evaluation,
            problem=problem,
            made_cache=self.cache is not None or (self.out / "catalogue").exists(),
            engine=self.engine.description,
        )
        record = make_record(
            self.recipe, self.dataset, self.parent, outcome, self.options, self.device, self.ranks.world
        )
        self.on_save(step)
        if self.ranks.is_first:
            publish(record, self.out / "record.json")
            if problem is None:
                prune(self.out, self.options.keep if self.options.keep_checkpoints_at_end else 0, self.state.best)
        self.ranks.wait()
        return record

    def _take(self, found: Evaluation, step: int) -> None:
        """Put an evaluation into the journal and the trajectory, and see whether it is the best."""
        points = trajectory_points(found, step)
        self.journal.write({"step": step, "metrics": {point.metric: point.value for point in points}})
        best, metric = self.state.best, self.options.best
        if metric is not None:
            if metric not in found.metrics:
                raise RunError(
                    f"best = {metric!r} is not among the metrics", expected=", ".join(p.metric for p in points)
                )
            value = found.metrics[metric].value
            sign = 1 if metric.split("/")[1] in _LESS_IS_BETTER else -1
            if best is None or best.metric != metric or sign * value < sign * best.value:
                best = Best(metric=metric, value=value, step=step)
        self.state = self.state.model_copy(update={"trajectory": (*self.state.trajectory, *points), "best": best})

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.journal.close()
