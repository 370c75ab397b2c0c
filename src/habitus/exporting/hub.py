"""A run as a folder for a hub of models: card, weights and all that serves it, without the dataset.

FOLDER/  README.md  config.json  record.json  card.json  .gitattributes
         model.safetensors  bundle.json  recipe.toml  schema.toml  encoders.json  tokenizer.json    the bundle
         catalogue/  serve/catalogue/                                                         vectors and ids
"""

import re
import shutil
from pathlib import Path

from pydantic import Field

from habitus.cards import CARD_FILE, FACTS_FILE, CardFacts, run_card
from habitus.data import Dataset, data_facts
from habitus.errors import ConfigError, RunError
from habitus.files import sha256_of, staged_folder
from habitus.model import Bundle, chosen_run
from habitus.progress import Note, Progress
from habitus.record import Record
from habitus.serving import Retriever
from habitus.store import RECORD_FILE, SEAL_FILE, Seal, read_run_record
from habitus.typed import Typed

_LARGE = ("*.safetensors", "*.parquet", "*.npy")  # kept by Git LFS
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")


class HubConfig(Typed):
    """config.json: what a hub shows and counts downloads by."""

    library_name: str = "habitus"
    habitus_version: str
    model_type: str = "habitus"
    stage: int
    num_params: int
    joint_dim: int
    width: int
    depth: int
    text_depth: int
    num_items: int
    bundle_checksum: str
    dataset_checksum: str


class HubFolder(Typed):
    """What was written."""

    path: str
    bytes: int
    files: tuple[str, ...] = Field(description="Relative names.")


def export_hub(
    run: str | Path,
    folder: str | Path,
    *,
    data: str | Path | None = None,
    license_id: str | None = None,
    device: str = "auto",
    note: Note | None = None,
    progress: Progress | None = None,
) -> HubFolder:
    """Write a run to a new folder that can be pushed as it is, and that `habitus.load` opens without the dataset.

    `data`, the prepared dataset, is needed where the run was never served. Items added at run time stay behind.
    """
    run, folder = chosen_run(run), Path(folder)
    _check(run, folder, license_id)
    record = read_run_record(run)
    if record.status != "done":
        raise RunError(f"{run} failed: {record.reason}", expected="a run that is done")
    retriever = Retriever.open(run, data=data, device=device, read_only=True, note=note, progress=progress)
    facts = CardFacts.of_folder(run)
    if facts.data is None and data is not None:
        facts = facts.model_copy(update={"data": data_facts(Dataset.open(data, verify=False).manifest)})
    try:
        with staged_folder(folder) as stage:
            _copy_model(retriever, stage)
            _write_record(run, stage)
            _config(record, retriever.bundle, retriever.candidates.num_trained).write(stage / "config.json")
            facts.write(stage / FACTS_FILE)
            card = run_card(record, facts, name=folder.absolute().name, license_id=license_id)
            (stage / CARD_FILE).write_text(card, encoding="utf-8")
            lines = [f"{pattern} filter=lfs diff=lfs merge=lfs -text" for pattern in _LARGE]
            (stage / ".gitattributes").write_text("\n".join(lines) + "\n", encoding="utf-8")
            files = {
                path.relative_to(stage).as_posix(): path.stat().st_size
                for path in sorted(stage.rglob("*"))
                if path.is_file()
            }
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}", expected="a new folder") from error
    finally:
        retriever.close()
    return HubFolder(path=str(folder), bytes=sum(files.values()), files=tuple(files))


def _check(run: Path, folder: Path, license_id: str | None) -> None:
    if license_id is not None and not _LICENSE.fullmatch(license_id):
        raise ConfigError(
            f"--license {license_id!r}", expected="an identifier as hubs list them, such as apache-2.0, mit or other"
        )
    if folder.exists():
        raise ConfigError(f"{folder} exists already", next_step="remove it, or name another folder")
    if folder.name == "bundle":
        raise ConfigError("a folder named 'bundle' is read as a part of a run", next_step="name another folder")
    if not (run / RECORD_FILE).exists():
        stages = [str(run / name) for name in ("best", "stage2", "stage1") if (run / name / RECORD_FILE).exists()]
        raise RunError(
            f"{run} holds no {RECORD_FILE}" if run.exists() else f"{run} does not exist",
            expected="the folder of a finished run",
            next_step=f"name one of its stages: {' or '.join(stages)}"
            if stages
            else "habitus train --data DATASET --out RUN makes one",
        )


def _copy_model(retriever: Retriever, stage: Path) -> None:
    """The bundle at the top, the item vectors and the served ids where a run has them."""
    bundle, cache = retriever.bundle, retriever.candidates.catalogue.cache
    for name in (*bundle.manifest.files, "bundle.json"):
        shutil.copyfile(bundle.path / name, stage / name)
    (stage / "catalogue").mkdir()
    for name in (*cache.manifest.shards, "manifest.json"):
        shutil.copyfile(cache.path / name, stage / "catalogue" / name)
    served = bundle.run_path / "serve" / "catalogue"
    shutil.copytree(served, stage / "serve" / "catalogue", copy_function=shutil.copyfile)


def _write_record(run: Path, stage: Path) -> None:
    """The Record with a seal of its own: that of a store names the machine of its worker."""
    shutil.copyfile(run / RECORD_FILE, stage / RECORD_FILE)
    Seal(record_sha256=sha256_of(stage / RECORD_FILE), worker="export", claims=1).write(stage / SEAL_FILE)


def _config(record: Record, bundle: Bundle, num_items: int) -> HubConfig:
    model, params = record.recipe.model, record.params
    return HubConfig(
        habitus_version=record.versions.get("habitus", ""),
        stage=record.recipe.train.stage,
        num_params=0 if params is None else params.total + params.vocabulary,
        joint_dim=model.joint_dim,
        width=model.width,
        depth=model.depth,
        text_depth=model.text_depth,
        num_items=num_items,
        bundle_checksum=bundle.checksum,
        dataset_checksum=record.dataset_checksum,
    )
