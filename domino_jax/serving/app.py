"""The HTTP side of the server: routes, limits, streams, and the page."""

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import pathlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from domino_jax.serving.engine import READY, Engine
from domino_jax.serving.protocol import Answer, BodyRequest, read_requests, summed, whole
from domino_jax.serving.requests import AnswerPart, Refusal, ServedRequest

PAGE = pathlib.Path(__file__).with_name("page.html")
MOST_BYTES = 4 << 20  # of a body
IDLE_SECONDS = 30  # in which the next request of a connection has to come
GRACE_SECONDS = 10  # in which clients have to read the end of their answers after SIGTERM
PATHS = "this server has /v1/chat/completions, /v1/completions and /v1/models, and no Responses API"
LOG = logging.getLogger(__name__)


class Server:
    """The application's functions, which share the engine and the settings."""

    def __init__(self, engine: Engine, key: str | None):
        self.engine, self.key = engine, key

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    async def health(self, request: Request) -> Response:
        status = self.engine.status
        return PlainTextResponse(status, 200 if status == READY else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.engine.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """All models, or the one that the path names."""
        self._check(request)
        served = self.engine.served
        model = {"id": served.name, "object": "model", "created": 0, "owned_by": "domino_jax", "modes": served.modes}
        model["max_model_len"] = served.generator.limits.room(0)
        if request.path_params.get("name", served.name) != served.name:
            raise Refusal(f"the model is {served.name!r}.", 404, "model", "model_not_found")
        return Json(model if request.path_params else {"object": "list", "data": [model]})

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def text(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _answer(self, request: Request, chat: bool) -> Response:
        try:
            return await self._complete(request, chat)
        except asyncio.CancelledError as end:  # uvicorn's, when the server leaves before the body has come
            raise Refusal("the server stops.", 503) from end

    def _check(self, request: Request) -> None:
        if self.key:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), self.key.encode()):
                raise Refusal("the API key is missing or wrong.", 401, code="invalid_api_key")
        if self.engine.status != READY:
            raise Refusal(f"the server is {self.engine.status}.", 503)

    async def _complete(self, request: Request, chat: bool) -> Response:
        self._check(request)
        # Pages of other sites may send any other type without asking first.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal("the Content-Type of the request must be application/json.", 415)
        body = await read_body(request)
        # On another thread: a text of a megabyte is tokenized for a second.
        requests = await asyncio.to_thread(read_requests, body, chat, self.engine.served)
        exchange = Exchange(self.engine, requests, chat)
        exchange.submit()
        if requests[0].stream:
            choices = {"media_type": "text/event-stream", "headers": {"Cache-Control": "no-cache"}}
            # The background task also runs when the client has left.
            return Stream(exchange.events(), background=BackgroundTask(exchange.cancel), **choices)
        texts = asyncio.ensure_future(exchange.texts())
        left = asyncio.ensure_future(request.receive())  # the body is read: next comes the end of the connection
        try:
            await asyncio.wait({texts, left}, return_when=asyncio.FIRST_COMPLETED)
            if not texts.done():
                raise ClientDisconnect
            return Json(whole(list(exchange.requests), texts.result()))
        finally:
            texts.cancel()
            left.cancel()
            exchange.cancel()


