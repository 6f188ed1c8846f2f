"""How the server takes connections: the options of uvicorn, the time for a request's head, and who may ask."""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from domino_jax.serving.engine import Refusal

HEAD_SECONDS = 30.0  # in which the head of a request has to arrive, and what is left of a body that was refused
GRACE_SECONDS = 10  # in which clients have to read the end of their answers after SIGTERM


class Connection(H11Protocol):
    """uvicorn's, which closes a connection without a request, and answers what is no HTTP in OpenAI's error form."""

    waits: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait_for_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.waits.cancel()

    def _wait_for_request(self) -> None:
        if self.waits:
            self.waits.cancel()
        self.waits = self.loop.call_later(HEAD_SECONDS, self._close_without_request)

    def _close_without_request(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(Refusal(f"{msg} {sys.exception() or ''}".strip()).body).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()


class Hosts:
    """Refuses requests to other host names. One without a name is no browser's, so no page of another site sent it."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]):
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        if host and "*" not in self.hosts and _name(host) not in self.hosts:
            answered = ", ".join(sorted(self.hosts))
            message = (
                f"the request is for host {host[:80]!r}, and this server answers {answered} alone; send one of these"
            )
            refusal = Refusal(f"{message} as Host, or start it with --host=ADDRESS of this machine.")
            await JSONResponse(refusal.body, refusal.status)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def uvicorn_config(app: Any) -> uvicorn.Config:
    options = {"lifespan": "off", "timeout_graceful_shutdown": GRACE_SECONDS, "ws": "none", "server_header": False}
    return uvicorn.Config(app, http=Connection, log_level="warning", **options)
