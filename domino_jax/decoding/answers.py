"""Answers of the target, and what a drafter would have had accepted of them, without decoding (method/exact.py).

    passes = AnswerPasses(answers, DraftSettings(), rows=4, length=512)
    for judged in passes(models):
        accept_lengths(judged.drafts, width)      # the rounds of a decoding with `width` drafts (acceptance.py)

Answers are packed into rows of one length, so one program serves all of them and little of it is padding.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from domino_jax.data.order import pack
from domino_jax.decoding.requests import Request
from domino_jax.method.exact import SAMPLING, accepted_drafts, behind_choice
from domino_jax.method.pair import Models
from domino_jax.method.settings import DraftSettings, SamplingKind
from domino_jax.models import sharding
from domino_jax.models.slices import BLOCKS
from domino_jax.runtime.errors import DataError

# How far log p + g of a token may be below that of the target's choice for it still to be the choice: a near tie
# (docs/method.md), in bfloat16 of logits between 16 and 32.
NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.25}
LEAST_CHOSEN = 0.95  # share of the tokens of answers that are the target's choice, or they are another target's


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the target read and what it answered, as token ids.

    request: with seed and sampling, of the answer's noise.  task: of its prompt, None without one.
    """

    id: str
    prompt: Sequence[int]
    token_ids: Sequence[int]
    request: Request
    task: str | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.token_ids)


class Judged(NamedTuple):
    """What rounds accept that start at the tokens of an answer of k tokens, all but the last.

    drafts: int32 [k-1].  backbone: the same with the head left out; None for drafters without a backbone.
    log_q: float32 [k-1, M], how likely the drafter finds each of its drafts (exact.Accepted).
    """

    drafts: np.ndarray
    backbone: np.ndarray | None
    log_q: np.ndarray


class AnswerPasses:
    """Judges the same answers with any number of drafters of one shape; compiles once.

    Args:
        settings: of a chain.
        rows: of a pass; on a mesh a multiple of its data × fsdp.  length: tokens of a row, at least the longest answer
            with its prompt.
        mesh: on which the models are, None for one device; all processes then make the same calls.
    """

    def __init__(
        self,
        answers: Sequence[Answer],
        settings: DraftSettings,
        rows: int,
        length: int,
        mesh: jax.sharding.Mesh | None = None,
        slice_blocks: int = BLOCKS,
    ):
        self.answers = answers
        self.kind = SamplingKind.of([answer.request.sampling for answer in answers])
        self.mesh, self.rows, self.length = mesh, rows, length
        lengths = np.array([answer.length for answer in answers])
        order, ends = pack(lengths, length)
        packs = np.split(order, ends[:-1])
        # Rows with about as many places together: slices in which no row has one are not computed.
        self.packs = sorted(packs, key=lambda one: -sum(len(answers[index].token_ids) for index in one))
        self.places = max(sum(len(answers[index].token_ids) for index in one) for one in packs)
        everywhere = None if mesh is None else sharding.replicated(mesh)
        choices = {"kind": self.kind, "slice_blocks": slice_blocks}
        self.judge = jax.jit(functools.partial(accepted_drafts, settings=settings, **choices), out_shardings=everywhere)
        self.check = jax.jit(functools.partial(behind_choice, **choices), out_shardings=everywhere)

    def __call__(self, models: Models, between: Callable[[int], None] = lambda finished: None) -> list[Judged]:
        """One Judged for each answer.

        between: called after each pass with the answers that it judged; an exception from it ends the call.
        """
        judged: list = [None] * len(self.answers)
        for packed, batch in self.batches():
            drafts, backbone, log_q = jax.device_get(self.judge(models, batch))
            for index, row, places in packed:
                alone = None if backbone is None else backbone[row, places][:-1]
                judged[index] = Judged(drafts[row, places][:-1], alone, log_q[row, places][:-1])
            between(len(packed))
        return judged

    def refuse_strange(self, models: Models, source: str) -> None:
        """DataError where many tokens are not what the target of `models` would choose.

        source: of the answers, in the message.
        """
        limit = NEAR_TIE[np.dtype(models.target.dtype).name]
        chosen: list = [None] * len(self.answers)
        for packed, batch in self.batches():
            behind = jax.device_get(self.check(models.replace(drafter=None, drafter_params=None), batch))
            for index, row, places in packed:
                chosen[index] = behind[row, places] <= limit
        share = np.concatenate(chosen).mean()
        if share < LEAST_CHOSEN:
            first = next(index for index, one in enumerate(chosen) if not one.all())
            raise DataError(
                f"{source}: {share:.1%} of the answers' tokens are what this target would choose; the first other one"
                f" is token {chosen[first].argmin()} of the answer in row {self.answers[first].id}.\n"
                "Name answers of this target and template, and of sampled ones a file whose .meta.json states the seed."
            )

    def batches(self) -> Iterator[tuple[list[tuple[int, int, slice]], dict[str, Any]]]:
        """(answer, row and places of each answer in it, the batch), on a mesh as arrays over it."""
        for start in range(0, len(self.packs), self.rows):
            packed, batch = self._batch(self.packs[start : start + self.rows])
            if self.mesh is not None:
                here = sharding.process_rows(self.mesh, self.rows)
                batch = sharding.global_batch(self.mesh, {name: array[here] for name, array in batch.items()})
            yield packed, batch

    def _batch(self, packs: Sequence[Sequence[int]]) -> tuple[list, dict[str, np.ndarray]]:
        text, places = (self.rows, self.length), (self.rows, self.places)
        batch = {name: np.zeros(text, np.int32) for name in ("tokens", "positions", "documents")}
        batch |= {name: np.zeros(places, np.int32) for name in ("anchors", "ends")}
        if not self.kind.greedy:
            batch |= {name: np.zeros(places, np.int32) for name in ("seeds", "noises", "top_k")}
            batch |= {name: np.zeros(places, np.float32) for name in SAMPLING if name != "top_k"}
        packed = []
        for row, indices in enumerate(packs):
            start = first = 0
            for number, index in enumerate(indices, start=1):
                answer = self.answers[index]
                end, anchor = start + answer.length, start + len(answer.prompt)
                batch["tokens"][row, start:end] = [*answer.prompt, *answer.token_ids]
                batch["positions"][row, start:end] = np.arange(answer.length)
                batch["documents"][row, start:end] = number
                here = slice(first, first + end - anchor)
                batch["anchors"][row, here], batch["ends"][row, here] = np.arange(anchor, end), end
                if not self.kind.greedy:
                    values = (answer.request.seed, answer.request.noise, *dataclasses.astuple(answer.request.sampling))
                    for name, value in zip(("seeds", "noises", *SAMPLING), values, strict=True):
                        batch[name][row, here] = value
                packed.append((index, row, here))
                start, first = end, here.stop
        return packed, batch
