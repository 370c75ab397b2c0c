"""The verb `serve`: open a run, listen, answer until the process is stopped."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.laws import describe_history, history_of_record, served_history
from habitus.progress import Note
from habitus.record import Record
from habitus.serving.index import IndexKind
from habitus.serving.item_store import ItemStore
from habitus.serving.limits import Limits
from habitus.serving.retriever import Retriever
from habitus.serving.server import address_of, bind, check_image_origin, is_loopback, run_server
from habitus.serving.service import Service
from habitus.serving.users import ValidationUsers
from habitus.store import RECORD_FILE


@dataclass(frozen=True)
class ServeOptions:
    """What a service may be told; `habitus serve` and `habitus.serve` have these defaults."""

    data: Path | None = None  # prepared dataset of the run; needed the first time it is served
    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    token: str | None = None
    index: IndexKind = "exact"
    items: Path | None = None  # folder of items added at run time; RUN/serve/items where None
    read_only: bool = False  # refuse item updates
    show_users: bool = False  # show histories of validation users; on loopback only, with data
    images: tuple[str, ...] = ()  # origins that the page may load pictures from
    temperature: float = 1.0  # divides scores before they become probabilities
    device: str = "auto"
    limits: Limits = field(default_factory=Limits)
    access_log: bool = False

    def check(self, run: Path) -> None:
        """Refuse what can be refused before anything is opened."""
        for origin in self.images:
            check_image_origin(origin)
        if self.show_users and self.data is None:
            raise ConfigError(
                "--show-users was given without --data",
                expected="the prepared dataset, which holds the histories",
                next_step=f"habitus serve {run} --data DATASET --show-users",
            )


def serve_run(
    run: Path, options: ServeOptions | None = None, *, note: Note = print, ready: Callable[[str], None] = print
) -> None:
    """Serve a run over HTTP until SIGTERM or SIGINT; `ready` is called with where, once it answers."""
    options = options or ServeOptions()
    options.check(run)
    listener = bind(options.host, options.port)
    is_local = is_loopback(listener.getsockname()[0])
    if options.show_users and not is_local:
        listener.close()
        raise ConfigError(
            f"--show-users was given, and {options.host} can be reached from other machines",
            expected="a loopback address: what people did stays on this machine",
            next_step="leave out --host, or leave out --show-users",
        )
    if options.token is None and not is_local:
        note(
            f"habitus: warning: no token, and {options.host} can be reached from other machines: anyone there may "
            "send requests and change items. Set HABITUS_TOKEN or pass --token-file."
        )

    def open_run(folder: Path, store: ItemStore | None) -> Retriever:
        return Retriever.open(
            folder,
            data=options.data,
            device=options.device,
            index=options.index,
            items=store or options.items,
            read_only=options.read_only,
            limits=options.limits,
            temperature=options.temperature,
            note=note,
        )

    if options.limits.read_history is None:
        note_shorter_history(run, note)
    users = None
    if options.show_users and options.data is not None:
        users = ValidationUsers(Dataset.open(options.data, verify=False))
    origins = tuple(map(check_image_origin, options.images))
    service = Service(run, open_run, share_items=options.items is not None, users=users, image_origins=origins)
    run_server(
        service,
        listener,
        token=options.token,
        access_log=options.access_log,
        ready=lambda: ready(f"habitus: {service.num_items:,} items at {address_of(listener)}"),
    )


def note_shorter_history(run: Path, note: Note) -> None:
    """Say how few events would do, where the run's Record measured it (evaluate.contexts)."""
    path = run / RECORD_FILE
    try:
        record = Record.read(path) if path.exists() else None
    except ConfigError:
        return  # a server answers without it
    law = None if record is None else history_of_record(record, "catalogue/recall@10")
    served = None if law is None else served_history(law)
    if law is not None and served is not None:
        note(f"habitus: {describe_history(law, 'catalogue/recall@10')}, on validation (--read-history {served})")
