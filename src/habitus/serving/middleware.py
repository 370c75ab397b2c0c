"""Around every endpoint: access, metrics, and an error in one shape whatever happens."""

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from habitus.serving.schemas import ErrorResponse, HttpError, RequestError, StorageError

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BEGAN = "habitus.began"  # key of the scope: when the request's headers had arrived, by time.monotonic()
JSON_HEADERS = [
    (b"content-type", b"application/json"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
]
_OPEN_PATHS = {"/", "/v1/health"}  # answered without the token: the page holds no data, and probes carry no token
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters and histograms for Prometheus. One registry per service, so that two in a process do not mix."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("habitus_requests", "Requests answered.", ["endpoint", "status"], registry=registry)
        self.seconds = Histogram(
            "habitus_request_seconds", "From headers to answer.", ["endpoint"], buckets=_SECONDS, registry=registry
        )
        self.batch_sizes = Histogram(
            "habitus_batch_size", "Requests computed together.", ["lane"], buckets=_SIZES, registry=registry
        )
        self.batch_seconds = Histogram(
            "habitus_batch_seconds", "Computation of a batch.", ["lane"], buckets=_SECONDS, registry=registry
        )
        self.errors = Counter("habitus_errors", "Answers of status 500.", registry=registry)
        self.swaps = Counter("habitus_swaps", "Runs swapped in.", ["outcome"], registry=registry)
        self.items = Gauge("habitus_items", "Items in the catalogue.", registry=registry)
        self.waiting = Gauge("habitus_waiting_requests", "Requests in the queue.", registry=registry)
        self.in_flight = Gauge("habitus_in_flight_requests", "Requests not yet answered.", registry=registry)

    def count_batch(self, lane: str, size: int, seconds: float) -> None:
        self.batch_sizes.labels(lane).observe(size)
        self.batch_seconds.labels(lane).observe(seconds)

    def count_response(self, endpoint: str, status: int, seconds: float) -> None:
        self.requests.labels(endpoint, str(status)).inc()
        self.seconds.labels(endpoint).observe(seconds)
        if status == 500:
            self.errors.inc()

    def to_text(self) -> bytes:
        return generate_latest(self.registry)


class AccessMiddleware:
    """Lets a request in or refuses it, and counts it.

    With a token, every path but `/` and `/v1/health` requires it. Without one on a loopback address, the Host header
    must be loopback too: otherwise a web page open in a browser on the same machine could send requests under a host
    name of its own.
    """

    def __init__(self, app: App, metrics: Metrics, *, token: str | None, loopback_only: bool) -> None:
        self.app = app
        self.metrics = metrics
        self.loopback_only = loopback_only and token is None
        self._token = token.encode() if token is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[BEGAN] = began = time.monotonic()
        status = 0

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.metrics.in_flight.inc()
        try:
            self._admit(scope)
            await self.app(scope, receive, send_and_note_status)
        except HttpError as error:
            await _send_error(send_and_note_status, error)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"][:200])
            if status:  # the response has begun and cannot be taken back; the connection ends
                raise
            await _send_error(send_and_note_status, internal_error())
        finally:
            self.metrics.in_flight.dec()
            endpoint = getattr(scope.get("route"), "path", "other")
            self.metrics.count_response(endpoint, status, time.monotonic() - began)

    def _admit(self, scope: Scope) -> None:
        """Refuse a request under a foreign host name, or without the token."""
        headers = dict(scope["headers"])
        if self.loopback_only and _host_name(headers.get(b"host", b"")) not in _LOOPBACK:
            raise HttpError(
                421, "the Host header names another machine", expected="localhost, 127.0.0.1 or [::1]; or a token"
            )
        if self._token is None or scope["path"] in _OPEN_PATHS:
            return
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        # Compared in constant time; an absent token is compared like a wrong one.
        is_right = hmac.compare_digest(token.strip(), self._token)
        if scheme.lower() != b"bearer" or not is_right:
            raise HttpError(
                401,
                "the token is missing or wrong",
                expected="the header 'Authorization: Bearer TOKEN'",
                next_step="ask whoever runs the service for its token",
            )


def internal_error() -> HttpError:
    """The response if the fault is ours; what happened is in the log, never in the response."""
    return HttpError(500, "the request could not be answered", next_step="see the service's log")


def error_body(error: RequestError | StorageError) -> bytes:
    body = ErrorResponse(error=error.problem, expected=error.expected, next_step=error.next_step)
    return body.model_dump_json().encode()


async def _send_error(send: Send, error: HttpError) -> None:
    body = error_body(error)
    headers = [*JSON_HEADERS, (b"content-length", str(len(body)).encode())]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _host_name(host: bytes) -> str:
    try:
        return urlsplit(f"//{host.decode('ascii')}").hostname or ""
    except ValueError:
        return ""
