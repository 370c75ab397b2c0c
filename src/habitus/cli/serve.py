"""habitus serve."""

import os
from pathlib import Path
from typing import Annotated

import typer

from habitus.cli.app import app, check_choice
from habitus.errors import ConfigError
from habitus.units import MAX_THREADS

TOKEN_VARIABLE = "HABITUS_TOKEN"
EXAMPLE = """

Example: `habitus serve run --data dataset`, then open http://127.0.0.1:8000

`--data` is needed once per run. A token for others on the network: `HABITUS_TOKEN=… habitus serve run --host 0.0.0.0`

What validation users did, beside what the model says: `habitus serve run --data dataset --show-users`
"""


@app.command(help="Answer recommendations, vectors and item updates over HTTP." + EXAMPLE)
def serve(
    run: Annotated[
        Path, typer.Argument(help="Run folder, or a link to one: SIGHUP or POST /v1/admin/swap opens it anew.")
    ],
    data: Annotated[
        Path | None, typer.Option(help="Prepared dataset of the run; needed the first time it is served.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the bearer token; or set {TOKEN_VARIABLE}.")
    ] = None,
    index: Annotated[str, typer.Option(help="exact, ivf, ivfpq, hnsw or auto.")] = "exact",
    items: Annotated[
        Path | None, typer.Option(help="Folder of items added at run time; RUN/serve/items unless given.")
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse item updates.")] = False,
    show_users: Annotated[
        bool, typer.Option("--show-users", help="Show histories of validation users; on loopback only, with --data.")
    ] = False,
    images: Annotated[
        list[str] | None,
        typer.Option(help="Origin that the page may load pictures from, as https://images.example.org. Repeatable."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Divides scores before they become probabilities; evaluate --calibrate fits it.")
    ] = 1.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    threads: Annotated[
        int, typer.Option(min=0, max=MAX_THREADS, help="CPU threads of a computation; 0 leaves it to torch.")
    ] = 0,
    max_body: Annotated[int, typer.Option(help="Bytes of a request's body.")] = 1 << 20,
    max_history: Annotated[int, typer.Option(help="Events of one history.")] = 2_000,
    read_history: Annotated[
        int | None,
        typer.Option(help="Newest events that the model reads; by default its window. Fewer are faster."),
    ] = None,
    max_k: Annotated[int, typer.Option(help="Recommendations in one answer.")] = 1_000,
    max_filter_values: Annotated[int, typer.Option(help="Values in allow and deny together.")] = 1_000,
    max_candidates: Annotated[int, typer.Option(help="Items to score, to choose from or to leave out.")] = 10_000,
    timeout: Annotated[float, typer.Option(help="Seconds from a request to its answer.")] = 10.0,
    read_timeout: Annotated[float, typer.Option(help="Seconds for headers, and for a body, to arrive.")] = 10.0,
    max_batch: Annotated[int, typer.Option(help="Requests computed together.")] = 64,
    max_wait_ms: Annotated[float, typer.Option(help="How long a request may wait for others to join its batch.")] = 2.0,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; beyond it 503.")] = 512,
    max_connections: Annotated[int, typer.Option(help="Open connections; beyond it 503.")] = 1_000,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds for requests in flight after SIGTERM.")] = 30.0,
    access_log: Annotated[bool, typer.Option("--access-log", help="A line per request.")] = False,
) -> None:
    import logging

    import torch

    from habitus.serving import INDEX_KINDS, Limits, ServeOptions, serve_run

    limits = Limits.parse(
        {
            "max_body_bytes": max_body,
            "max_history": max_history,
            "read_history": read_history,
            "max_k": max_k,
            "max_filter_values": max_filter_values,
            "max_candidates": max_candidates,
            "timeout_s": timeout,
            "read_timeout_s": read_timeout,
            "max_batch": max_batch,
            "max_wait_ms": max_wait_ms,
            "max_queue": max_queue,
            "max_connections": max_connections,
            "shutdown_s": shutdown_timeout,
        },
        "the options",
    )
    options = ServeOptions(
        data=data,
        host=host,
        port=port,
        token=_read_token(token_file),
        index=check_choice("index", index, INDEX_KINDS),
        items=items,
        read_only=read_only,
        show_users=show_users,
        images=tuple(images or ()),
        temperature=temperature,
        device=device,
        limits=limits,
        access_log=access_log,
    )
    options.check(run)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("habitus").setLevel(logging.INFO)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    if threads:
        torch.set_num_threads(threads)
    # One line on standard output once it answers, so that whoever started it knows the port.
    serve_run(run, options, note=lambda text: typer.echo(text, err=True), ready=typer.echo)


def _read_token(path: Path | None) -> str | None:
    """The token of a file or of the environment; never of the command line, which every user of a machine can read."""
    if path is not None:
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the token file {path} cannot be read: {error}") from None
        source = str(path)
    elif TOKEN_VARIABLE in os.environ:
        token, source = os.environ[TOKEN_VARIABLE].strip(), TOKEN_VARIABLE
    else:
        return None
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token in {source} has {len(token)} characters or unusual ones",
            expected="16 printable ASCII characters or more, without spaces",
            next_step="python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return token
