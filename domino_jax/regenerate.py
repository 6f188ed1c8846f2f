"""Let the target answer prompts: the training rows of the paper's recipe, which trains on what the target itself says.

    python -m domino_jax.regenerate --config=configs/tiny.py --prompts=PROMPTS.jsonl --output=ROWS.jsonl

One row a prompt: {"id", "token_ids", "loss_mask", "finish_reason", "messages"}. token_ids are the very tokens the
target saw and said, and loss_mask is 1 on those it said, so that training never meets a text tokenised another way.
Every user's message is answered in turn, with the answers so far as history; answers in the prompts are replaced.

Kill it at any moment and start it again: rows are appended whole, batch by batch, a torn last line is cut off, and what
is there is not asked again. ROWS.jsonl.meta.json says what the file was made with; other settings are refused.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from domino_jax import cli
from domino_jax import config as recipes
from domino_jax.checkpoint import config_diff
from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import read_jsonl, read_prompts
from domino_jax.decoding.generate import Generation, Generator
from domino_jax.decoding.models import Models
from domino_jax.decoding.sampling import SamplingParams
from domino_jax.errors import DataError, DominoError
from domino_jax.loading import LoadedTarget, load_target
from domino_jax.progress import Progress
from domino_jax.report import write_text

# Batches are made of neighbours by prompt length, so that little of a batch is padding; this many batches are sorted
# together. Not the whole file: then the longest would come last, and the time left could not be told.
SORTED_BATCHES = 32
# Tokens a template may put between a prompt and its answer once that is history (an empty think block less or more).
HISTORY_SLACK = 16
SMALLEST_CACHE = 128
ROLES = ("system", "user", "assistant")


def main(flags: cli.Flags) -> None:
    config = flags.config
    recipes.check(config, "regenerate")
    rows = read_prompts(flags.prompts, config.regenerate.num_prompts or None)
    loaded = load_target(config.target.path, config.target.dtype)
    regenerate_rows(loaded, rows, Path(flags.output).expanduser(), **settings(config))


def settings(config) -> dict[str, Any]:
    """The recipe's values as arguments of regenerate_rows."""
    section = config.regenerate
    return {
        "batch_size": section.batch_size,
        "max_new_tokens": section.max_new_tokens,
        "sampling": SamplingParams(section.temperature, section.top_k, section.top_p),
        "seed": section.seed,
        "thinking": config.data.thinking,
    }


@dataclasses.dataclass
class Conversation:
    """One prompt on its way through its turns.

    turns: what stands before each answer (messages), or one empty turn when the prompt is raw.
    prompt, answer: ids of the last turn.  earlier: (prompt, answer) ids of the turns before it.
    """

    row: Mapping[str, Any]
    request: int
    turns: list[list[dict]]
    messages: list[dict]
    prompt: list[int]
    answer: Generation | None = None
    earlier: list[tuple[list[int], list[int]]] = dataclasses.field(default_factory=list)


def regenerate_rows(
    loaded: LoadedTarget,
    rows: Sequence[Mapping[str, Any]],
    output: Path,
    *,
    batch_size: int,
    max_new_tokens: int,
    sampling: SamplingParams,
    seed: int,
    thinking: bool,
) -> None:
    """Answers every prompt row into the JSONL file `output`; rows that are there already stay as they are."""
    output = Path(output)
    made_with = {
        "prompts_sha256": hashlib.sha256(json.dumps([dict(row) for row in rows], sort_keys=True).encode()).hexdigest(),
        "target": fingerprint(loaded),
        "max_new_tokens": max_new_tokens,
        **dataclasses.asdict(sampling),
        "seed": seed,
        "thinking": thinking,
    }
    done = resume(output, made_with)
    missing = len(rows) - len(done)
    if not missing:
        print(f"{output} holds all {len(rows)} answers already.", flush=True)
        return
    started = [start_conversation(row, place, loaded.tokenizer, thinking) for place, row in enumerate(rows)]
    answerer = Answerer(loaded, batch_size, max_new_tokens, sampling, seed)
    for conversation in started:
        answerer.check(conversation)
    print(f"the target answers {missing} of {len(rows)} prompts into {output}", flush=True)
    tokens = 0
    with output.open("a", encoding="utf-8") as file, Progress("regenerate", len(rows), len(done)) as progress:
        # Batches are the same whatever is done already, so a continued file is the file of an uninterrupted run.
        for batch in batches(started, batch_size):
            batch = [conversation for conversation in batch if conversation.row["id"] not in done]
            if not batch:
                continue
            tokens += converse(batch, answerer, loaded.tokenizer, thinking)
            lines = [json.dumps(output_row(one, loaded.tokenizer), ensure_ascii=False) + "\n" for one in batch]
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())
            progress.advance(len(batch), f"{tokens / answerer.seconds():,.0f} tokens/s")


