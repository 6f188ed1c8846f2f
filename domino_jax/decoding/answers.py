"""Answers of the target, and what a drafter would have had accepted of them, without decoding (method/exact.py).

    passes = AnswerPasses(read_answers("ANSWERS.jsonl", codec), DraftSettings(), rows=4)
    for accepted in passes(models):
        accept_lengths(accepted.drafts, width)    # the rounds of a decoding with `width` drafts (acceptance.py)

Answers are packed into rows of one length, so one program serves all of them and little of it is padding.
"""

import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.data.chat import TextCodec, TrainingRow, training_rows
from domino_jax.data.messages import present
from domino_jax.data.order import pack
from domino_jax.data.prompts import read_jsonl
from domino_jax.decoding.requests import Request, recorded_request
from domino_jax.method.exact import OF_ANCHORS, Accepted, TargetChoice, accepted_drafts, target_choice
from domino_jax.method.pair import Pair
from domino_jax.method.settings import DraftSettings, SamplingKind
from domino_jax.models import sharding
from domino_jax.models.slices import BLOCKS
from domino_jax.runtime.errors import DataError, DominoError

# How far log p + g of a token may be below that of the target's choice for it still to be the choice: a near tie
# (docs/method.md), in bfloat16 of logits between 16 and 32.
NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.25}
LENGTHS = 64  # a row has a multiple of this many tokens
LEAST_CHOSEN = 0.95  # share of the tokens of answers that are the target's choice, or they are another target's


