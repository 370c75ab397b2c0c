"""A run while it lasts: the model, the engine that trains it, and the folder that it is written to."""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from habitus.data import Dataset
from habitus.errors import ConfigError, ModelError, RunError
from habitus.evaluation import Evaluation, ModelScorer, Ranks, evaluate, evaluate_contexts
from habitus.model import (
    BehaviorModel,
    Bundle,
    BundleManifest,
    EmbeddingCache,
    bundle_in_memory,
    check_same_fields,
    load_bundle,
    save_bundle,
)
from habitus.progress import Note
from habitus.recipe import Recipe
from habitus.record import Record, TrajectoryPoint
from habitus.store import direction_of
from habitus.training.batches import HostBatches
from habitus.training.checkpoints import (
    BestCheckpoint,
    Checkpoint,
    CheckpointState,
    Start,
    prune_checkpoints,
    prune_trunk,
    save_checkpoint,
    trunk_reaches,
)
from habitus.training.cuda_graph import CapturedEngine
from habitus.training.device_batches import device_bytes
from habitus.training.environment import load_compiler, pause_garbage_collection, should_compile
from habitus.training.items import FrozenVectors, open_catalogue
from habitus.training.journal import (
    JOURNAL_FILE,
    Journal,
    Meter,
    TrainingOutcome,
    copy_journal,
    make_record,
    publish_record,
    write_card,
)
from habitus.training.options import ParentRun, TrainOptions, evaluate_options
from habitus.training.parallel import (
    can_be_captured,
    full_model,
    full_tensors,
    is_sharded,
    load_weights,
    must_shard,
    shard,
)
from habitus.training.step import EagerEngine, Work
from habitus.units import format_bytes

_SHARE_FOR_DATA = 0.5  # of the free device memory