# ------------------------------------------------------------------------------------------------------ resuming


def fingerprint(loaded: LoadedTarget) -> str:
    """Tells targets apart without reading all of them: the last norm's weights differ between any two trained ones."""
    scale = np.asarray(loaded.params["norm"]["scale"])
    return hashlib.sha256(str(loaded.model.config).encode() + str(scale.dtype).encode() + scale.tobytes()).hexdigest()


def resume(output: Path, made_with: Mapping[str, Any]) -> set[str]:
    """Ids of the whole rows in `output`, after cutting off a torn last line; writes or checks the meta file."""
    meta = output.with_name(output.name + ".meta.json")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if not output.exists() or not output.stat().st_size:
            write_text(meta, json.dumps(made_with, indent=2) + "\n")
            output.touch()
            return set()
    except OSError as error:
        raise DominoError(f"--output={output} cannot be written: {error.strerror}.") from error
    if not meta.is_file():
        raise DominoError(
            f"{output} exists, but {meta.name} beside it does not: it is not known what the rows were made with.\n"
            "Choose another output, or remove the file to answer all prompts anew."
        )
    differing = config_diff(read_meta(meta), made_with)
    if differing:
        lines = [f"  {key}: {str(was)[:40]} there, {str(now)[:40]} now" for key, (was, now) in differing.items()][:3]
        raise DominoError(
            "\n".join([f"{output} was made with something else:", *lines, "Set it back or choose another output."])
        )
    cut_torn_line(output)
    seen: set[str] = set()
    for number, row in read_jsonl(output):
        if row.get("id") in seen or not isinstance(row.get("id"), str):
            raise DataError(f"{output}:{number}: the id {row.get('id')!r} is missing or there twice; remove the line.")
        seen.add(row["id"])
    return seen