@dataclasses.dataclass(frozen=True)
class TargetAnswer:
    """A prompt that the target read, and its answer, as token ids.

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


def read_answers(path: str | os.PathLike, codec: TextCodec, limit: int | None = None) -> list[TargetAnswer]:
    """The first `limit` answers of a file with rows of a training, as `regenerate` writes them.

    The last answer of a row counts, sampled as the row records it.

    Raises:
        DataError: no rows, or one without an answer.
    """
    answers: list[TargetAnswer] = []
    for number, columns in itertools.islice(read_jsonl(path), limit):
        row, where = present(columns), f"{path}:{number}"
        request = recorded_request(row, len(answers), where)
        prompt, ids = last_answer(training_rows(codec.tokenizer, row, codec.thinking, where)[-1]())
        task = row["task"] if isinstance(row.get("task"), str) else None
        if not ids:
            raise DataError(f"{where}: the row has no answer; correct or remove it.")
        answers.append(TargetAnswer(str(row.get("id", where)), prompt, ids, request, task))
    if not answers:
        raise DataError(f"{path}: the file holds no answers.")
    return answers


def last_answer(row: TrainingRow) -> tuple[list[int], list[int]]:
    """(the tokens before it, the last stretch of supervised tokens); a row's first token is always a prompt's."""
    edges = np.flatnonzero(np.diff(row.loss_mask[1:] > 0.5, prepend=False, append=False)) + 1
    start, end = edges[-2:] if len(edges) else (0, 0)
    return row.token_ids[:start].tolist(), row.token_ids[start:end].tolist()


def count_cut(answers: Iterable[Sequence[int]], stop_ids: Collection[int]) -> int:
    """How many answers, given by their token ids, end without a stop token: a limit of tokens cut them."""
    return sum(ids[-1] not in stop_ids for ids in answers if len(ids))


def check_answers(answers: Sequence[TargetAnswer], models: Pair, source: str) -> None:
    """DataError for tokens that the target does not know, for more of them than a model has positions, or for answers
    without a round. source: of the answers, in the message."""
    for problem in _answer_problems(answers, models):
        raise DataError(f"{source}: {problem}.")


def _answer_problems(answers: Sequence[TargetAnswer], models: Pair) -> Iterator[str]:
    vocab, modules = models.target.config.vocab_size, {"target": models.target, "drafter": models.drafter}
    most = {name: module.config.max_position_embeddings for name, module in modules.items() if module}
    for answer in answers:
        if (largest := max(*answer.prompt, *answer.token_ids)) >= vocab:
            yield (
                f"row {answer.id} holds token id {largest}, but the target has {vocab} embedding rows; name answers of"
                " this target"
            )
        for name in [name for name, positions in most.items() if answer.length > positions]:
            yield (
                f"row {answer.id} has {answer.length} tokens, but the {name}'s max_position_embeddings is {most[name]};"
                " remove the row, or let answers be shorter"
            )
    if all(len(answer.token_ids) < 2 for answer in answers):
        yield (
            "every answer has one token, which the prompt's pass emits, so no round can be judged; let the target give"
            " longer answers (max_new_tokens)"
        )


class AnswerPasses:
    """Judges the same answers with any number of drafters of one shape; compiles once.

    Args:
        settings: of a chain.
        rows: of a pass, at most; within jax.set_mesh rounded up to a multiple of data × fsdp. All processes of a mesh
            make the same calls.
    """

    def __init__(self, answers: Sequence[TargetAnswer], settings: DraftSettings, rows: int, slice_blocks: int = BLOCKS):
        self.answers, self.settings = answers, settings
        mesh = jax.sharding.get_mesh()
        self.mesh = None if mesh.empty else mesh
        self.kind = SamplingKind.of([answer.request.sampling for answer in answers])
        lengths = np.array([answer.length for answer in answers])
        self.length = -(-lengths.max() // LENGTHS) * LENGTHS
        order, ends = pack(lengths, self.length)
        packs = np.split(order, ends[:-1])
        places = [sum(len(answers[index].token_ids) for index in group) for group in packs]
        # Rows with similar numbers of places together: slices in which no row has one are not computed.
        self.packs = [packs[number] for number in np.argsort(places)[::-1]]
        self.places = -(-max(places) // slice_blocks) * slice_blocks
        parts, everywhere = (1, None) if mesh.empty else (sharding.row_shards(mesh), sharding.replicated(mesh))
        self.rows = -(-min(rows, len(packs)) // parts) * parts
        choices = {"kind": self.kind, "slice_blocks": slice_blocks}
        self.judge = jax.jit(functools.partial(accepted_drafts, settings=settings, **choices), out_shardings=everywhere)
        self.check = jax.jit(functools.partial(target_choice, **choices), out_shardings=everywhere)

    @property
    def digest(self) -> str:
        """Tells sets of answers apart."""
        texts = [(list(answer.prompt), list(answer.token_ids), str(answer.request)) for answer in self.answers]
        return hashlib.sha256(repr(texts).encode()).hexdigest()

    def __call__(self, models: Pair, between: Callable[[int], None] = lambda _: None) -> list[Accepted]:
        """For each answer of k tokens what rounds accept that start at all of them but the last, arrays [k-1, ...].

        between: called after each pass with the answers that it judged; an exception from it ends the call.
        """
        return [jax.tree.map(lambda x: x[:-1], arrays) for arrays in self._by_answer(self.judge, models, between)]

    def chosen(self, models: Pair) -> list[np.ndarray]:
        """For each answer of k tokens which of them are what the target would choose, bool [k]; near ties are."""
        limit = NEAR_TIE[np.dtype(models.target.dtype).name]
        return [choice.margin <= limit for choice in self.choices(models)]

    def choices(self, models: Pair) -> list[TargetChoice]:
        """For each answer of k tokens what the target would choose at each of them, arrays [k]."""
        return self._by_answer(self.check, Pair(models.target, models.target_params))

    def chosen_share(self, models: Pair, source: str, least: float = LEAST_CHOSEN) -> float:
        """The share of tokens that the target of `models` would choose; DataError where it is below `least`.

        source: of the answers, in the message.
        """
        chosen = self.chosen(models)
        share = float(np.concatenate(chosen).mean())
        if share < least:
            first = next(index for index, tokens in enumerate(chosen) if not tokens.all())
            raise DataError(
                f"{source}: {share:.1%} of the answers' tokens are what this target would choose; the first other one"
                f" is token {chosen[first].argmin()} of the answer in row {self.answers[first].id}.\n"
                "Name answers of this target and template, and sampled ones with the sampling and seed that made them."
            )
        return share

    def _by_answer(self, function: Callable, models: Pair, between: Callable[[int], None] = lambda _: None) -> list:
        # XLA:CPU has no products of bfloat16 with float32 sums.
        if jax.default_backend() == "cpu" and np.dtype(models.target.dtype) == jnp.bfloat16:
            raise DominoError(
                "answers cannot be judged in bfloat16 on a CPU, whose compiler lacks the products; set decode.dtype, in"
                " a training target.dtype, to float32."
            )
        results: list = [None] * len(self.answers)
        for start in range(0, len(self.packs), self.rows):
            packed, batch = self._batch(self.packs[start : start + self.rows])
            if self.mesh is not None:
                place = sharding.batch_sharding(self.mesh)
                batch = {name: jax.make_array_from_callback(x.shape, place, x.__getitem__) for name, x in batch.items()}
            out = jax.device_get(function(models, batch))
            for index, *where in packed:
                results[index] = jax.tree.map(lambda x, where=tuple(where): x[where], out)
            between(len(packed))
        return results

    def _batch(self, packs: Sequence[Sequence[int]]) -> tuple[list[tuple[int, int, slice]], dict[str, np.ndarray]]:
        """(answer, row and places of each answer in the batch, the batch)."""
        text, places = (self.rows, self.length), (self.rows, self.places)
        batch = {name: np.zeros(text, np.int32) for name in ("tokens", "positions", "documents")}
        floats = ("temperature", "top_p", "min_p")
        batch |= {name: np.zeros(places, np.float32 if name in floats else np.int32) for name in OF_ANCHORS}
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
                request = (answer.request.seed, answer.request.noise, *dataclasses.astuple(answer.request.sampling))
                for name, value in zip(OF_ANCHORS, (np.arange(anchor, end), end, *request), strict=True):
                    batch[name][row, here] = value
                packed.append((index, row, here))
                start, first = end, here.stop
        return packed, batch
