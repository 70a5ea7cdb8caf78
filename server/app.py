"""Makes the server's ASGI application from its routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route

from paged_kv.server import status_page
from paged_kv.server.completions.answer_bodies import (
    DETOKENIZE,
    TOKENIZE,
    listed_tokens,
    read_completion,
    read_detokenized,
    read_tokenized,
    text_of_tokens,
    token_count,
)
from paged_kv.server.completions.handler import CompletionHandler, PromptHandler
from paged_kv.server.completions.interface import Reader
from paged_kv.server.completions.service import SESSIONS, Service
from paged_kv.server.engine.prompt_fetcher import PREFILL_PATH
from paged_kv.server.http.access import salt_of
from paged_kv.server.http.api_errors import APIError, as_api_error, shortened
from paged_kv.server.http.request_log import HEADER, PROBES, RequestLog
from paged_kv.server.http.schema import ChatBody, PrefillBody, TextBody
from paged_kv.server.messages import messages
from paged_kv.server.messages.requests import MessagesBody, PromptBody
from paged_kv.server.responses import responses
from paged_kv.server.responses.kept_responses import KeptResponses, ResponseReader


def make_app(service: Service) -> Starlette:
    """The application with all routes of `paged-kv server`."""
    status, api = _status_routes(service), _api_routes(service)
    unknown = partial(_unknown_route, [route.path for route in (*api, *status)])
    # Web pages of other origins may send requests, as to mlx-lm's server.
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(service.options.allowed_origins),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[HEADER],
    )
    handlers: dict[Any, Any] = {APIError: error_response, 404: unknown, 405: error_response}
    # They may read errors too.
    errors = Middleware(ExceptionMiddleware, handlers=handlers)
    return Starlette(
        routes=[*status, Mount("/", routes=api, middleware=[cors, errors])],
        middleware=[Middleware(RequestLog)],
        exception_handlers={**handlers, Exception: error_response},
    )


def _api_routes(service: Service) -> list[Route]:
    options = service.options
    kept = KeptResponses(options, place=service.place)
    reader = ResponseReader(service.clients, kept)
    generated: dict[str, Reader] = {
        "/v1/completions": partial(read_completion, TextBody),
        PREFILL_PATH: partial(read_completion, PrefillBody),
        "/v1/chat/completions": partial(read_completion, ChatBody),
        "/chat/completions": partial(read_completion, ChatBody),
        messages.PATH: partial(messages.read_messages, MessagesBody, options),
        responses.PATH: partial(responses.read_responses, kept),
    }
    counted = partial(messages.read_messages, PromptBody, options)
    answered = {
        **{path: CompletionHandler(service, read) for path, read in generated.items()},
        messages.COUNT_PATH: PromptHandler(service, counted, token_count),
        TOKENIZE: PromptHandler(service, read_tokenized, partial(listed_tokens, options)),
        DETOKENIZE: PromptHandler(service, read_detokenized, text_of_tokens),
    }

    async def models(request: Request) -> Response:
        service.clients.require(request)
        # Clients take an answer for readiness, so it comes when a message would be answered.
        loaded = await service.loaded()
        listed = await run_in_threadpool(service.names.listed, loaded)
        ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
        return JSONResponse({"object": "list", "data": listed, "has_more": False, **ends})

    async def model(request: Request) -> Response:
        service.clients.require(request)
        name, loaded = request.path_params["name"], await service.loaded()
        return JSONResponse(await run_in_threadpool(service.names.described, name, loaded))

    async def end_session(request: Request) -> Response:
        name = request.path_params["name"]
        salt = salt_of(service.clients.require(request), request.query_params.get("cache_salt"))
        freed = await service.end_session(name, salt)
        described = {"id": name, "object": "session.deleted", "deleted": True}
        return JSONResponse(described | {"freed_blocks": freed})

    return [
        *(Route(path, handler, methods=["POST"]) for path, handler in answered.items()),
        Route(f"{responses.PATH}/{{name}}", reader.answer, methods=["GET", "DELETE"]),
        Route(f"{responses.PATH}/{{name}}/input_items", reader.inputs),
        Route(f"{responses.PATH}/{{name}}/cancel", reader.cancel, methods=["POST"]),
        Route(f"{SESSIONS}/{{name:path}}", end_session, methods=["DELETE"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]


def _status_routes(service: Service) -> list[Route]:
    async def health(_: Request) -> Response:
        age_s = round(service.thread.watch.age_s, 3)
        return _state(service.is_healthy, "ok", "unavailable", step_seconds=age_s)

    async def ready(_: Request) -> Response:
        return _state(service.is_ready, "ready", "not ready")

    def readable(answer: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
        """A route that answers those who may read what the server tells about its clients."""

        async def checked(request: Request) -> Response:
            service.hosts.require(request)
            if not service.options.open_status:
                service.clients.require_of_reader(request)
            # This may take the pools' locks, which may be held for a moment.
            return await run_in_threadpool(answer)

        return checked

    async def home(_: Request) -> Response:
        # Relative, so that a proxy may serve all of this below a path.
        return RedirectResponse("kv")

    paths: dict[str, Callable[[Request], object]] = {
        "/": home,
        **dict(zip(PROBES, (health, ready), strict=True)),
        "/metrics": readable(partial(status_page.metrics, service)),
        "/kv": readable(status_page.page),
        "/kv/data": readable(partial(status_page.data, service)),
    }
    return [Route(path, answer) for path, answer in paths.items()]


def _unknown_route(paths: list[str], request: Request, error: Exception) -> Response:
    """The answer to a request for a path that there is not, with those that there are."""
    known = ", ".join(dict.fromkeys(path.replace(":path}", "}") for path in paths))
    message = f"there is no route {shortened(request.url.path)}: the routes are {known}"
    return error_response(request, APIError(404, message, code="not_found"))


def error_response(request: Request, error: Exception) -> Response:
    """The answer to an exception, in the form of the route's interface."""
    answered = as_api_error(error)
    if request.url.path.startswith(messages.PATH):
        return JSONResponse(messages.error_body(answered), answered.status, answered.headers)
    return answered.response()


def _state(is_good: bool, good: str, bad: str, **more: float) -> Response:
    return JSONResponse({"status": good if is_good else bad, **more}, 200 if is_good else 503)
