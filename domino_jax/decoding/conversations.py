"""Prompts that a target answers turn by turn in queues, and the training row each becomes."""

import dataclasses
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.generate import Generation, Generator, new_generator
from domino_jax.decoding.prompts import Prompt
from domino_jax.decoding.requests import ROW_VALUES, recorded, request_of, with_defaults
from domino_jax.decoding.settings import BASELINE, DRAFT, DecodeSettings
from domino_jax.method.pair import Pair
from domino_jax.runtime.errors import DataError

# Queues are made of neighbours by prompt length, so that little of a batch is padding; this many batches are sorted
# together. Sorting the whole file would put the longest last, and the time left could not be estimated.
SORTED_BATCHES = 32
# A queue has at most this many prompts for each row of a batch, because its rows are written when it ends. There are
# at least as many queues where the prompts suffice, for several processes to share.
LONGEST_QUEUE = LEAST_QUEUES = 8
# Tokens a template may put between a prompt and its answer once that is history (an empty think block less or more).
HISTORY_SLACK = 16
ROLES = ("system", "user", "assistant")


@dataclasses.dataclass
class AnsweredPrompt:
    """A prompt at the turn that it has reached, with the answer to it.

    earlier: the ids of the prompt, and the answer, of the turns before it.
    """

    prompt: Prompt
    answer: Generation | None = None
    earlier: list[tuple[Sequence[int], Generation]] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> int:
        """The number of tokens in all its answers."""
        return len(self.answer.token_ids) + sum(len(answer.token_ids) for _, answer in self.earlier)


def first_turn(row: Mapping[str, Any], place: int, codec: TextCodec) -> Prompt:
    """The row's first prompt, sampled as the row says; its `place` keys its noise. Answers in the row are left out."""
    later = []
    if "messages" in row:
        messages, *later = split_turns(row["messages"], f"prompt {row['id']}")
        row = {**row, "messages": messages}
    # An array has four bytes a token, a list nine times that, and a million first prompts are held at once.
    ids = array("i", codec.encode(row))
    task = row["task"] if isinstance(row.get("task"), str) else None
    return Prompt(row["id"], ids, request_of(row, place), task, row=row, later_turns=tuple(later))