class TrainingRun:
    """One stage of one run in this process; under torchrun the first process writes for all."""

    def __init__(
        self, recipe: Recipe, dataset: Dataset, out: Path, parent: ParentRun | None, options: TrainOptions, *,
        device: torch.device, meter: Meter, on_save: Callable[[int], None], note: Note,
    ) -> None:  # fmt: skip
        self.recipe, self.dataset, self.out, self.parent, self.options = recipe, dataset, out, parent, options
        self.device, self.meter, self.on_save, self.note = device, meter, on_save, note
        self.ranks = Ranks()
        self.cache: EmbeddingCache | None = None  # of the frozen embedder, in stage 2
        self.trunk = None if options.trunk is None else Path(options.trunk)
        self._trunk_end = -1  # the step at which a state is left for others
        checkpoint = Start(out, recipe, dataset.checksum, self.trunk, options.resume, note).find(self.ranks)
        if self.trunk is not None:
            if self.ranks.is_first and checkpoint and checkpoint.path.is_relative_to(self.trunk):
                copy_journal(self.trunk, out)
            stable = recipe.train.stable_steps
            self._trunk_end = -1 if self.ranks.answer_of_first(trunk_reaches(self.trunk, stable)) else stable
        self.state = checkpoint.state if checkpoint else self._initial_state()
        with pause_garbage_collection():
            if device.type == "cuda" and should_compile(recipe, dataset, device, options.compile):
                load_compiler()  # while all that follows is done
            self.model = self._build_model()
            self.engine = self._build_engine()
        if checkpoint:
            self._resume(checkpoint)
        if self.ranks.is_first:
            recipe.write(out / "recipe.toml")
        self.journal = Journal(out / JOURNAL_FILE, self.state.step, writes=self.ranks.is_first)

    # What the loop asks for ----------------------------------------------------------------------------------------

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on some process: a signal may reach them at different steps."""
        if self.ranks.world == 1:
            return flag
        return any(bool(other) for other in self.ranks.gather(torch.tensor([flag], device=self.ranks.host_device)))

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

    def ends_trunk(self, step: int) -> bool:
        """Whether this step is the end of the stable part, and the trunk does not reach as far yet."""
        return step == self._trunk_end

    def evaluate(self, step: int) -> None:
        """Evaluate in the middle of the run; the best checkpoint so far is saved at once."""
        with self.meter.evaluating():
            evaluation = self._evaluate_now(full_model(self.model))
        self._note_evaluation(evaluation, step)
        if self.state.best is not None and self.state.best.step == step:
            self.save(step)

    def save(self, step: int) -> None:
        """Write a checkpoint and remove those that are no longer kept."""
        self._write_checkpoint(self.out, step)
        if self.ranks.is_first:
            prune_checkpoints(self.out, self.options.keep, self.state.best)
        self.ranks.barrier()

    def save_trunk(self, step: int) -> None:
        """Leave the state for longer runs to begin from."""
        assert self.trunk is not None
        self._trunk_end = -1
        self._write_checkpoint(self.trunk, step)
        if self.ranks.is_first:
            copy_journal(self.out, self.trunk)
            prune_trunk(self.trunk, step)
        self.ranks.barrier()

    def finish(self, step: int) -> Record:
        """Write the bundle, evaluate it, and publish the Record."""
        if self.options.save_every or self.options.keep_checkpoints_at_end:
            self.save(step)
        bundle, model = self.out / "bundle", full_model(self.model)
        if self.ranks.is_first:
            shutil.rmtree(bundle, ignore_errors=True)  # of a run that was killed after it had written it
            save_bundle(model, self.recipe, self.dataset, bundle)
        self.ranks.barrier(bundle / "bundle.json")
        if self.recipe.data.include_validation:
            return self._publish(step)  # nothing is left to evaluate on but the test side
        with self.meter.evaluating():
            evaluation = self._evaluate_bundle(model)
        if self.recipe.evaluate.every:
            self._note_evaluation(evaluation, step)
        return self._publish(step, evaluation=evaluation)

    def fail(self, step: int, problem: str) -> Record:
        """Publish the Record of a run that cannot go on."""
        return self._publish(step, problem=problem)

    def close(self) -> None:
        self.engine.close()
        with contextlib.suppress(OSError):
            self.journal.close()

    def _write_checkpoint(self, folder: Path, step: int) -> None:
        self.on_save(step)
        self.journal.flush()
        threads = torch.get_num_threads() if self.device.type == "cpu" else None
        work, seconds = asdict(self.engine.work()), self.meter.seconds()
        update = {"step": step, "work": work, "seconds": seconds, "threads": threads}
        self.state = self.state.model_copy(update=update)
        weights, tensors = full_tensors(self.model.state_dict()), full_tensors(self.engine.state_tensors())
        with self.ranks.together():
            if self.ranks.is_first:
                save_checkpoint(folder, self.state, weights, tensors, self.recipe, self.dataset)

    # How it begins -------------------------------------------------------------------------------------------------

    def _initial_state(self) -> CheckpointState:
        checksum = self.dataset.checksum
        return CheckpointState(step=0, recipe_hash=self.recipe.hash(checksum), dataset_checksum=checksum, work={})

    def _build_model(self) -> BehaviorModel:
        """The model at its start: fresh or the parent's in stage 1, the parent's with a frozen embedder in stage 2."""
        bundle = None if self.parent is None else load_bundle(self.parent.path, self.device)
        if bundle is not None:
            check_same_fields(bundle, self.dataset)
        if bundle is None or self.recipe.train.stage == 1:
            with self.device:  # millions of draws, which a GPU makes at once
                model = BehaviorModel(self.dataset.fields, self.recipe.model, seed=self.recipe.train.seed)
            if bundle is not None:
                model.begin_with(bundle.model)
        else:
            assert self.parent is not None
            progress = self.meter.show_phase
            self.cache = open_catalogue(bundle, self.dataset, self.out / "catalogue", self.parent.path, progress)
            model = bundle.model.freeze().train()
        if must_shard(model, self.options.shard, self.ranks):
            shard(model)
            self.note(f"weights are sharded over {self.ranks.world} processes")
        return model

    def _build_engine(self) -> EagerEngine | CapturedEngine:
        """The engine of the run: captured steps where that is possible, and a note where it is not."""
        recipe, dataset, options, device = self.recipe, self.dataset, self.options, self.device
        vectors = None if self.cache is None else FrozenVectors(self.cache, device, recipe.train.precision, self.ranks)
        obstacle = self._capture_obstacle(vectors)
        # Memory and compile caches differ between machines, and processes that step in different ways wait forever.
        if self.any_rank(bool(obstacle)) and not obstacle:
            obstacle = "another process cannot capture its steps"
        if (options.compile or options.capture) and obstacle:
            raise ConfigError(f"steps cannot be captured: {obstacle}", next_step="omit --compile and --capture")
        if not obstacle:
            compiled = self.ranks.answer_of_first(should_compile(recipe, dataset, device, options.compile))
            how = " and compiled" if compiled else "; compiling would take longer than it saves"
            self.note("steps are captured" + how)
            table = None if vectors is None else vectors.table
            return CapturedEngine(self.model, dataset, recipe, device, table, compiled=compiled, ranks=self.ranks)
        if device.type == "cuda":
            self.note(f"steps run one operation at a time, several times slower: {obstacle}")
        if recipe.train.pool_sequences is not None and (self.ranks.world > 1 or options.accumulate > 1):
            raise ConfigError(
                f"train.pool_sequences is {recipe.train.pool_sequences}, and the batch is divided among processes or "
                "parts",
                expected="one process and the batch in one part",
                next_step="omit --accumulate and torchrun, or train.pool_sequences",
            )
        batches = HostBatches(dataset, recipe, device, self.ranks, options.accumulate)
        return EagerEngine(self.model, dataset, recipe, batches, vectors)

    def _capture_obstacle(self, vectors: FrozenVectors | None) -> str:
        """Why steps are not captured; empty where they are."""
        if self.device.type != "cuda":
            return "the device is not a GPU"
        if self.options.capture is False:
            return "--no-capture was given"
        if not can_be_captured(self.ranks):
            return "the processes exchange messages by gloo, not by NCCL"
        if any(is_sharded(parameter) for parameter in self.model.parameters()):
            return "the weights are sharded over the processes"
        if self.recipe.train.batch_sequences % self.ranks.world:
            return f"{self.ranks.world} processes do not divide a batch of {self.recipe.train.batch_sequences}"
        if self.recipe.train.pool_sequences is not None:
            return "the batch has several pools of candidates"
        if self.options.accumulate > 1:
            return f"the batch comes in {self.options.accumulate} parts"
        if vectors is not None and vectors.table is None:
            return "the item vectors do not fit the device"
        needed, free = device_bytes(self.dataset, self.ranks.world), torch.cuda.mem_get_info(self.device)[0]
        if needed > _SHARE_FOR_DATA * free:
            return f"the data takes {format_bytes(needed)} of the {format_bytes(free)} that are free on the device"
        return ""

    def _resume(self, checkpoint: Checkpoint) -> None:
        try:
            load_weights(self.model, checkpoint.weights)
        except RuntimeError as error:
            raise ModelError(f"{checkpoint.path} does not fit the recipe's model: {error}") from error
        self.engine.load_state(checkpoint.tensors, Work(**checkpoint.state.work))
        self.meter.add(checkpoint.state.seconds)
        self.note(f"going on from {checkpoint.path} at step {checkpoint.state.step:,}")

    # Evaluations, by the same pipeline as `habitus evaluate`; and the end ---------------------------------------------

    def _evaluate_now(self, model: BehaviorModel) -> Evaluation:
        """The evaluation of a model in the middle of its training."""
        bundle = bundle_in_memory(model, self.recipe, self.dataset, self.out / "bundle")
        scratch = self.out / ".catalogue-now"  # a learning embedder's vectors are worth nothing afterwards
        if self.ranks.is_first:
            shutil.rmtree(scratch, ignore_errors=True)
        try:
            return self._evaluate_with(bundle, scratch)
        finally:
            if self.ranks.is_first:
                shutil.rmtree(scratch, ignore_errors=True)

    def _evaluate_bundle(self, model: BehaviorModel) -> Evaluation:
        """The evaluation of the bundle that was written; its catalogue's vectors stay in the run if they are needed."""
        manifest = BundleManifest.read(self.out / "bundle" / "bundle.json")
        dataset = self.dataset
        bundle = Bundle(self.out / "bundle", manifest, self.recipe, dataset.schema, dataset.encoders, model)
        return self._evaluate_with(bundle, self.out / "catalogue", self.recipe.evaluate.contexts)

    def _evaluate_with(self, bundle: Bundle, catalogue: Path, contexts: tuple[int, ...] = ()) -> Evaluation:
        """The evaluation of a bundle, with the vectors of a frozen embedder or those built into a folder."""
        cache, progress = self.cache, self.meter.show_phase
        if cache is None and evaluate_options(self.recipe).ranks_catalogue:
            cache = open_catalogue(bundle, self.dataset, catalogue, None, progress)
        was_training = bundle.model.training
        bundle.model.eval()
        dataset = self.dataset.with_users(1)  # queries and slices are the same whoever was trained on
        try:
            scorer = ModelScorer(bundle, dataset, cache, ranks=self.ranks)
            options = evaluate_options(self.recipe)
            evaluation = evaluate(dataset, scorer, options, progress=progress)
            if contexts:
                evaluation = evaluation.joined(evaluate_contexts(dataset, scorer, contexts, options, progress))
            return evaluation
        finally:
            bundle.model.train(was_training)

    def _note_evaluation(self, evaluation: Evaluation, step: int) -> None:
        """Put an evaluation into the journal and the trajectory, and see whether it is the best."""
        points = [  # over all queries; slices are left to the Record's own metrics
            TrajectoryPoint(step=step, metric=name, value=metric.value)
            for name, metric in evaluation.metrics.items()
            if name.count("/") == 1
        ]
        self.journal.write({"step": step, "metrics": {point.metric: point.value for point in points}})
        best, metric = self.state.best, self.options.best
        if metric is not None:
            if metric not in evaluation.metrics:
                raise RunError(
                    f"best = {metric!r} is not among the metrics", expected=", ".join(p.metric for p in points)
                )
            value = evaluation.metrics[metric].value
            sign = 1 if direction_of(metric) == "min" else -1
            if best is None or best.metric != metric or sign * value < sign * best.value:
                best = BestCheckpoint(metric=metric, value=value, step=step)
        self.state = self.state.model_copy(update={"trajectory": (*self.state.trajectory, *points), "best": best})

    def _publish(self, step: int, evaluation: Evaluation | None = None, problem: str | None = None) -> Record:
        outcome = TrainingOutcome(
            steps=step,
            work=self.engine.work(),
            tail=self.engine.tail.means(),
            seconds=self.meter.seconds(),
            trajectory=list(self.state.trajectory),
            evaluation=evaluation,
            problem=problem,
            built_cache=self.cache is not None or (self.out / "catalogue").exists(),
            engine=self.engine.description,
        )
        record = make_record(
            self.recipe, self.dataset, self.parent, outcome, self.options, self.device, self.ranks.world
        )
        self.on_save(step)
        if self.ranks.is_first:
            if self.options.card:
                write_card(record, self.dataset, self.out, self.note)
            publish_record(record, self.out / "record.json")
            if problem is None:
                keep = self.options.keep if self.options.keep_checkpoints_at_end else 0
                prune_checkpoints(self.out, keep, self.state.best)
        self.ranks.barrier(self.out / "record.json")
        return record
