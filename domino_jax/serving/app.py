"""The HTTP side of the server: routes, limits, streams, and the page."""

import asyncio
import contextlib
import hmac
import json
import pathlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from domino_jax.serving.engine import READY, Engine, Job, Refusal, Update
from domino_jax.serving.protocol import Answer, parse_body, read_request

PAGE = pathlib.Path(__file__).with_name("page.html")
MOST_BYTES = 4 << 20  # of a body
BODY_SECONDS = 30.0  # in which a body has to arrive
SLACK = 30.0  # seconds that a client has to read an answer after the engine's limit


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
        self._check(request)
        served = self.engine.served
        model = {"id": served.name, "object": "model", "created": 0, "owned_by": "domino_jax", "modes": served.modes}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(self, request: Request) -> Response:
        return await self._complete(request, chat=True)

    async def text(self, request: Request) -> Response:
        return await self._complete(request, chat=False)

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
        raw, served = parse_body(await read_body(request)), self.engine.served
        asked = await asyncio.to_thread(read_request, raw, chat, served)
        loop, arrivals = asyncio.get_running_loop(), asyncio.Queue()

        def deliver(update: Update) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(arrivals.put_nowait, update)

        job = Job(asked.prompt, asked.request, asked.mode, deliver, asked.stream and asked.drafts)
        answer = Answer(asked, chat, served)
        self.engine.submit(job)
        if asked.stream:
            return Events(events(answer, arrivals), self.engine, job)
        whole = asyncio.ensure_future(whole_text(answer, arrivals))
        left = asyncio.ensure_future(request.receive())  # the body is read: next comes the end of the connection
        try:
            await asyncio.wait({whole, left}, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise ClientDisconnect
            return JSONResponse(answer.whole(whole.result()))
        finally:
            whole.cancel()
            left.cancel()
            self.engine.cancel(job)


class Events(StreamingResponse):
    """A stream of one job, which is given up when the client leaves or does not read."""

    def __init__(self, lines: AsyncIterator[str], engine: Engine, job: Job):
        super().__init__(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.engine, self.job = engine, job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            async with asyncio.timeout(self.engine.timeout + SLACK):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            return  # uvicorn closes the connection
        finally:
            self.engine.cancel(self.job)


async def events(answer: Answer, arrivals: asyncio.Queue) -> AsyncIterator[str]:
    """The lines of a stream of server-sent events."""
    if answer.chat:
        yield line(answer.first_chunk())
    try:
        async for texts, update in updates(answer, arrivals):
            more = {"domino": answer.details(texts, update)} if answer.asked.rounds else {}
            if answer.finish_reason or more or any(texts):
                yield line(answer.chunk("".join(texts), **more))
    except Refusal as refusal:
        yield line(refusal.body)
        return
    if answer.asked.include_usage:
        yield line(answer.usage_chunk())
    yield "data: [DONE]\n\n"


async def whole_text(answer: Answer, arrivals: asyncio.Queue) -> str:
    return "".join([text async for texts, _ in updates(answer, arrivals) for text in texts])


async def updates(answer: Answer, arrivals: asyncio.Queue) -> AsyncIterator[tuple[list[str], Update]]:
    """What each update adds to the text, and the update, up to the end of the answer. Raises Refusal."""
    while not answer.finish_reason:
        update = await arrivals.get()
        if update.refusal:
            raise update.refusal
        yield answer.add(update), update


def line(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def read_body(request: Request) -> bytes:
    """Raises Refusal for a body that is too long or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise Refusal(f"the body has more than {MOST_BYTES} bytes.", 413)
    except TimeoutError:
        raise Refusal(f"the body did not arrive in {BODY_SECONDS:g} seconds.", 408) from None
    return bytes(body)


async def on_refusal(request: Request, refusal: Refusal) -> Response:
    headers = {"Retry-After": "1"} if refusal.status in (429, 503) else {}
    if refusal.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not read
    return JSONResponse(refusal.body, refusal.status, headers)


async def on_http_error(request: Request, error: HTTPException) -> Response:
    return JSONResponse(Refusal(f"{error.detail}: {request.url.path}", error.status_code).body, error.status_code)


async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # nobody reads it


def new_app(engine: Engine, key: str | None, hosts: Sequence[str] = ("*",)) -> Starlette:
    """The application around an engine.

    Args:
        key: that requests under /v1 must have, None or empty: none.
        hosts: names in the Host header that are answered; "*": all.
    """
    server = Server(engine, key)
    routes = [
        Route("/", server.page),
        Route("/health", server.health),
        Route("/metrics", server.metrics),
        Route("/v1/models", server.models),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.text, methods=["POST"]),
    ]
    handlers = {Refusal: on_refusal, HTTPException: on_http_error, ClientDisconnect: on_disconnect}
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    return Starlette(routes=routes, exception_handlers=handlers, middleware=[hosts])
