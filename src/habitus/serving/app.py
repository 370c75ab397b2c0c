"""The HTTP endpoints: read a body within its limits, call the service, write the response.

Bodies are read by hand: their bytes are counted as they arrive, so that a large one is refused before it is held and
parsed (decision 0097).
"""

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import unquote_to_bytes

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from habitus import __version__
from habitus.serving.limits import Limits
from habitus.serving.middleware import BEGAN, JSON_HEADERS, AccessMiddleware, error_body, internal_error
from habitus.serving.schemas import (
    EmbedRequest,
    EmbedResponse,
    ErrorResponse,
    HealthResponse,
    HttpError,
    ItemResponse,
    PutItemRequest,
    RankRequest,
    RankResponse,
    RecommendManyRequest,
    RecommendManyResponse,
    RecommendRequest,
    RecommendResponse,
    RequestError,
    SchemaResponse,
    ScoreRequest,
    ScoreResponse,
    SearchResponse,
    SimilarRequest,
    SimilarResponse,
    StorageError,
    SwapResponse,
    UpdateResponse,
    UserResponse,
    UsersResponse,
    parse_body,
    parse_recommend,
    shorten,
)
from habitus.serving.service import Service

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request is refused; the body says why."},
    "5XX": {"model": ErrorResponse, "description": "503 busy, 504 too late, 507 disk full, 500 a fault of ours."},
}
_ITEM_ID = {"parameters": [{"name": "item_id", "in": "path", "required": True, "schema": {"type": "string"}}]}
_USER_ID = {"parameters": [{"name": "user_id", "in": "path", "required": True, "schema": {"type": "string"}}]}
_SEARCH = {
    "parameters": [
        {"name": "q", "in": "query", "schema": {"type": "string", "default": ""}},
        {"name": "k", "in": "query", "schema": {"type": "integer", "default": 10}},
    ]
}
_MAX_SEARCH = 200  # characters of a text to search for
_INLINE_BLOCK = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def create_app(service: Service, *, token: str | None, loopback_only: bool) -> AccessMiddleware:
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
        docs_url=None,  # their pages load scripts from other servers
        redoc_url=None,
        redirect_slashes=False,
        responses=_ERRORS,
    )
    for kind in (RequestError, StorageError):
        app.add_exception_handler(kind, _handle_refusal)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(Exception, _handle_failure)
    _add_endpoints(app, service)
    if token is not None:
        openapi = app.openapi()  # made once, and cached by FastAPI
        openapi["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        openapi["security"] = [{"token": []}]
    return AccessMiddleware(app, service.metrics, token=token, loopback_only=loopback_only)


def _add_endpoints(app: FastAPI, service: Service) -> None:
    limits = service.limits

    def deadline(request: Request) -> float:
        return float(request.scope[BEGAN]) + limits.timeout_s

    @app.post(
        "/v1/recommend",
        response_model=RecommendResponse | RecommendManyResponse,
        openapi_extra=_describe_body(RecommendRequest, RecommendManyRequest),
    )
    async def recommend(request: Request) -> Response:
        """The next items of a history, best first; with `histories` an answer for each of them."""
        body = parse_recommend(await _read_body(request, limits))
        if isinstance(body, RecommendManyRequest):
            limits.check_many(body)
            return _to_json(await service.recommend_many(body, deadline(request)))
        limits.check_recommend(body)
        return _to_json(await service.recommend(body, deadline(request)))

    @app.post("/v1/score", response_model=ScoreResponse, openapi_extra=_describe_body(ScoreRequest))
    async def score(request: Request) -> Response:
        """Scores of given candidates for a history or for several, in the order given; nothing else is searched."""
        body = parse_body(ScoreRequest, await _read_body(request, limits))
        limits.check_score(body)
        return _to_json(await service.score(body, deadline(request)))

    @app.post("/v1/embed", response_model=EmbedResponse, openapi_extra=_describe_body(EmbedRequest))
    async def embed(request: Request) -> Response:
        """Vectors of histories or of items; their dot product is the score."""
        body = parse_body(EmbedRequest, await _read_body(request, limits))
        limits.check_embed(body)
        return _to_json(await service.embed(body, deadline(request)))

    @app.put(
        "/v1/items/{item_id:path}",
        response_model=UpdateResponse,
        openapi_extra={**_describe_body(PutItemRequest), **_ITEM_ID},
    )
    async def put_item(request: Request) -> Response:
        """Add an item, or replace its fields; on disk before the answer."""
        item_id = _path_id(request, "item")
        body = parse_body(PutItemRequest, await _read_body(request, limits))
        return _to_json(await service.put_item(item_id, body.fields, deadline(request)))

    @app.delete("/v1/items/{item_id:path}", response_model=UpdateResponse, openapi_extra=_ITEM_ID)
    async def delete_item(request: Request) -> Response:
        """Stop recommending an item; on disk before the answer."""
        return _to_json(await service.delete_item(_path_id(request, "item"), deadline(request)))

    @app.get("/v1/items/{item_id:path}", response_model=ItemResponse, openapi_extra=_ITEM_ID)
    async def get_item(request: Request) -> Response:
        """What is known of an item, and whether it may be recommended."""
        return _to_json(await service.item(_path_id(request, "item"), deadline(request)))

    @app.post("/v1/rank", response_model=RankResponse, openapi_extra=_describe_body(RankRequest))
    async def rank(request: Request) -> Response:
        """Where items stand among all that may come next; items that do not exist yet, too."""
        body = parse_body(RankRequest, await _read_body(request, limits))
        limits.check_rank(body)
        return _to_json(await service.rank(body, deadline(request)))

    @app.post("/v1/similar", response_model=SimilarResponse, openapi_extra=_describe_body(SimilarRequest))
    async def similar(request: Request) -> Response:
        """The items nearest to an item."""
        body = parse_body(SimilarRequest, await _read_body(request, limits))
        limits.check_similar(body)
        return _to_json(await service.similar(body, deadline(request)))

    @app.get("/v1/search", response_model=SearchResponse, openapi_extra=_SEARCH)
    async def search(request: Request) -> Response:
        """Items whose names or ids hold words that begin with those of q; popular ones first."""
        return _to_json(await service.find_items(*_search_query(request, limits), deadline(request)))

    @app.get("/v1/users", response_model=UsersResponse, openapi_extra=_SEARCH)
    async def users(request: Request) -> Response:
        """Validation users whose ids begin with q; with --show-users only."""
        return _to_json(await service.find_users(*_search_query(request, limits), deadline(request)))

    @app.get("/v1/users/{user_id:path}", response_model=UserResponse, openapi_extra=_USER_ID)
    async def user(request: Request) -> Response:
        """The events of a validation user; with --show-users only."""
        return _to_json(await service.user(_path_id(request, "user"), deadline(request)))

    @app.get("/v1/schema", response_model=SchemaResponse)
    async def schema(request: Request) -> Response:
        """The columns of events and items, and some items to try."""
        return _to_json(await service.describe(deadline(request)))

    @app.get("/v1/health", response_model=HealthResponse)
    async def health() -> Response:
        """Which run answers, and whether the service is stopping."""
        response = service.health()
        return _to_json(response, 200 if response.status == "ok" else 503)

    @app.post("/v1/admin/swap", response_model=SwapResponse)
    async def swap(request: Request) -> Response:
        """Open the run folder again, verify it, and let it answer from then on."""
        _require_json(request)  # so that a web page of another site cannot send it
        return _to_json(await service.swap())

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics_text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        html, policy = _load_page(service.image_origins)
        headers = {
            "content-security-policy": policy,
            "cache-control": "no-cache",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "permissions-policy": "camera=(), microphone=(), geolocation=()",
        }
        return Response(html, media_type="text/html", headers=headers)


async def _read_body(request: Request, limits: Limits) -> bytes:
    """The body, within its limits of size and time."""
    _require_json(request)
    too_large = HttpError(
        413, "the body is too large", expected=f"at most {limits.max_body_bytes:,} bytes", next_step="send less at once"
    )
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared[:20]) > limits.max_body_bytes:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.read_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limits.max_body_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise HttpError(
            408, "the body did not arrive in time", expected=f"all of it within {limits.read_timeout_s:g} s"
        ) from None
    return b"".join(parts)


