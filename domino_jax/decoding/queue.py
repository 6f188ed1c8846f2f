"""Requests through the rows of one batch, one dispatch at a time: the loop of `Generator` and of the server's engine.

while queue.live() or queue.waiting:
    queue.admit()             # the sizes of batch and caches; the prefills of requests that get a row
    queue.advance(rounds)     # one dispatch, whose width follows the last ones where it is adaptive
    queue.collect()           # the only host read
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from domino_jax.decoding.prefill import ANY_SAMPLING, earlier_text, open_kind, prefill_program
from domino_jax.decoding.prefixes import CachedText, Prefixes
from domino_jax.decoding.programs import Clock, Program, Programs
from domino_jax.decoding.requests import Request
from domino_jax.decoding.settings import TREE
from domino_jax.decoding.width import PROBE, Choice, Dispatch
from domino_jax.method.loop import DecodeState, put_rows, take_rows
from domino_jax.method.pair import Models
from domino_jax.method.settings import SamplingKind
from domino_jax.models.cache import resize, slots_of

QUEUE_STEP = 128  # caches of a queue end at a multiple of it: TPUs pad scores to as many lanes


@dataclasses.dataclass(eq=False)
class Ticket:
    """A request, and its answer as far as it has come.

    token_ids, accept_lengths, finish_reason: of Generation; finish_reason is None until the end.
    length: committed tokens, the prompt's included.  drafted: drafts verified so far.
    cached: tokens of the prompt whose keys and values an earlier text had left.
    rejected: drafts of the last dispatch that were not emitted, if it was one round of a chain.
    """

    prompt: Sequence[int]
    request: Request
    token_ids: list[int] = dataclasses.field(default_factory=list)
    accept_lengths: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    length: int = 0
    drafted: int = 0
    cached: int = 0
    rejected: Sequence[int] = ()


class Queue:
    """The rows of a batch and the requests that wait for one.

    Args:
        tickets: all requests. None: they keep coming, each with its own sampling. The batch then grows again, and each
            prompt is read alone, so that few programs serve any mixture.
        prefixes: where finished texts leave their caches, and prompts look for them. In fixed shape they are not used:
            what one mode has left would decide what another one reads, and texts read in two parts may round otherwise.
        clock: counts on; a new one when None.

    rows: None for those that are free.
    kind: of all requests, so that one program serves them; None where all sample as the generator does. Where requests
        keep coming it is the same for all programs but prefills and rounds, whose kind follows from their requests.
    least, most: slots that the caches have at all times, and that they never exceed.
    general: batch and caches have their largest size and rounds serve any sampling, so that few programs serve any
        requests; else they have the size that the requests need.
    """

    def __init__(
        self,
        generator: Programs,
        models: Models,
        mode: str,
        tickets: Sequence[Ticket] | None = None,
        *,
        prefixes: Prefixes | None = None,
        clock: Clock | None = None,
    ):
        self.generator, self.models, self.mode = generator, models, mode
        self.plain, self.open = generator.plain(mode), tickets is None
        self.prefixes = prefixes if prefixes and prefixes.most_bytes and not generator.settings.fixed_shape else None
        self.clock = clock or Clock()
        self.rows: list[Ticket | None] = []
        self.waiting: deque[Ticket] = deque(tickets or ())
        samplings = {ticket.request.sampling for ticket in self.waiting}
        delayed = any(ticket.request.min_tokens for ticket in self.waiting)
        plain = not delayed and samplings <= {generator.settings.sampling}
        self.kind = ANY_SAMPLING if self.open else None if plain else SamplingKind.of(samplings, delayed)
        self.general = False
        self.least, self.most = self._cache_sizes()
        self.state: DecodeState | None = None
        self.controller = generator.controller(mode)
        self.pace = self.controller and self.controller.new_pace()
        self.ran: Dispatch | None = None  # the last one, where the width is adaptive

    def add(self, prompt: Sequence[int], request: Request) -> Ticket:
        self.waiting.append(Ticket(prompt, request))
        return self.waiting[-1]

    def live(self) -> dict[int, Ticket]:
        """{place: ticket} of the rows that answer a request."""
        return {place: ticket for place, ticket in enumerate(self.rows) if ticket}

    # ------------------------------------------------------------------------------------------------- one step

    def admit(self) -> list[Ticket]:
        """Fits batch and caches to the requests that are left, and starts those that get a row; returns these."""
        rows = self._batch_rows()
        if self.state is None:
            self.rows, real = [None] * rows, list(range(rows))
        else:
            real = self._cut(rows)
        together = self._together()
        places = self._fill(together if self.state else 1)
        tickets = [self.rows[place] for place in places]
        if not self.live():
            return []
        if self.pace and tickets and (self.state is None or len(self.rows) == 1):
            self.pace.new_text()
        if self.open:
            self._sample_by(self.kind)
        rest = list(zip(places, tickets, strict=True))
        if self.state is None:
            whole = 1 if self.open else len(rest)
            self.state = self.prefill(tickets[:whole], whole if self.open else rows)
            real, rest = ([0] if self.open else real), rest[whole:]
        self._fit(real)
        for first in range(0, len(rest), together):
            self._put(rest[first : first + together])
        if self.open:
            self._sample_by(self._rounds_kind())
        return tickets

    def settled(self) -> bool:
        """Whether batch and caches have the size that the requests need, and none can start: admit() does nothing."""
        if not self.state or (self.waiting and None in self.rows):
            return False
        sizes = len(self.rows), slots_of(self.state.target_cache), self.state.sampling.kind
        return sizes == (self._batch_rows(), self._cache_slots(), self._rounds_kind())

    def idle(self) -> int:
        """The most rows that may be done while a dispatch goes on (loop.run_rounds): it ends when requests that wait
        can have rows, or a smaller batch holds the rest."""
        smaller = 0 if self.general else self.generator.smaller_batch(len(self.rows))
        return (self._together() if self.waiting else len(self.rows) - smaller) - 1

    def advance(self, rounds: int) -> None:
        """Up to `rounds` rounds in one dispatch."""
        clock, choice = self.clock, None
        if self.pace:
            choices = () if self.general else (self.controller.choose(self.pace, len(self.rows)), self.pace.used)
            at_hand = (one for one in choices if one and self.generator.at_hand(self._rounds(rounds, one)))
            choice = next(at_hand, Choice(self.controller.widths[-1], PROBE))
        compiled = clock.compile_seconds
        self.state, seconds = self.generator.run(clock, self._rounds(rounds, choice))
        clock.decode_seconds += seconds
        if choice:
            self.ran = Dispatch(choice, len(self.rows), seconds, timed=clock.compile_seconds == compiled)

    def _rounds(self, rounds: int, choice: Choice | None) -> Program:
        limits = {"idle": self.idle(), "drafts": choice and choice.drafts}
        rounds = min(rounds, choice.rounds) if choice else rounds
        return self.generator.dispatch(self.models, self.state, self.mode, rounds, **limits)

    def collect(self) -> list[Ticket]:
        """Reads what the live rows have emitted since the last call, frees the rows that are done; returns all live."""
        state, tickets = self.state, self.live()
        columns = state.done, state.lengths, state.drafted, state.counts, state.rounds, state.tokens, state.accepts
        done, lengths, drafted, counts, rounds, tokens, accepts = jax.device_get(columns)
        emitted, longest = [], 0
        for place, ticket in tickets.items():
            before = len(ticket.token_ids)
            ticket.token_ids += tokens[place, before : counts[place]].tolist()
            fresh = accepts[place, len(ticket.accept_lengths) : rounds[place]].tolist()
            ticket.accept_lengths += fresh
            emitted += fresh[: len(fresh) - bool(done[place])]  # the end of an answer cuts its last round
            longest = max(longest, len(fresh))
            self.clock.decode_tokens += len(ticket.token_ids) - max(before, 1)
            drafts, end = int(drafted[place]) - ticket.drafted, counts[place]
            self.clock.drafts += drafts
            one = len(fresh) == 1 and self.mode != TREE
            ticket.rejected = tokens[place, end : end + drafts + 1 - fresh[0]].tolist() if one else ()
            ticket.length, ticket.drafted = int(lengths[place]), int(drafted[place])
            if done[place]:
                stopped = ticket.token_ids[-1] in np.asarray(self.generator.stop_ids)
                ticket.finish_reason = "stop" if stopped and not ticket.request.ignore_eos else "length"
                self.rows[place] = None
                if self.prefixes:
                    self._keep(place, ticket)
        if self.ran and longest:
            self.clock.exploring_seconds += self.controller.observe(self.pace, self.ran, longest, emitted)
            self.clock.widths[str(self.ran.choice.drafts)] += longest
        self._free_idle()
        return list(tickets.values())

    def drop(self, ticket: Ticket) -> None:
        """Gives up a request: it no longer waits, or its row is free for the next one."""
        if ticket in self.waiting:
            self.waiting.remove(ticket)
        for place, live in self.live().items():
            if live is ticket:
                self.rows[place] = None
                self._free_idle()
                if self.state is None:
                    return
                ended = np.arange(len(self.rows)) == place
                self.state = self.state.replace(done=np.asarray(self.state.done) | ended)

    def _free_idle(self) -> None:
        """An open queue without requests holds no caches while it waits for the next one."""
        if self.open and not self.live():
            self.state = None

    # ------------------------------------------------------------------------------------------------- prefills

    def prefill(self, tickets: Sequence[Ticket], rows: int) -> DecodeState:
        """A batch of `rows`; those without a request are done once they have a single token."""
        [first, *_], earlier = tickets, None
        if self.prefixes and rows == 1:
            earlier, first.cached = earlier_text(self, first)
        program = prefill_program(self, tickets, rows, earlier)
        if earlier and not self.generator.at_hand(program):
            first.cached = 0
            program = prefill_program(self, tickets, rows)
        state, seconds = self.generator.run(self.clock, program)
        self.clock.prefill_seconds += seconds
        return state.replace(sampling=state.sampling.replace(kind=self.kind)) if self.open else state

    def _sample_by(self, kind: SamplingKind) -> None:
        if self.state:
            self.state = self.state.replace(sampling=self.state.sampling.replace(kind=kind))

    def _put(self, rest: Sequence[tuple[int, Ticket]]) -> None:
        """New requests in place of rows that are done; their places and tickets."""
        places, tickets = zip(*rest, strict=True)
        fresh = self.prefill(tickets, len(tickets))
        sizes = len(self.rows), slots_of(self.state.target_cache), len(tickets), slots_of(fresh.target_cache)
        arguments = (self.state, fresh, np.array(places, np.int32))
        program = Program(("admit", *sizes, self.plain, self.kind), put_rows, arguments, donate=(0,))
        self.state, seconds = self.generator.run(self.clock, program)
        self.clock.prefill_seconds += seconds

    def _keep(self, place: int, ticket: Ticket) -> None:
        """Stores the caches of a row that is done, cut to its text; without memory for it, frees all that are stored.

        The answer is complete: it must not fail because of a copy that only later prompts need.
        """
        caches, whole = (self.state.target_cache, self.state.draft_cache), slots_of(self.state.target_cache)
        slots = min(self.generator.slots(ticket.length), whole)
        key = ("keep", len(self.rows), whole, slots, self.plain)
        arguments = (self.models, caches, np.array([place], np.int32))
        program = Program(key, functools.partial(_cut_out, slots=slots), arguments)
        if not self.generator.at_hand(program):
            return
        try:
            caches, _ = self.generator.run(self.clock, program)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self.prefixes.clear()
            return
        text = np.array([*ticket.prompt, *ticket.token_ids][: ticket.length], np.int32)
        self.prefixes.add(CachedText(text, *caches))

    # ---------------------------------------------------------------------------------------------------- sizes

    def whole_answers(self) -> int:
        """Slots for the longest prompt that waits, with its whole answer and a block of any mode."""
        longest = max(len(ticket.prompt) + ticket.request.max_new_tokens for ticket in self.waiting)
        return longest + self.generator.limits.block_rows

    def _cache_sizes(self) -> tuple[int, int]:
        generator, largest = self.generator, self.generator.settings.cache_length
        if generator.settings.fixed_shape:
            # Sums over more slots may round otherwise, and modes reach a length after different numbers of rounds. So
            # the caches keep one size, which does not depend on the mode.
            return generator.slots(self.whole_answers()) if self.waiting else largest, largest
        if len(self.waiting) <= generator.settings.batch_size:
            return 0, largest
        # While prompts wait some row is always near its end, so the caches stay at their largest: no power of two.
        room = QUEUE_STEP * -(-self.whole_answers() // QUEUE_STEP)
        longest = max(len(ticket.prompt) for ticket in self.waiting)
        return 0, min(max(room, generator.slots(generator.bucket(longest))), largest)

    def slots(self, wanted: int) -> int:
        return max(self.least, min(wanted, self.most))

    def _batch_rows(self) -> int:
        settings, requests = self.generator.settings, len(self.live()) + len(self.waiting)
        return settings.batch_size if self.general else self.generator.batch_rows(requests)

    def _cache_slots(self) -> int:
        """Slots for the longest live row and a block."""
        longest = max(ticket.length for ticket in self.live().values())
        wanted = self.slots(self.generator.slots(longest + self.generator.block_rows(self.mode)))
        return self.most if self.general else wanted

    def _rounds_kind(self) -> SamplingKind:
        """The kind of an open queue's rounds."""
        return open_kind([ticket.request for ticket in self.live().values()], cheapest=not self.general)

    def _together(self) -> int:
        """How many of the requests that wait take rows together."""
        return 1 if self.open else self.generator.admitted_together(len(self.rows), len(self.waiting))

    def _cut(self, rows: int) -> list[int]:
        """Changes the number of rows; returns the old places of those that stay, live ones first where some go."""
        places = list(range(len(self.rows)))
        if rows < len(self.rows):
            places = sorted(places, key=lambda place: self.rows[place] is None)[:rows]
        self.rows = [self.rows[place] for place in places] + [None] * (rows - len(places))
        return places

    def _fill(self, multiple: int) -> list[int]:
        """Gives free rows to waiting requests, a multiple of `multiple` of them; returns their places."""
        free = [place for place, ticket in enumerate(self.rows) if ticket is None][: len(self.waiting)]
        free = free[: len(free) // multiple * multiple]
        for place in free:
            self.rows[place] = self.waiting.popleft()
            self.rows[place].length = len(self.rows[place].prompt)
        return free

    def _fit(self, places: Sequence[int]) -> None:
        """Takes the rows at `places`, and rows that are done after them, with caches for the longest row and a block.

        It works layer by layer, so that at most one layer exists twice at a time.
        """
        generator, state, rows = self.generator, self.state, len(self.rows)
        slots = self._cache_slots()
        before, real = state.done.shape[0], len(places)
        if (before, slots_of(state.target_cache)) == (rows, slots):
            return
        places = np.array([*places, *[0] * (rows - real)], np.int32)

        def run(key: tuple, function, *arguments):
            fitted, seconds = generator.run(self.clock, Program(key, function, arguments))
            self.clock.decode_seconds += seconds
            return fitted

        def fit(part, slots):
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(part))
            fitted = run(("resize", shapes, rows, slots), functools.partial(_fit_part, slots=slots), part, places)
            generator.delete(part)
            return fitted

        target = tuple(fit(layer, slots) for layer in state.target_cache)
        config = self.models.drafter and self.models.drafter.config
        draft = tuple(fit(part, config.cache_slots(i, slots)) for i, part in enumerate(state.draft_cache))
        state = state.replace(target_cache=(), draft_cache=())
        if rows != before:
            state = run(("rows", before, rows, self.kind), _take, state, places, np.arange(rows) >= real)
        self.state = state.replace(target_cache=target, draft_cache=draft)


def _take(state: DecodeState, places: jax.Array, ended: jax.Array) -> DecodeState:
    state = take_rows(state, places)
    return state.replace(done=state.done | ended)


def _cut_out(models: Models, caches: tuple, places: jax.Array, slots: int) -> tuple:
    """Both caches of the rows at `places`, with slots for texts that fit `slots`."""
    target, draft = take_rows(caches, places)
    return resize(target, slots), models.resize_context(draft, slots)


def _fit_part(part, places: jax.Array, slots: int):
    """A layer of a cache, or another part of what a drafter keeps."""
    if len(places) != len(jax.tree.leaves(part)[0]):
        part = take_rows(part, places)
    return resize(part, slots)
