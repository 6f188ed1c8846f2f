"""The options that a single prompt may set besides its tokens."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from domino_jax.decoding.settings import DecodeSettings
from domino_jax.method.settings import SAMPLING_VALUES, Problem, SamplingParams
from domino_jax.runtime.errors import DataError, check_value, quote
from domino_jax.runtime.keys import LARGEST


@dataclasses.dataclass(frozen=True)
class Request:
    """The options of one prompt; None: the generator's value.

    noise: keys the noise together with the seed (docs/method.md).
    min_tokens: the first tokens of the answer, none of which is a stop id.  ignore_eos: no stop id ends the answer.
    """

    noise: int
    seed: int | None = None
    max_new_tokens: int | None = None
    sampling: SamplingParams | None = None
    min_tokens: int = 0
    ignore_eos: bool = False


@dataclasses.dataclass(frozen=True)
class Generation:
    """One answer, or a piece of one that some rounds added.

    token_ids: new tokens only, a stop id included.  accept_lengths: tokens emitted per round, [] when plain.
    finish_reason: "stop" or "length"; None of a piece before the last.
    drafts: tokens that its rounds offered to the target.
    """

    token_ids: list[int]
    accept_lengths: list[int]
    finish_reason: str | None
    drafts: int = 0


@dataclasses.dataclass(eq=False)
class QueuedRequest:
    """A prompt with its request, and the answer so far.

    token_ids, accept_lengths, finish_reason: of Generation; finish_reason is None until the end.
    length: committed tokens, the prompt's included.  drafted: drafts verified so far.
    cached: tokens of the prompt whose keys and values were taken from an earlier text.
    admitted: when it got a row (time.perf_counter).
    shown: tokens, rounds and drafts of earlier pieces.
    """

    prompt: Sequence[int]
    request: Request
    token_ids: list[int] = dataclasses.field(default_factory=list)
    accept_lengths: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    length: int = 0
    drafted: int = 0
    cached: int = 0
    admitted: float = 0.0
    shown: tuple[int, int, int] = (0, 0, 0)

    def next_piece(self) -> Generation:
        """What no earlier piece has."""
        tokens, rounds, drafts = self.shown
        self.shown = len(self.token_ids), len(self.accept_lengths), self.drafted
        new = self.token_ids[tokens:], self.accept_lengths[rounds:]
        return Generation(*new, self.finish_reason, self.drafted - drafts)


def with_defaults(request: int | Request, settings: DecodeSettings) -> Request:
    """A request, or the id of its noise, with the settings' values where it has none."""
    request = request if isinstance(request, Request) else Request(request)
    missing = [name for name in ("seed", "max_new_tokens", "sampling") if getattr(request, name) is None]
    return dataclasses.replace(request, **{name: getattr(settings, name) for name in missing})


# The values that a prompt row may set; a sampling value that it leaves out is off.
ROW_VALUES = ("seed", "max_new_tokens", *SAMPLING_VALUES)


def request_of(row: Mapping[str, Any], noise: int) -> int | Request:
    """The request of a prompt row: seed, max_new_tokens and sampling values under their names.

    A row with a seed has the noise of the first prompt of a run with that seed, wherever it is in the file.

    Raises:
        DataError: a value of the wrong kind or out of range.
    """
    values = {name: row[name] for name in ROW_VALUES if name in row}
    if not values:
        return noise
    where = f"prompt {row['id']}"
    for name, value in values.items():
        kinds = (int, float) if name in ("temperature", "top_p", "min_p") else (int,)
        number = isinstance(value, kinds) and not isinstance(value, bool)
        check_value(number, f"{where}: {name}", value, "a number")
        if name != "seed" and LARGEST < abs(value) < math.inf:
            raise DataError(f"{where} has {name} {str(value)[:20]}…, which does not fit int32; give {LARGEST} or less.")
    sampling = None
    if set(values) - {"seed", "max_new_tokens"}:
        sampling = SamplingParams(**{name: values[name] for name in SAMPLING_VALUES if name in values})
    problem = sampling and sampling.problem()
    if problem := problem or ("seed" in values and seed_problem(values["seed"])):
        raise DataError(f"{where}: {problem}")
    return Request(0 if "seed" in values else noise, values.get("seed"), values.get("max_new_tokens"), sampling)


def recorded(request: Request) -> dict[str, Any]:
    """The sampling of an answer as JSON values, as a row of answers states it."""
    return {"seed": request.seed, "noise": request.noise, **dataclasses.asdict(request.sampling)}


def recorded_request(row: Mapping[str, Any], place: int, where: str) -> Request:
    """The sampling of an answer: that which its row records, else the row's own values, else none, which is greedy.

    place: of the row, which keys the noise where none is recorded.

    Raises:
        DataError: a value out of range.
    """
    values = {"seed": 0, **{name: row[name] for name in ROW_VALUES if name in row}}
    noise = 0 if "seed" in row else place
    if "sampling" in row:
        values = dict(row["sampling"]) if isinstance(row["sampling"], dict) else {}
        noise = values.pop("noise", None)
        if type(noise) is not int or set(values) != {"seed", *SAMPLING_VALUES}:
            raise DataError(f"{where} has sampling {quote(row['sampling'])}, which regenerate does not write.")
    checked = request_of({"id": where, **values}, 0)
    return Request(noise, checked.seed, None, checked.sampling or SamplingParams())


def seed_problem(seed: int) -> Problem | None:
    """A seed that is no int32 of 0 or more."""
    return None if 0 <= seed <= LARGEST else Problem("seed", seed, f"give a number from 0 to {LARGEST}")