def _require_json(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(
            415, f"the content type is {shorten(kind)}", expected="the header 'Content-Type: application/json'"
        )


def _path_id(request: Request, what: str) -> str:
    """The id in the path, decoded once and strictly: it is a name, never a path on disk."""
    path, prefix = request.scope["raw_path"].partition(b"?")[0], f"/v1/{what}s/".encode()
    try:
        item_id = unquote_to_bytes(path[path.index(prefix) + len(prefix) :]).decode()
    except ValueError:
        raise HttpError(400, f"the {what} id in the path is not UTF-8", expected="percent-encoded UTF-8") from None
    if not item_id:
        raise RequestError(f"the {what} id is empty", expected=f"/v1/{what}s/ID")
    return item_id


def _search_query(request: Request, limits: Limits) -> tuple[str, int]:
    """The text to search for, and how many results are wanted."""
    query = request.query_params
    unknown = sorted(query.keys() - {"q", "k"})
    text, k = query.get("q", ""), query.get("k", "10")
    if unknown:
        raise RequestError(f"the query names {shorten(unknown[0])}", expected="q and k")
    if len(text) > _MAX_SEARCH:
        raise RequestError(f"q has {len(text):,} characters", expected=f"at most {_MAX_SEARCH}")
    if not k.isdecimal() or len(k) > 9:
        raise RequestError(f"k = {shorten(k)}", expected=f"1 to {limits.max_k:,}")
    limits.check_count(int(k))
    return text, int(k)


def _to_json(response: BaseModel, status: int = 200) -> Response:
    return _json_response(response.model_dump_json(exclude_none=True).encode(), status)


def _json_response(body: bytes, status: int) -> Response:
    response = Response(body, status)
    response.raw_headers.extend(JSON_HEADERS)
    return response


async def _handle_refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError | StorageError)
    response = _json_response(error_body(error), error.status)
    if isinstance(error, HttpError) and error.retry_after_s:
        response.headers["retry-after"] = str(error.retry_after_s)
    return response


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problems = {404: "there is nothing at this path", 405: f"{request.method} is not allowed at this path"}
    problem = problems.get(error.status_code, "the request cannot be answered")
    response = await _handle_refusal(request, HttpError(error.status_code, problem, next_step="see /openapi.json"))
    response.headers.update(error.headers or {})
    return response


async def _handle_failure(request: Request, _: Exception) -> Response:
    return await _handle_refusal(request, internal_error())


def _describe_body(*kinds: type[BaseModel]) -> dict[str, Any]:
    """The request body for OpenAPI, which FastAPI cannot see since the endpoints read bodies themselves."""
    schemas = [kind.model_json_schema() for kind in kinds]
    schema = schemas[0] if len(schemas) == 1 else {"oneOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@cache
def _load_page(image_origins: tuple[str, ...]) -> tuple[str, str]:
    """The demo page, and a content security policy that lets nothing but its own script run."""
    html = files("habitus.serving").joinpath("page.html").read_text(encoding="utf-8")
    hashes = {
        kind: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for kind, text in _INLINE_BLOCK.findall(html)
    }
    pictures = " ".join(("data:", *image_origins))
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        f"connect-src 'self'; img-src {pictures}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return html, policy
