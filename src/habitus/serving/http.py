"""The HTTP endpoints: read a body, ask the service, write the answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote_to_bytes

from fastapi import FastAPI, HTTPException
from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response as HttpResponse

from habitus import __version__
from habitus.serving import wire
from habitus.serving.guard import HEADERS, Guard
from habitus.serving.page import page_response
from habitus.serving.requests import Request
from habitus.serving.service import Service
from habitus.serving.telemetry import CONTENT_TYPE
from habitus.serving.wire import RefusedError

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": wire.ErrorAnswer, "description": "The request is refused; the body says why."},
    "5XX": {"model": wire.ErrorAnswer, "description": "503 busy, 504 too late, 507 disk full, 500 a fault of ours."},
}
ITEMS = b"/v1/items/"
ITEM_ID = {"name": "item_id", "in": "path", "required": True, "schema": {"type": "string"}}


def create_app(service: Service, *, token: str | None, loopback_only: bool) -> Guard:
    """The ASGI application; the service starts and stops with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="habitus",
        version=__version__,
        description="Next events for a history, vectors out, new items in. See docs/http.md.",
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses=ERRORS,
    )
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(Exception, _failed)
    app.add_exception_handler(StarletteHTTPException, _http_error)
    _add_endpoints(app, service)
    if token is not None:
        described = app.openapi()  # made once, and kept
        described["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"token": []}]
    return Guard(app, service.telemetry, token=token, loopback_only=loopback_only)


def _add_endpoints(app: FastAPI, service: Service) -> None:
    limits = service.limits

    def deadline(request: HttpRequest) -> float:
        return float(request.scope["habitus.began"]) + limits.timeout_s

    @app.post("/v1/recommend", response_model=wire.RecommendAnswer, openapi_extra=_body_of(wire.RecommendBody))
    async def recommend(request: HttpRequest) -> HttpResponse:
        """The next items of a history, best first."""
        body = wire.parse_body(wire.RecommendBody, await read_body(request, service))
        wire.check_recommend(body, limits)
        asked = Request(tuple(body.history), body.k, body.exclude_seen, body.allow, body.deny)
        return _json(await service.recommend(asked, body.with_fields, deadline(request)))

    @app.post("/v1/embed", response_model=wire.EmbedAnswer, openapi_extra=_body_of(wire.EmbedBody))
    async def embed(request: HttpRequest) -> HttpResponse:
        """Vectors of histories or of items; their dot product is the score."""
        body = wire.parse_body(wire.EmbedBody, await read_body(request, service))
        wire.check_embed(body, limits)
        kind, rows = ("histories", body.histories) if body.histories else ("items", body.items)
        return _json(await service.embed(kind, rows, deadline(request)))

    @app.put(
        "/v1/items/{item_id:path}",
        response_model=wire.ItemAnswer,
        openapi_extra={**_body_of(wire.ItemBody), "parameters": [ITEM_ID]},
    )
    async def put_item(request: HttpRequest) -> HttpResponse:
        """Add an item, or replace its fields; on disk before the answer."""
        item_id = _item_id(request)
        body = wire.parse_body(wire.ItemBody, await read_body(request, service))
        return _json(await service.update("put", item_id, body.fields, deadline(request)))

    @app.delete("/v1/items/{item_id:path}", response_model=wire.ItemAnswer, openapi_extra={"parameters": [ITEM_ID]})
    async def delete_item(request: HttpRequest) -> HttpResponse:
        """Stop recommending an item; on disk before the answer."""
        return _json(await service.update("delete", _item_id(request), {}, deadline(request)))

    @app.get("/v1/items/{item_id:path}", response_model=wire.ItemFields, openapi_extra={"parameters": [ITEM_ID]})
    async def get_item(request: HttpRequest) -> HttpResponse:
        """What is known of an item, and whether it may be recommended."""
        return _json(await service.item(_item_id(request), deadline(request)))

    @app.get("/v1/schema", response_model=wire.SchemaAnswer)
    async def schema(request: HttpRequest) -> HttpResponse:
        """The columns of events and items, and some items to try."""
        return _json(await service.describe(deadline(request)))

    @app.get("/v1/health", response_model=wire.Health)
    async def health() -> HttpResponse:
        """Who answers, and whether."""
        found = service.health()
        return _json(found, 200 if found["status"] == "ok" else 503)

    @app.post("/v1/admin/swap", response_model=wire.SwapAnswer)
    async def swap(request: HttpRequest) -> HttpResponse:
        """Open the run folder again, verify it, and let it answer from then on."""
        _require_json(request)  # so that no foreign web page can send it unasked
        return _json(await service.swap())

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}}, response_class=HttpResponse)
    async def metrics() -> HttpResponse:
        """Counters for Prometheus."""
        return HttpResponse(service.metrics(), media_type=CONTENT_TYPE)

    @app.get("/", include_in_schema=False)
    async def page() -> HttpResponse:
        return page_response()


async def read_body(request: HttpRequest, service: Service) -> bytes:
    """The body, within its limits of size and time."""
    _require_json(request)
    limits = service.limits
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared[:20]) > limits.max_body_bytes:
        raise _too_large(limits.max_body_bytes)
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.read_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limits.max_body_bytes:
                    raise _too_large(limits.max_body_bytes)
                parts.append(part)
    except TimeoutError:
        raise RefusedError(
            408, "the body did not arrive in time", expected=f"all of it within {limits.read_timeout_s:g} s"
        ) from None
    return b"".join(parts)


def _too_large(limit: int) -> RefusedError:
    return RefusedError(
        413, "the body is too large", expected=f"at most {limit:,} bytes", next_step="send less at once"
    )


def _require_json(request: HttpRequest) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusedError(
            415, f"the content type is {wire.shortened(kind)}", expected="the header 'Content-Type: application/json'"
        )


def _item_id(request: HttpRequest) -> str:
    """The id in the path, decoded once and strictly: it is a name, never a path on disk."""
    raw = request.scope["raw_path"].partition(b"?")[0]
    try:
        found = unquote_to_bytes(raw[raw.index(ITEMS) + len(ITEMS) :]).decode()
    except ValueError:
        raise RefusedError(400, "the item id in the path is not UTF-8", expected="percent-encoded UTF-8") from None
    if not found:
        raise RefusedError(422, "the item id is empty", expected="/v1/items/ID")
    return found


def _json(values: dict[str, Any], status: int = 200) -> HttpResponse:
    response = HttpResponse(wire.dumps(values), status)
    response.raw_headers.extend(HEADERS)
    return response


async def _refused(_: HttpRequest, error: Exception) -> HttpResponse:
    assert isinstance(error, RefusedError)
    response = _json(error.body, error.status)
    if error.retry_s:
        response.headers["retry-after"] = str(error.retry_s)
    return response


async def _failed(_: HttpRequest, __: Exception) -> HttpResponse:
    return _json(wire.failure().body, 500)


async def _http_error(request: HttpRequest, error: Exception) -> HttpResponse:
    assert isinstance(error, HTTPException | StarletteHTTPException)
    problems = {404: "there is nothing at this path", 405: f"{request.method} is not answered at this path"}
    problem = problems.get(error.status_code, "the request cannot be answered")
    response = _json(RefusedError(error.status_code, problem, next_step="see /openapi.json").body, error.status_code)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


def _body_of(kind: type[wire._Body]) -> dict[str, Any]:
    """The request body for OpenAPI; the endpoints read bodies themselves, within limits."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}