def split_turns(messages: Sequence[Mapping[str, Any]], where: str) -> list[list[dict]]:
    """[system, user, assistant, user] → [[system, user], [user]]; the answers in the row are left out."""
    strange = [message["role"] for message in messages if message["role"] not in ROLES]
    if strange:
        raise DataError(
            f"{where}: a message has the role {strange[0]!r}, and only conversations of {', '.join(ROLES)} can be"
            " answered again; remove the row."
        )
    turns: list[list[dict]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            continue
        turns[-1].append(dict(message))
        if message["role"] == "user":
            turns.append([])
    turns.pop()  # what follows the last user's message
    if not turns:
        raise DataError(f"{where}: no message is a user's, so there is nothing to answer.")
    return turns


class Answerer:
    """Answers queues of conversations with a target; a drafter in `models` makes that faster and changes no answer.

    settings, stop_ids: of its generators, whose cache_length is all positions of the target and a block.
    """

    def __init__(self, models: Pair, settings: DecodeSettings, stop_ids: Sequence[int] = ()):
        self.models, self.settings, self.stop_ids = models, settings, stop_ids
        self.target = Pair(models.target, models.target_params)
        self.max_new_tokens = settings.max_new_tokens
        self.seconds = 0.0  # spent generating so far, compilation left out
        self.generators: dict[bool, Generator] = {}  # with and without the drafter

    def fits(self, prompt: Prompt) -> bool:
        """Whether there is room for an answer. A drafter makes no difference, because it must not change an answer."""
        length, most = len(prompt.token_ids), with_defaults(prompt.request, self.settings).max_new_tokens
        return length <= self.generator(length).limits.room(most)

    def generator(self, longest: int) -> Generator:
        """For prompts of this length; without the drafter past its own positions, where it is no help."""
        drafter = self.models.drafter and self.models.drafter.config
        drafts = bool(drafter) and longest + self.max_new_tokens <= drafter.max_position_embeddings
        if drafts not in self.generators:
            models = self.models if drafts else self.target
            block = self.settings.block_rows(drafter if drafts else None)
            slots = models.target.config.max_position_embeddings + block
            settings = dataclasses.replace(self.settings, cache_length=slots)
            self.generators[drafts] = new_generator(models, settings, self.stop_ids)
        return self.generators[drafts]

    def answer(self, prompts: Sequence[Prompt], between: Callable[[int], None] | None = None) -> list[Generation]:
        ids, requests = [prompt.token_ids for prompt in prompts], [prompt.request for prompt in prompts]
        generator = self.generator(max(map(len, ids)))
        models, mode = (self.models, DRAFT) if generator.drafter else (self.target, BASELINE)
        answers, clock = generator.generate(models, ids, mode, requests, between)
        self.seconds += clock.prefill_seconds + clock.decode_seconds
        return answers


def queues(prompts: Sequence[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    """Prompts that share the rows of a batch: a row that ends takes the next prompt of its queue.

    Neighbours by length, within windows of SORTED_BATCHES batches or a little less.
    """
    prompts_per_row = min(max(len(prompts) // batch_size // LEAST_QUEUES, 1), LONGEST_QUEUE)
    size = batch_size * prompts_per_row
    window = size * (SORTED_BATCHES // prompts_per_row)
    for start in range(0, len(prompts), window):
        near = sorted(prompts[start : start + window], key=lambda prompt: len(prompt.token_ids))
        for first in range(0, len(near), size):
            yield near[first : first + size]


def converse(
    prompts: Sequence[Prompt], answerer: Answerer, codec: TextCodec, between: Callable[[int], None] | None = None
) -> list[AnsweredPrompt]:
    """Takes the prompts of a queue through all their turns. One that no longer fits ends with the answers it has.

    between: called every few rounds with the number of answers of the turn that are finished.
    """
    conversations = [AnsweredPrompt(prompt) for prompt in prompts]
    active = conversations
    while active:
        answers = answerer.answer([turn.prompt for turn in active], between)
        for turn, answer in zip(active, answers, strict=True):
            turn.answer = answer
        active = [turn for turn in active if turn.prompt.later_turns and ask_next(turn, answerer, codec)]
    return conversations


def ask_next(turn: AnsweredPrompt, answerer: Answerer, codec: TextCodec) -> bool:
    """Goes on to the next turn; False, and nothing changed, when it does not fit."""
    prompt = turn.prompt.next_turn(codec.decode(turn.answer.token_ids), codec)
    if not answerer.fits(prompt):
        return False
    turn.earlier.append((turn.prompt.token_ids, turn.answer))
    turn.prompt = prompt
    return True


def output_row(turn: AnsweredPrompt, codec: TextCodec, settings: DecodeSettings) -> dict[str, Any]:
    """The training row: the last turn's ids, masked where they are the target's own, and how they were sampled.

    Answers that the template rewrote as history, without their thoughts for one, are in rows of their turns, under
    earlier_turns.
    """
    row, rows = turn.prompt.row, []
    turns = [*turn.earlier, (turn.prompt.token_ids, turn.answer)]
    while turns:
        learned, turns = learned_row(turns)
        rows.insert(0, learned)
    *earlier, last = rows
    request = with_defaults(turn.prompt.request, settings)
    asked = {name: row[name] for name in ROW_VALUES if name in row}
    output = {"id": turn.prompt.id, **last, **asked, "sampling": recorded(request)}
    if earlier:
        output["earlier_turns"] = earlier
    if turn.prompt.task:
        output["task"] = turn.prompt.task  # by which `evaluate` divides its table
    text = codec.decode(turn.answer.token_ids)
    if "messages" in row:
        output["messages"] = [*row["messages"], {"role": "assistant", "content": text}]
    elif text is not None:
        output["text"] = text
    return output


def learned_row(turns: Sequence[tuple[Sequence[int], Generation]]) -> tuple[dict[str, Any], list]:
    """(the row of the last turn with every answer that its text has token for token, the other turns)."""
    (prompt, answer), rewritten = turns[-1], []
    mask = [0] * len(prompt) + [1] * len(answer.token_ids)
    for before, earlier in turns[:-1]:
        start, size = find_answer(prompt, before, earlier.token_ids), len(earlier.token_ids)
        if start is None:
            rewritten.append((before, earlier))
        else:
            mask[start : start + size] = [1] * size
    ids = [*prompt, *answer.token_ids]
    return {"token_ids": ids, "loss_mask": mask, "finish_reason": answer.finish_reason}, rewritten


def find_answer(history: Sequence[int], prompt: Sequence[int], answer: Sequence[int]) -> int | None:
    """Where `history` holds the answer to `prompt`, token for token.

    None when the template or the tokenizer wrote it another way: then it is context, not an answer of the target.
    """
    same = next((i for i, (a, b) in enumerate(zip(history, prompt, strict=False)) if a != b), len(prompt))
    for start in range(same, same + HISTORY_SLACK):
        if list(history[start : start + len(answer)]) == list(answer):
            return start
    return None
