"""Running the service: a socket, signals, and a uvicorn server that closes stalled connections."""

import asyncio
import importlib.util
import ipaddress
import logging
import re
import signal
import socket
import time
import weakref
from collections.abc import Callable
from typing import Any

import uvicorn

from habitus.errors import ConfigError, HabitusError
from habitus.serving.app import create_app
from habitus.serving.service import Service

log = logging.getLogger(__name__)


def run_server(
    service: Service,
    listener: socket.socket,
    *,
    token: str | None,
    access_log: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Answer on a bound socket until SIGTERM or SIGINT, then finish what is in flight; SIGHUP swaps the run."""
    app = create_app(service, token=token, loopback_only=is_loopback(listener.getsockname()[0]))
    config = uvicorn.Config(
        app,
        http="httptools" if importlib.util.find_spec("httptools") else "h11",
        log_config=None,
        access_log=access_log,
        lifespan="on",
        ws="none",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=service.limits.max_connections,
        timeout_graceful_shutdown=max(1, round(service.limits.shutdown_s)),
    )
    server = _Server(config, service, ready)
    # uvicorn raises the signal again once it has shut down; an orderly shutdown is a success.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server.run(sockets=[listener])


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 takes a free one."""
    try:
        if not 0 <= port < 1 << 16:
            raise OverflowError("ports are 0 to 65535")  # getaddrinfo would take it modulo 65536
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {getattr(error, 'strerror', None) or error}",
            expected="an address of this machine and a free port",
            next_step="pass another --port, or 0 for any free one",
        ) from None
    return listener


def address_of(listener: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_image_origin(text: str) -> str:
    """The origin of a server that pictures may be loaded from, as a content security policy names it."""
    if not re.fullmatch(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:\d{1,5})?", text.lower()):
        raise ConfigError(
            f"--images {text[:100]!r} is not the origin of a server",
            expected="scheme and host, perhaps a port, as in --images https://images.example.org",
        )
    return text.lower()


class _Server(uvicorn.Server):
    """A server that closes connections whose client neither sends nor reads, which uvicorn would keep for ever."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.service = service
        self._ready = ready
        self._stalled_since: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self._swap: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            self._close_stalled()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.stopping = True
        await super().shutdown(sockets=sockets)

    def _close_stalled(self) -> None:
        """Close connections that have been sending headers, or not reading their responses, for too long."""
        now = time.monotonic()
        connections: list[Any] = list(self.server_state.connections)
        for connection in connections:
            answering = connection.cycle is not None and not connection.cycle.response_complete
            idle = connection.timeout_keep_alive_task is not None
            reading = not connection.flow.write_paused
            if reading and (answering or idle):
                self._stalled_since.pop(connection, None)
            elif now - self._stalled_since.setdefault(connection, now) > self.service.limits.read_timeout_s:
                connection.transport.abort()

    def _on_hangup(self) -> None:
        self._swap = asyncio.get_running_loop().create_task(self._swap_run())

    async def _swap_run(self) -> None:
        try:
            await self.service.swap()
        except HabitusError as error:
            log.warning("SIGHUP: %s; the former run goes on answering", error)
