"""Prompts of a measured run: prepared once from their rows, and checked before anything runs.

The noise id of a prompt is the row's place in its task, so that a task gives the same text alone and among others.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from domino_jax.data.bad_rows import BadRows
from domino_jax.data.chat import TextCodec
from domino_jax.data.prompts import check_text
from domino_jax.decoding.generate import Generator
from domino_jax.decoding.prompts import Prompt
from domino_jax.decoding.requests import request_of
from domino_jax.runtime.errors import DataError, quote


def prepare_prompts(rows: Sequence[Mapping[str, Any]], codec: TextCodec) -> list[Prompt]:
    """Raises DataError for a row that cannot be encoded or written, or has a sampling value out of range."""
    prompts, places = [], Counter()
    for row in rows:
        where = f"prompt {quote(row['id'])[1:-1]}"
        check_text(row, where)
        task = row["task"] if "task" in row else None
        later = tuple([{"role": "user", "content": text}] for text in row.get("next_turns", ()))
        prompt = Prompt(
            id=row["id"],
            token_ids=tuple(codec.encode(row, where)),
            request=request_of(row, places[task]),
            task=task,
            row=row if later else {},
            later_turns=later,
        )
        places[task] += 1
        prompts.append(prompt)
    return prompts


def prompts_with_room(
    generator: Generator, prompts: Sequence[Prompt], codec: TextCodec, skip_bad: bool
) -> list[Prompt]:
    """The prompts that the generator has room for; others are refused together, or with skip_bad left out.

    The longest possible conversation has to fit: every answer has max_new_tokens.
    """
    fitting, bad = [], BadRows()
    for prompt in prompts:
        try:
            _check_prompt(generator, prompt, codec)
            fitting.append(prompt)
        except DataError as error:
            bad.add(error)
    bad.settle("the prompts", len(prompts), skip_bad)
    return fitting


def _check_prompt(generator: Generator, prompt: Prompt, codec: TextCodec) -> None:
    where = f"prompt {prompt.id}"
    generator.check_prompt(prompt.token_ids, where, prompt.request)
    if not prompt.later_turns:
        return
    turns, last, limits = prompt.turns_left, prompt, generator.limits
    while last.later_turns:
        last = last.next_turn("", codec)
    tokens, most, slots = len(last.token_ids), limits.settings.max_new_tokens, limits.settings.cache_length
    limits.check_positions(tokens, turns * most, f"{where}, of {turns} turns,")
    longest = tokens + turns * most + limits.block_rows
    if longest > slots:
        raise DataError(
            f"{where} has {turns} turns, which may need {longest} cache rows with {most} new tokens each, but"
            f" decode.cache_length is {slots}; raise it, or lower max_new_tokens."
        )