class Exchange:
    """The answers to the prompts of one body, their requests, and the parts of these as they arrive."""

    def __init__(self, engine: Engine, body: Sequence[BodyRequest], chat: bool):
        self.engine, self.body, self.requests, self.arrivals = engine, body[0], {}, asyncio.Queue()
        self.loop, name = asyncio.get_running_loop(), f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        for index, part in enumerate(body):
            answer = Answer(part, chat, engine.served, index, name)
            deliver = functools.partial(self._deliver, answer)
            self.requests[answer] = ServedRequest(part.prompt, part.request, mode=part.mode, deliver=deliver)

    def _deliver(self, answer: Answer, part: AnswerPart) -> None:
        """On the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.arrivals.put_nowait, (answer, part))

    def submit(self) -> None:
        """Raises Refusal, where not all of the requests find a place."""
        try:
            for request in self.requests.values():
                self.engine.submit(request)
        except Refusal:
            self.cancel()
            raise

    def cancel(self) -> None:
        for request in self.requests.values():
            self.engine.cancel(request)

    async def parts(self) -> AsyncIterator[tuple[Answer, list[str]]]:
        """An answer, and what a part adds to its text, up to the end of all. Raises Refusal."""
        while not all(answer.finish_reason for answer in self.requests):
            answer, part = await self.arrivals.get()
            if answer.finish_reason:
                continue  # a stop string ended it
            if part.refusal:
                raise part.refusal
            last, texts = answer.cut and answer.cut.at, answer.add(part)
            request = self.requests[answer]
            self.engine.metrics.count(request, answer.cut, last)
            if answer.finish_reason:
                self.engine.cancel(request)
            yield answer, texts

    async def texts(self) -> list[str]:
        """The whole text of each answer. Raises Refusal."""
        pieces = {answer: [] for answer in self.requests}
        async for answer, texts in self.parts():
            pieces[answer] += texts
        return ["".join(texts) for texts in pieces.values()]

    async def events(self) -> AsyncIterator[str]:
        """The lines of a stream of server-sent events."""
        body, answers = self.body, list(self.requests)
        try:
            async for answer, texts in self.parts():
                more = {"domino": answer.details(texts)} if body.rounds else {}
                if answer.finish_reason or more or body.return_token_ids or any(texts):
                    usage = summed(answers).usage() if body.continuous_usage else None
                    yield line(answer.chunk("".join(texts), usage, **more))
        except Refusal as refusal:
            yield line(refusal.body)
            return
        if body.include_usage:
            total = summed(answers)
            yield line({**total.head(".chunk"), "choices": [], **total.totals()})
        yield "data: [DONE]\n\n"


class Stream(StreamingResponse):
    """Ends without a word when uvicorn cancels it, after the time that clients have to read their answers."""

    async def __call__(self, *arguments: Any) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await super().__call__(*arguments)


class Json(JSONResponse):
    """In ASCII, which can hold any text."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def line(value: dict[str, Any]) -> str:
    """An event in ASCII: clients that read line by line would cut it at U+2028, U+2029 and U+0085."""
    return f"data: {json.dumps(value)}\n\n"


async def read_body(request: Request) -> bytes:
    """Raises Refusal for a body that is too long."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise Refusal(f"the body has more than {MOST_BYTES} bytes.", 413)
    return bytes(body)


async def on_refusal(request: Request, refusal: Refusal) -> Response:
    if refusal.status < 429:  # not for the load of the server
        text = f"{request.method} {request.url.path[:200]}: {refusal.status}, {refusal}"
        LOG.warning("%s", "".join(letter if letter.isprintable() else " " for letter in text))
    # Not for 413: uvicorn reads the rest of the body, so that a client that still sends gets the answer.
    headers = {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}
    return Json(refusal.body, refusal.status, headers.get(refusal.status))


async def on_http_error(request: Request, error: HTTPException) -> Response:
    origins = "pages of another origin may ask where the server is started with --allow_origin=ORIGIN"
    text = f"{error.detail}: {request.url.path}; {origins if request.method == 'OPTIONS' else PATHS}."
    response = await on_refusal(request, Refusal(text, error.status_code))
    response.headers.update(error.headers or {})  # Allow, with 405
    return response


async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # nobody reads it


def new_app(engine: Engine, key: str | None, hosts: Sequence[str] = ("*",), origin: str | None = None) -> Starlette:
    """The application around an engine.

    Args:
        key: that requests under /v1 must have, None or empty: none.
        hosts: names in the Host header that are answered; "*": all.
        origin: whose pages may ask, as https://example.org; "*": all, None: none but the server's own.
    """
    server = Server(engine, key)
    routes = [
        Route("/", server.page),
        Route("/health", server.health),
        Route("/metrics", server.metrics),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.models),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.text, methods=["POST"]),
    ]
    handlers = {Refusal: on_refusal, HTTPException: on_http_error, ClientDisconnect: on_disconnect}
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)]
    if origin:
        allowed = {"allow_origins": [origin], "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        middleware.append(Middleware(CORSMiddleware, **allowed))
    return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)


def uvicorn_config(app: Starlette) -> uvicorn.Config:
    limits = {"timeout_keep_alive": IDLE_SECONDS, "timeout_graceful_shutdown": GRACE_SECONDS}
    options = {"lifespan": "off", "ws": "none", "server_header": False, "log_level": "warning"}
    return uvicorn.Config(app, http="h11", **options, **limits)
