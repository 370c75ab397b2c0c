"""Column names, event types, categories and texts that are markup: served, and opened in Chromium."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.events import Schema
from habitus.events.world import World
from habitus.events.world.writing import schema_of
from habitus.model import BehaviorModel
from habitus.model.bundle import save_bundle
from habitus.serving import Retriever
from tests.browser import launch_chromium, open_tab, sync_api
from tests.serving.conftest import small_recipe
from tests.serving.served import Served

pytestmark = pytest.mark.slow
expect = sync_api.expect


def hostile(where: str) -> str:
    """Runs where it is taken for markup, in an attribute or in a script, and says where that was."""
    return f"""'"></script><img src=x onerror="window.hacked='{where}'"><script>window.hacked='{where}'</script>"""


@pytest.fixture(scope="module")
def hostile_run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The columns of a world under other names, with markup in all that a page may show; an untrained model."""
    folder = tmp_path_factory.mktemp("markup")
    items, events = pa.concat_tables(list(world.item_blocks())), pa.concat_tables(list(world.event_blocks()))
    for column in ("title", "brand", "category"):
        values = [hostile(f"{column} {value}") for value in items[column].to_pylist()]
        items = items.set_column(items.column_names.index(column), column, pa.array(values))
    kinds = [hostile(f"type {value}") for value in events["event_type"].to_pylist()]
    events = events.set_column(events.column_names.index("event_type"), "event_type", pa.array(kinds))
    values = schema_of(world).to_values()
    values.pop("world")
    renamed: dict[str, dict[str, str]] = {}
    for table in ("items", "events"):
        renamed[table] = {name: hostile(f"column {name}") for name in values[table]["fields"]}
        values[table]["fields"] = {renamed[table][name]: kind for name, kind in values[table]["fields"].items()}
    values["items"]["display"] = [renamed["items"]["title"], renamed["items"]["brand"]]
    for name, table in (("items", items), ("events", events)):
        new_names = [renamed[name].get(column, column) for column in table.column_names]
        pq.write_table(table.rename_columns(new_names), folder / f"{name}.parquet")
    tables = str(folder / "events.parquet"), str(folder / "items.parquet")
    options = PrepareOptions(seq_len=64, text_len=6, vocabulary_size=400, split="last", threads=1)
    prepare(*tables, Schema.parse(values, "test"), folder / "dataset", options)
    dataset, recipe = Dataset.open(folder / "dataset"), small_recipe()
    save_bundle(BehaviorModel(dataset.fields, recipe.model, seed=0), recipe, dataset, folder / "run" / "bundle")
    Retriever.open(folder / "run", data=dataset.path, device="cpu").close()
    return folder


@pytest.fixture(scope="module")
def served(hostile_run: Path) -> Iterator[Served]:
    server = Served(hostile_run / "run", "--data", str(hostile_run / "dataset"), "--show-users", logs=hostile_run)
    yield server
    server.kill()


def test_markup_is_shown_as_text_and_never_runs(served: Served) -> None:
    with launch_chromium() as browser, open_tab(browser, 1100, 900) as tab:
        tab.page.goto(served.url)
        expect(tab.page.locator("#examples")).to_be_visible()
        tab.page.click("#picks button >> nth=0")
        expect(tab.page.locator("#answers li").first).to_be_visible()
        shown = tab.page.text_content("main")
        assert hostile("title")[:40] in shown
        assert "window.hacked='column " in shown or "window.hacked='brand " in shown
        assert tab.page.locator("main script, main img[src=x]").count() == 0
        assert tab.page.evaluate("window.hacked === undefined")
        assert tab.dialogs == [] and tab.errors == []
        assert tab.hosts() == {served.host}
