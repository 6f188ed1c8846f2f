"""Values that the server's threads exchange: a request, the parts of its answer, a refusal, and what is served."""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from domino_jax.decoding.generate import Generator
from domino_jax.decoding.prefixes import Prefixes
from domino_jax.decoding.requests import Generation, QueuedRequest
from domino_jax.method.pair import Pair


class Refusal(Exception):
    """An answer in OpenAI's error form."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The models of a server. modes: that requests may name; the last one is the default."""

    name: str
    models: Pair
    generator: Generator
    tokenizer: Any
    modes: tuple[str, ...]
    prefixes: Prefixes


@dataclasses.dataclass(frozen=True)
class AnswerPart(Generation):
    """The tokens that one dispatch added to an answer.

    cached: of QueuedRequest.  seconds: of the dispatch.  refusal: if the request failed, why.
    queued, first: seconds from the request's arrival to its row, and from there to its first token.
    at: when it was read (time.perf_counter).
    """

    cached: int = 0
    seconds: float = 0.0
    queued: float = 0.0
    first: float = 0.0
    refusal: Refusal | None = None
    at: float = dataclasses.field(default_factory=time.perf_counter)


@dataclasses.dataclass(eq=False, kw_only=True)
class ServedRequest(QueuedRequest):
    """A request with the function that takes the parts of its answer, which the engine's thread calls.

    queued: it has been given to a queue.  awaited: the compilation that it waits for before that.
    """

    mode: str
    deliver: Callable[[AnswerPart], None]
    arrived: float = dataclasses.field(default_factory=time.perf_counter)
    queued: bool = False
    awaited: Future | None = None
    first: float | None = None

    def next_part(self, seconds: float) -> AnswerPart | None:
        """The part that was not delivered yet; None where there is none: an admission also reads the rows of others."""
        piece = self.next_piece()
        if not (piece.token_ids or piece.finish_reason):
            return None
        self.first = self.first or time.perf_counter()
        times = seconds, self.admitted - self.arrived, self.first - self.admitted
        return AnswerPart(*vars(piece).values(), self.cached, *times)