def read_meta(meta: Path) -> dict[str, Any]:
    try:
        return json.loads(meta.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{meta} is no JSON ({error}); remove it and the rows beside it to start anew.") from error


def cut_torn_line(path: Path) -> None:
    """Ends the file behind its last line end: what follows was being written when the process died."""
    with path.open("rb+") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65_536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


# ------------------------------------------------------------------------------------------------------ conversations


def start_conversation(row: Mapping[str, Any], place: int, tokenizer: Any, thinking: bool) -> Conversation:
    """The row with its first prompt encoded; `place` among the rows keys its noise."""
    where = f"prompt {row['id']}"
    if "messages" not in row:
        return Conversation(row, place, [[]], [], encode_prompt(tokenizer, row, thinking, where))
    turns = split_turns(row["messages"], where)
    messages = list(turns[0])
    prompt = encode_prompt(tokenizer, {"messages": messages}, thinking, where)
    return Conversation(row, place, turns, messages, prompt)


def split_turns(messages: Sequence[Mapping[str, Any]], where: str) -> list[list[dict]]:
    """[system, user, assistant, user] → [[system, user], [user]]: what is said before each answer; given answers go."""
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
    turns.pop()  # what stands behind the last user's message
    if not turns:
        raise DataError(f"{where}: no message is a user's, so there is nothing to answer.")
    return turns


class Answerer:
    """Generators by cache size, so that short prompts do not pay for the attention over a long cache."""

    def __init__(self, loaded: LoadedTarget, batch_size: int, max_new_tokens: int, sampling: SamplingParams, seed: int):
        self.make: Callable[[int], Generator] = lambda slots: Generator(
            Models(loaded.model, loaded.params),
            stop_ids=loaded.stop_ids,
            cache_slots=slots,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            sampling=sampling,
            seed=seed,
        )
        self.limit = loaded.model.config.max_position_embeddings
        self.max_new_tokens = max_new_tokens
        self.generators: dict[int, Generator] = {}

    def fits(self, prompt: Sequence[int]) -> bool:
        return len(prompt) + self.max_new_tokens + 1 <= self.limit

    def check(self, conversation: Conversation) -> None:
        """Refuses a first prompt that can never be answered, before the first answer is made."""
        where, length = f"prompt {conversation.row['id']}", len(conversation.prompt)
        if not self.fits(conversation.prompt):
            raise DataError(
                f"{where} has {length} tokens; with regenerate.max_new_tokens {self.max_new_tokens} that is beyond the"
                f" target's {self.limit} positions. Shorten the prompt or generate fewer tokens."
            )
        self.generator(length).check_prompt(conversation.prompt, where)

    def generator(self, longest: int) -> Generator:
        """The one whose cache, a power of two, holds prompts of this length and their answers."""
        slots = max(SMALLEST_CACHE, 1 << (longest + self.max_new_tokens).bit_length())
        if slots not in self.generators:
            self.generators[slots] = self.make(slots)
        return self.generators[slots]

    def seconds(self) -> float:
        """Time spent generating so far, compilation left out."""
        clocks = [generator.clock for generator in self.generators.values()]
        return sum(clock.prefill_seconds + clock.decode_seconds for clock in clocks)

    def answer(self, conversations: Sequence[Conversation]) -> list[Generation]:
        prompts = [one.prompt for one in conversations]
        generator = self.generator(max(map(len, prompts)))
        return generator.generate(prompts, "autoregressive", [one.request for one in conversations])


def batches(conversations: Sequence[Conversation], batch_size: int) -> Iterator[list[Conversation]]:
    """Batches of neighbours by length, within windows of SORTED_BATCHES batches."""
    window = batch_size * SORTED_BATCHES
    for start in range(0, len(conversations), window):
        near = sorted(conversations[start : start + window], key=lambda one: len(one.prompt))
        for first in range(0, len(near), batch_size):
            yield near[first : first + batch_size]


def converse(batch: Sequence[Conversation], answerer: Answerer, tokenizer: Any, thinking: bool) -> int:
    """Takes a batch through all its turns; returns how many tokens were generated.

    A conversation that no longer fits ends with the answers it has.
    """
    tokens, active, turn = 0, list(batch), 0
    while active:
        for one, answer in zip(active, answerer.answer(active), strict=True):
            one.answer = answer
            tokens += len(answer.token_ids)
            if one.messages:
                text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
                one.messages.append({"role": "assistant", "content": text})
        turn += 1
        active = [one for one in active if len(one.turns) > turn and ask_next(one, turn, answerer, tokenizer, thinking)]
    return tokens


def ask_next(one: Conversation, turn: int, answerer: Answerer, tokenizer: Any, thinking: bool) -> bool:
    """Puts the next turn's messages in; False, and nothing changed, when they do not fit."""
    messages = [*one.messages, *one.turns[turn]]
    prompt = encode_prompt(tokenizer, {"messages": messages}, thinking, f"prompt {one.row['id']}")
    if not answerer.fits(prompt):
        return False
    one.earlier.append((one.prompt, one.answer.token_ids))
    one.messages, one.prompt = messages, prompt
    return True


def output_row(one: Conversation, tokenizer: Any) -> dict[str, Any]:
    """The training row: the last turn's ids, masked where they are the target's own."""
    said = [*one.prompt, *one.answer.token_ids]
    mask = [0] * len(one.prompt) + [1] * len(one.answer.token_ids)
    for prompt, answer in one.earlier:
        start = find_answer(one.prompt, prompt, answer)
        if start is not None:
            mask[start : start + len(answer)] = [1] * len(answer)
    row = {
        "id": one.row["id"],
        "token_ids": said,
        "loss_mask": mask,
        "finish_reason": one.answer.finish_reason,
    }
    if one.messages:
        row["messages"] = one.messages
    elif tokenizer is not None:
        row["text"] = tokenizer.decode(one.answer.token_ids, skip_special_tokens=True)
    return row


def find_answer(history: Sequence[int], prompt: Sequence[int], answer: Sequence[int]) -> int | None:
    """Where in `history` the answer to `prompt` stands token for token.

    None when the template or the tokenizer wrote it another way: then it is context, not something the target said.
    """
    same = next((i for i, (a, b) in enumerate(zip(history, prompt, strict=False)) if a != b), len(prompt))
    for start in range(same, same + HISTORY_SLACK):
        if list(history[start : start + len(answer)]) == list(answer):
            return start
    return None


if __name__ == "__main__":
    cli.run(main, required=("config", "prompts", "output"))
