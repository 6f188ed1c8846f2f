"""Prompts in, answers out: prompts queue for the rows of a batch, whose size follows the work that is left."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from domino_jax.decoding.limits import Limits
from domino_jax.decoding.prefixes import Prefixes
from domino_jax.decoding.programs import Clock, Programs
from domino_jax.decoding.queue import Queue, whole_answers
from domino_jax.decoding.requests import Generation, QueuedRequest, Request, with_defaults
from domino_jax.decoding.settings import BASELINE, DRAFT, DecodeSettings
from domino_jax.method.loop import DecodeState
from domino_jax.method.pair import Pair

POLLED_ROUNDS = 32  # rounds of a dispatch when the caller polls between dispatches: seconds of work at most


class Generated(NamedTuple):
    answers: list[Generation]
    clock: Clock


@dataclasses.dataclass(frozen=True, eq=False)
class Generator(Programs):
    """Generates for any number of prompts with programs of fixed shapes, whose sizes follow the work that is left
    (batch_shape.py). `new_generator` makes one."""

    # ------------------------------------------------------------------------------------------- whole answers

    def generate(
        self,
        models: Pair,
        prompts: Sequence[Sequence[int]],
        mode: str,
        requests: Sequence[int | Request] | None = None,
        between: Callable[[int], None] | None = None,
    ) -> Generated:
        """Answers in the order of the prompts, at most `batch_size` in flight at a time, and the time they took.

        Args:
            requests: for each prompt a Request, or only the id of its noise; the prompt's index when None.
            between: called after every few rounds with the number of answers finished.

        Raises:
            DataError: an empty prompt or one that does not fit, before anything runs.
        """
        queue = self.queue(models, mode, prompts, requests)
        queued = list(queue.waiting)
        # A round emits at least one token per unfinished row, so this many rounds always suffice.
        most = POLLED_ROUNDS if between else self.settings.max_new_tokens
        while queue.busy():
            queue.step(most)
            if between:
                between(sum(request.finish_reason is not None for request in queued))
        return Generated([entry.next_piece() for entry in queued], queue.clock)

    def stream(
        self,
        models: Pair,
        prompt: Sequence[int],
        mode: str,
        chunk_rounds: int = 1,
        request: int | Request = 0,
        clock: Clock | None = None,
        prefixes: Prefixes | None = None,
    ) -> Iterator[Generation]:
        """One answer piece by piece, `chunk_rounds` rounds at a time at most.

        Args:
            clock: counts on with every piece.
            prefixes: of earlier texts, from which the prompt starts; the finished text is added.
        """
        one_row = dataclasses.replace(self, settings=self.settings.change(batch_size=1))
        queue = one_row.queue(models, mode, [prompt], [request], prefixes=prefixes, clock=clock)
        [queued] = queue.waiting

        def pieces() -> Iterator[Generation]:
            while not queued.finish_reason:
                queue.step(chunk_rounds if queued.token_ids else 0)
                yield queued.next_piece()

        return pieces()

    def start(self, models: Pair, prompts: Sequence[Sequence[int]], requests: Sequence[int | Request]) -> DecodeState:
        """Prefills one batch of batch_size rows, with room for the whole answers and a block of any mode.

        Rows without a prompt are done once they have a single token.
        """
        queued = [QueuedRequest(*pair) for pair in zip(prompts, map(self.request, requests), strict=True)]
        queue = Queue(self, models, DRAFT if models.drafter else BASELINE, queued)
        queue.limits = dataclasses.replace(queue.limits, least=self.slots(whole_answers(self, queued)))
        return queue.prefill(queued, self.settings.batch_size)

    # ------------------------------------------------------------------------------------------------- requests

    def queue(
        self,
        models: Pair,
        mode: str,
        prompts: Sequence[Sequence[int]],
        requests: Sequence[int | Request] | None = None,
        **choices: Any,
    ) -> Queue:
        """A queue in which these prompts wait. requests, and errors: as for `generate`.  choices: as for Queue."""
        self.check_mode(mode)
        requests = map(self.request, range(len(prompts)) if requests is None else requests)
        queued = [QueuedRequest(*pair) for pair in zip(prompts, requests, strict=True)]
        for index, entry in enumerate(queued):
            self.check_prompt(entry.prompt, f"prompt {index}", entry.request)
        return Queue(self, models, mode, queued, **choices)

    def request(self, request: int | Request) -> Request:
        return with_defaults(request, self.settings)

    def check_prompt(self, prompt: Sequence[int], name: str, request: int | Request = 0) -> None:
        """Raises DataError for a prompt that cannot be answered (limits.py)."""
        self.limits.check_prompt(prompt, self.request(request).max_new_tokens, name)


def new_generator(models: Pair, settings: DecodeSettings, stop_ids: Sequence[int] = ()) -> Generator:
    """The generator of these models, of which only the shapes are read.

    stop_ids: token ids that end an answer. Those outside the vocabulary are dropped, because no
        token has them.

    Raises:
        DominoError: settings that do not fit the models.
    """
    vocab, drafter = models.target.config.vocab_size, models.drafter and models.drafter.config
    settings.check(vocab, drafter)
    limits = Limits.of(models, settings)
    # An id that no token has keeps the array non-empty without ever stopping a row.
    stop_ids = sorted({token for token in stop_ids if token < vocab}) or [-1]
    return Generator(settings, drafter, limits, jnp.asarray(stop_ids, jnp.int32))
