"""The bundle: a trained model on disk with all that is needed to embed a new item or a history. Never a pickle."""

import hashlib
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from habitus.data import Dataset, Encoders, load_tokenizer
from habitus.errors import ModelError
from habitus.events import Schema
from habitus.files import sha256_of, staged_folder, write_atomic
from habitus.model.behavior import BehaviorModel
from habitus.recipe import Recipe
from habitus.typed import Sealed, content_hash

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FORMAT_VERSION = 1
_TOKENIZER = "tokenizer.json"
_BEST = "best"  # in the folder of `habitus train --data`: a link to the stage that validation chose


class BundleManifest(Sealed):
    """bundle.json: what the bundle was trained on, and the checksum of every other file."""

    format_version: int = _FORMAT_VERSION
    dataset_checksum: str
    files: dict[str, str] = Field(description="SHA-256 by name.")


@dataclass(frozen=True)
class Bundle:
    """A bundle in memory: the model on its device, and how raw values become its inputs."""

    path: Path
    manifest: BundleManifest
    recipe: Recipe
    schema: Schema
    encoders: Encoders
    model: BehaviorModel

    @property
    def checksum(self) -> str:
        return content_hash(self.manifest.to_values())

    @property
    def run_path(self) -> Path:
        """The run that the bundle belongs to; its own folder where it was moved elsewhere."""
        return self.path.parent if self.path.name == "bundle" else self.path

    @cached_property
    def embedder_checksum(self) -> str:
        """Of all that decides an item's vector: the embedder's weights and how raw values become its inputs.

        Stage 2 freezes the embedder, so a run of stage 2 shares this with its parent, and with it the cache.
        """
        weights = {
            name: hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy()).hexdigest()
            for name, tensor in self.model.embedder.state_dict().items()
        }
        inputs = [self.manifest.files.get("encoders.json"), self.manifest.files.get(_TOKENIZER)]
        return content_hash([weights, inputs, self.recipe.model.text_len, self.recipe.train.precision])

    def autocast(self) -> AbstractContextManager[None]:
        """The precision that the run was trained in: half precision on GPUs only, as in training."""
        return autocast(self.device, self.recipe.train.precision)

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        return load_tokenizer(self.path / _TOKENIZER) if self.encoders.fields.text_len else None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Autocast to bfloat16 for precision 'bf16' on a GPU; elsewhere nothing happens."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16" and device.type == "cuda")


def save_bundle(model: BehaviorModel, recipe: Recipe, dataset: Dataset, path: str | Path) -> None:
    """Write a bundle to `path`, which must not exist; it appears complete or not at all."""
    with staged_folder(path) as stage:
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, stage / "model.safetensors")
        recipe.write(stage / "recipe.toml")
        # safetensors gives its file to its owner alone; whoever may read the rest of a bundle may read the weights.
        shutil.copymode(stage / "recipe.toml", stage / "model.safetensors")
        for name in ("schema.toml", "encoders.json", _TOKENIZER):
            source = dataset.path / name
            if source.exists():
                write_atomic(stage / name, source.read_bytes())
        files = {file.name: sha256_of(file) for file in sorted(stage.iterdir())}
        BundleManifest(dataset_checksum=dataset.checksum, files=files).write(stage / "bundle.json")


def bundle_in_memory(model: BehaviorModel, recipe: Recipe, dataset: Dataset, path: str | Path) -> Bundle:
    """The bundle that `save_bundle` would write to `path`, unwritten: for a model that is still being trained.

    Only checksums of the dataset's manifest are used, so the bundle's own checksum does not depend on its weights.
    """
    names = ("schema.toml", "encoders.json", _TOKENIZER)
    files = {name: dataset.manifest.files[name].sha256 for name in names if name in dataset.manifest.files}
    manifest = BundleManifest(dataset_checksum=dataset.checksum, files=files)
    return Bundle(Path(path), manifest, recipe, dataset.schema, dataset.encoders, model)


def load_bundle(path: str | Path, device: torch.device | str = "cpu") -> Bundle:
    """The bundle in a folder, or in the folder `bundle` of a run; a file that has changed is refused by name.

    The folder of `habitus train --data` stands for its best stage.
    """
    path = _bundle_folder(chosen_run(path))
    manifest = BundleManifest.read(path / "bundle.json")
    if manifest.format_version != _FORMAT_VERSION:
        raise ModelError(f"{path} has format version {manifest.format_version}", expected=f"version {_FORMAT_VERSION}")
    for name, checksum in manifest.files.items():
        if not (path / name).exists():
            raise ModelError(f"{path / name} is missing", next_step="copy the complete bundle folder")
        if sha256_of(path / name) != checksum:
            raise ModelError(
                f"{path / name} has changed since it was written: its checksum is not the bundle's",
                next_step="copy the bundle again, or train again",
            )
    recipe = Recipe.read(path / "recipe.toml")
    encoders = Encoders.read(path / "encoders.json")
    model = BehaviorModel(encoders.fields, recipe.model, seed=None)
    _load_weights(model, path / "model.safetensors")
    return Bundle(path, manifest, recipe, Schema.read(path / "schema.toml"), encoders, model.to(device).eval())


def chosen_run(path: str | Path) -> Path:
    """The run that a folder stands for: itself, or, where only its link `best` leads to a bundle, that stage's."""
    path = Path(path)
    best = path / _BEST
    if _find_bundle(path) is not None or _find_bundle(best) is None:
        return path
    return path / best.readlink() if best.is_symlink() else best


def _find_bundle(path: Path) -> Path | None:
    return next((folder for folder in (path, path / "bundle") if (folder / "bundle.json").exists()), None)


def _bundle_folder(path: Path) -> Path:
    folder = _find_bundle(path)
    if folder is not None:
        return folder
    stages = [str(path / stage) for stage in ("stage2", "stage1") if (path / stage / "bundle").exists()]
    raise ModelError(
        f"{path} holds no bundle" if path.exists() else f"{path} does not exist",
        expected="a run folder or a bundle folder with bundle.json",
        next_step=f"name one of its stages: {' or '.join(stages)}"
        if stages
        else "habitus train --data DATASET --out RUN makes one",
    )


def _load_weights(model: BehaviorModel, path: Path) -> None:
    try:
        weights = load_file(path)
    except SafetensorError as error:  # a pickle, or a truncated file
        raise ModelError(f"{path} is not a safetensors file: {error}", expected="weights as safetensors") from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if shapes != expected:
        wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
        name = wrong[0]
        raise ModelError(
            f"{path} does not fit its recipe: {len(wrong)} tensors differ, first {name!r} of shape {shapes.get(name)}",
            expected=f"shape {expected.get(name)}",
        )
    model.load_state_dict(weights)
