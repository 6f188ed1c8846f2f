"""Conversations that a target answers turn by turn in queues, and the training row each becomes."""

import dataclasses
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.generate import Generation, Generator, new_generator
from domino_jax.decoding.settings import BASELINE, DRAFT, DecodeSettings
from domino_jax.method.pair import Models
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
class Conversation:
    """One prompt on its way through its turns.

    turns: the messages before each answer, or one empty turn when the prompt is raw.
    prompt, answer: ids of the last turn.  earlier: (prompt, answer) ids of the turns before it.
    """

    row: Mapping[str, Any]
    request: int
    turns: list[list[dict]]
    messages: list[dict]
    prompt: Sequence[int]
    answer: Generation | None = None
    earlier: list[tuple[Sequence[int], list[int]]] = dataclasses.field(default_factory=list)


def start_conversation(row: Mapping[str, Any], place: int, codec: TextCodec) -> Conversation:
    """The row with its first prompt encoded; `place` among the rows keys its noise."""
    if "messages" not in row:
        return Conversation(row, place, [[]], [], _packed(codec.encode(row)))
    turns = split_turns(row["messages"], f"prompt {row['id']}")
    messages = list(turns[0])
    return Conversation(row, place, turns, messages, _packed(codec.encode({**row, "messages": messages})))


def _packed(ids: Sequence[int]) -> array:
    """The ids, four bytes each: a million rows' first prompts are held at once, and a list takes nine times that."""
    return array("i", ids)


def split_turns(messages: Sequence[Mapping[str, Any]], where: str) -> list[list[dict]]:
    """[system, user, assistant, user] → [[system, user], [user]]: the history before each; given answers go."""
    strange = [message["role"] for message in messages if message["role"] not in ROLES]
    if strange:
        raise DataError(
            f"{where}: a message has the role {strange[0]!r}, and only {', '.join(ROLES)} can be regenerated:"
            " nobody is there to run tools."
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

    def __init__(self, models: Models, settings: DecodeSettings, stop_ids: Sequence[int] = ()):
        self.models = models
        self.settings = settings
        self.stop_ids = stop_ids
        self.max_new_tokens = settings.max_new_tokens
        self.seconds = 0.0  # spent generating so far, compilation left out
        self.generators: dict[bool, Generator] = {}  # with and without the drafter

    def fits(self, prompt: Sequence[int]) -> bool:
        """Whether there is room for an answer. A drafter makes no difference, because it must not change an answer."""
        return len(prompt) <= self.generator(len(prompt)).limits.room(self.max_new_tokens)

    def drafts(self, longest: int) -> bool:
        """Whether prompts of this length are drafted for: past its own positions a drafter is no help."""
        drafter = self.models.drafter
        return drafter is not None and longest + self.max_new_tokens <= drafter.config.max_position_embeddings

    def models_for(self, longest: int) -> Models:
        """The models that answer prompts of this length."""
        return self.models if self.drafts(longest) else Models(self.models.target, self.models.target_params)

    def generator(self, longest: int) -> Generator:
        """The generator that answers prompts of this length."""
        drafts = self.drafts(longest)
        if drafts not in self.generators:
            models = self.models_for(longest)
            block = self.settings.block_rows(models.drafter and models.drafter.config)
            slots = models.target.config.max_position_embeddings + block
            settings = dataclasses.replace(self.settings, cache_length=slots)
            self.generators[drafts] = new_generator(models, settings, self.stop_ids)
        return self.generators[drafts]

    def answer(
        self, conversations: Sequence[Conversation], between: Callable[[int], None] | None = None
    ) -> list[Generation]:
        prompts = [one.prompt for one in conversations]
        longest = max(map(len, prompts))
        mode = DRAFT if self.drafts(longest) else BASELINE
        requests = [one.request for one in conversations]
        answers, clock = self.generator(longest).generate(self.models_for(longest), prompts, mode, requests, between)
        self.seconds += clock.prefill_seconds + clock.decode_seconds
        return answers


def queues(conversations: Sequence[Conversation], batch_size: int) -> Iterator[list[Conversation]]:
    """Conversations that share the rows of a batch: a row that ends takes the next prompt of its queue.

    Neighbours by length, within windows of SORTED_BATCHES batches or a little less.
    """
    prompts_per_row = min(max(len(conversations) // batch_size // LEAST_QUEUES, 1), LONGEST_QUEUE)
    size = batch_size * prompts_per_row
    window = size * (SORTED_BATCHES // prompts_per_row)
    for start in range(0, len(conversations), window):
        near = sorted(conversations[start : start + window], key=lambda one: len(one.prompt))
        for first in range(0, len(near), size):
            yield near[first : first + size]


def converse(
    queue: Sequence[Conversation],
    answerer: Answerer,
    codec: TextCodec,
    between: Callable[[int], None] | None = None,
) -> int:
    """Takes a queue through all its turns; returns how many tokens were generated.

    A conversation that no longer fits ends with the answers it has.

    between: called every few rounds with the number of answers of the turn that are finished.
    """
    tokens, active, turn = 0, list(queue), 0
    while active:
        for one, answer in zip(active, answerer.answer(active, between), strict=True):
            one.answer = answer
            tokens += len(answer.token_ids)
            if one.messages:
                one.messages.append({"role": "assistant", "content": codec.decode(answer.token_ids)})
        turn += 1
        active = [one for one in active if len(one.turns) > turn and ask_next(one, turn, answerer, codec)]
    return tokens


def ask_next(one: Conversation, turn: int, answerer: Answerer, codec: TextCodec) -> bool:
    """Puts the next turn's messages in; False, and nothing changed, when they do not fit."""
    messages = [*one.messages, *one.turns[turn]]
    prompt = codec.encode({**one.row, "messages": messages})
    if not answerer.fits(prompt):
        return False
    one.earlier.append((one.prompt, one.answer.token_ids))
    one.messages, one.prompt = messages, prompt
    return True


def output_row(one: Conversation, codec: TextCodec) -> dict[str, Any]:
    """The training row: the last turn's ids, masked where they are the target's own."""
    token_ids = [*one.prompt, *one.answer.token_ids]
    mask = [0] * len(one.prompt) + [1] * len(one.answer.token_ids)
    for prompt, answer in one.earlier:
        start = find_answer(one.prompt, prompt, answer)
        if start is not None:
            mask[start : start + len(answer)] = [1] * len(answer)
    row = {
        "id": one.row["id"],
        "token_ids": token_ids,
        "loss_mask": mask,
        "finish_reason": one.answer.finish_reason,
    }
    if isinstance(one.row.get("task"), str):
        row["task"] = one.row["task"]  # by which `evaluate` divides its table
    if one.messages:
        row["messages"] = one.messages
    elif codec.tokenizer is not None:
        row["text"] = codec.decode(one.answer.token_ids)
    return row


def find_answer(history: Sequence[int], prompt: Sequence[int], answer: Sequence[int]) -> int | None:
    """Where `history` holds the answer to `prompt`, token for token.

    None when the template or the tokenizer wrote it another way: then it is context, not an answer of the target.
    """
    same = next((i for i, (a, b) in enumerate(zip(history, prompt, strict=False)) if a != b), len(prompt))
    for start in range(same, same + HISTORY_SLACK):
        if list(history[start : start + len(answer)]) == list(answer):
            return start
    return None
