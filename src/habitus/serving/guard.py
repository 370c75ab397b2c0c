"""What stands before every endpoint: who may ask, of which host, and an answer in one shape whatever happens."""

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from habitus.serving.telemetry import Telemetry
from habitus.serving.wire import RefusedError, dumps, failure

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = {"/", "/v1/health"}  # answered without the token: the page holds nothing, and probes carry none
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
HEADERS = [
    (b"content-type", b"application/json"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
]


class Guard:
    """An ASGI application around another one.

    With a token, every path but `OPEN_PATHS` asks for it. Without one on a loopback address, the Host header must be
    loopback too: otherwise a web page that its visitor's browser has open could ask through a name of its own.
    """

    def __init__(self, app: App, telemetry: Telemetry, *, token: str | None, loopback_only: bool) -> None:
        self.app = app
        self.telemetry = telemetry
        self.loopback_only = loopback_only and token is None
        self._token = token.encode() if token is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.monotonic()
        scope["habitus.began"] = began
        status = 0

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.telemetry.in_flight.inc()
        try:
            self._admit(scope)
            await self.app(scope, receive, noting_send)
        except RefusedError as refused:
            await send_refusal(noting_send, refused)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"][:200])
            if status:  # the answer has begun and cannot be taken back; the connection ends
                raise
            await send_refusal(noting_send, failure())
        finally:
            self.telemetry.in_flight.dec()
            route = scope.get("route")
            endpoint = getattr(route, "path", "other")
            self.telemetry.requests.labels(endpoint, str(status)).inc()
            self.telemetry.seconds.labels(endpoint).observe(time.monotonic() - began)
            if status == 500:
                self.telemetry.errors.inc()

    def _admit(self, scope: Scope) -> None:
        """Refuse a request of a foreign host, or without the token."""
        authorization, host = b"", b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"host":
                host = value
        if self.loopback_only and _host_name(host) not in LOOPBACK:
            raise RefusedError(
                421, "the Host header names another machine", expected="localhost, 127.0.0.1 or [::1]; or a token"
            )
        if self._token is None or scope["path"] in OPEN_PATHS:
            return
        scheme, _, given = authorization.partition(b" ")
        # Both sides are encoded and compared in constant time; an absent token is compared like a wrong one.
        right = hmac.compare_digest(given.strip(), self._token)
        if scheme.lower() != b"bearer" or not right:
            raise RefusedError(
                401,
                "the token is missing or wrong",
                expected="the header 'Authorization: Bearer TOKEN'",
                next_step="ask whoever runs the service for its token",
            )


async def send_refusal(send: Send, refused: RefusedError) -> None:
    """Answer with the refusal's status and words."""
    headers = list(HEADERS)
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.retry_s:
        headers.append((b"retry-after", str(refused.retry_s).encode()))
    await send_json(send, refused.status, refused.body, headers)


async def send_json(
    send: Send, status: int, values: dict[str, Any], headers: list[tuple[bytes, bytes]] = HEADERS
) -> None:
    body = dumps(values)
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def _host_name(host: bytes) -> str:
    try:
        return urlsplit(f"//{host.decode('ascii')}").hostname or ""
    except ValueError:
        return ""
