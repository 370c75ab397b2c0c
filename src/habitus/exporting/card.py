"""The verb `card`: README.md of a run, a dataset or a study, written again with what is known now."""

from pathlib import Path

from habitus.cards import CARD_FILE, CardFacts, follows, read_plan, shareable_plan, update_run_card, write_study_card
from habitus.data import Dataset, data_facts, write_dataset_card
from habitus.errors import ConfigError, RunError
from habitus.files import write_atomic
from habitus.progress import Note
from habitus.store import INFO_FILE, RECORD_FILE, Plan, read_run_record
from habitus.studies import BEST, CHOICE_FILE, compare_on_test


def write_card(
    folder: str | Path,
    *,
    data: str | Path | None = None,
    plan: str | Path | None = None,
    device: str = "auto",
    note: Note | None = None,
) -> Path:
    """Write the card of a folder, whichever it is.

    With `data`, a run is compared with baselines on the dataset's test users unless its card has that already; `plan`
    is the plan.json that its recipe comes from.
    """
    folder, note = Path(folder), note or (lambda _: None)
    if any((place / INFO_FILE).exists() for place in (folder, folder / "store")):
        write_study_card(folder, None if data is None else data_facts(Dataset.open(data).manifest))
    elif (folder / RECORD_FILE).exists() or (folder / CHOICE_FILE).exists():
        _write_run_card(folder, None if data is None else Dataset.open(data), plan, device, note)
    elif (folder / "manifest.json").exists():
        write_dataset_card(folder, Dataset.open(folder, verify=False).manifest)
    else:
        stages = [str(folder / name) for name in ("stage2", "stage1") if (folder / name / RECORD_FILE).exists()]
        raise ConfigError(
            f"{folder} is neither a run nor a dataset nor a study",
            expected="a folder with record.json, manifest.json or store.json",
            next_step=f"name {' or '.join(stages or ['the folder that train, prepare, study or sweep wrote'])}",
        )
    return folder / CARD_FILE


def _write_run_card(folder: Path, dataset: Dataset | None, plan: str | Path | None, device: str, note: Note) -> None:
    run = folder if (folder / RECORD_FILE).exists() else folder / BEST
    record, facts = read_run_record(run), CardFacts.of_folder(run)
    if dataset is not None:
        if dataset.checksum != record.dataset_checksum:
            raise RunError(
                f"{dataset.path} is not the dataset that {run} was trained on",
                expected=f"the dataset with checksum {record.dataset_checksum[:12]}",
            )
        facts = facts.model_copy(update={"data": data_facts(dataset.manifest)})
        if facts.table is None and record.status == "done":
            note("comparing with baselines on test users")
            facts = facts.model_copy(update={"table": compare_on_test(run, dataset, device)})
    if plan is not None:
        facts = facts.model_copy(update={"plan": _read_plan(Path(plan), run)})
    card = update_run_card(run, data=facts.data, table=facts.table, plan=facts.plan)
    if run != folder:
        write_atomic(folder / CARD_FILE, card.encode())


def _read_plan(path: Path, run: Path) -> Plan:
    plan = read_plan(path)
    if not follows(plan, read_run_record(run).recipe):
        raise ConfigError(
            f"{path} does not plan the recipe of {run}",
            expected="the plan whose stage1.toml or stage2.toml was trained",
        )
    return shareable_plan(plan)
