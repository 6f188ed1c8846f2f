"""How the server takes connections: uvicorn's options, and the time that a request's head has."""

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0  # in which the head of a request has to arrive
GRACE_SECONDS = 10  # in which clients have to read the end of their answers after SIGTERM


class Connection(H11Protocol):
    """uvicorn's, closed where no request follows a connection or an answer in time: uvicorn waits for half a head."""

    waits: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.waits.cancel()

    def _wait(self) -> None:
        if self.waits:
            self.waits.cancel()
        self.waits = self.loop.call_later(HEAD_SECONDS, self._close_without_request)

    def _close_without_request(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def uvicorn_config(app: Any) -> uvicorn.Config:
    options = {"lifespan": "off", "timeout_graceful_shutdown": GRACE_SECONDS, "ws": "none", "server_header": False}
    return uvicorn.Config(app, http=Connection, log_level="warning", **options)
