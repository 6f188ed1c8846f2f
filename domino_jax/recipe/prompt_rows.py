"""The prompts of a run: which ones a recipe and its flags name, their rows, and checks before anything runs."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from domino_jax.data.bad_rows import BadRows
from domino_jax.data.chat import TextCodec
from domino_jax.data.prompts import check_text, digest_rows, lines_of, read_prompts
from domino_jax.data.tasks import read_tasks
from domino_jax.decoding.api import prompt_row
from domino_jax.decoding.generate import Generator
from domino_jax.decoding.prompts import Prompt
from domino_jax.decoding.requests import request_of
from domino_jax.evals.run_info import PromptSource
from domino_jax.recipe import cli
from domino_jax.runtime.distributed import say
from domino_jax.runtime.errors import DataError, DominoError, quote


def prompt_source(flags: cli.Flags) -> PromptSource:
    """Where the prompts come from: --prompt, --prompts, or the recipe's tasks or prompts."""
    decode = flags.config.decode
    tasks = tuple(decode.tasks)
    source = "tasks" if tasks else "--prompt" if flags.prompt else flags.prompts or flags.config.eval.prompts
    if not source:
        raise DominoError(
            "there are no prompts: give --prompts=FILE.jsonl or --prompt=TEXT, or set config.eval.prompts or"
            " config.decode.tasks."
        )
    return PromptSource(source, flags.prompt, None if tasks else decode.num_prompts, tasks)


def read_rows(source: PromptSource, config, tokenizer: Any) -> tuple[list[dict[str, Any]], PromptSource]:
    """The prompt rows of a source, and the source with their digest; tokenizer: the target's."""
    if source.tasks:
        rows = read_tasks(source.tasks)
    elif source.text:
        rows = [{"id": "prompt", **prompt_row(source.text, tokenizer)}]
    else:
        check = functools.partial(check_row, TextCodec(tokenizer, config.decode.thinking))
        rows = read_file_rows(source.source, source.limit, config.data.skip_bad_rows, check)
    return rows, dataclasses.replace(source, sha256=digest_rows(rows))


def report_limit(source: PromptSource, rows: int) -> None:
    """Prints how many prompts of a file are decoded where decode.num_prompts leaves some out."""
    if source.limit == rows and source.source != "--prompt":
        total = sum(1 for _ in lines_of(source.source))
        if total > rows:
            say(f"{source.source}: {rows} of {total} prompts (config.decode.num_prompts; 0 decodes all)")


def check_row(codec: TextCodec, row: dict[str, Any]) -> None:
    """Refuses a prompt row that cannot be encoded or whose sampling values are out of range."""
    codec.encode(row)
    request_of(row, 0)


def read_file_rows(
    path: str, limit: int, skip_bad: bool = False, check: Callable[[dict], Any] | None = None
) -> list[dict[str, Any]]:
    """Rows of a prompts file, the rows of one task together, in the order in which tasks appear; limit 0: all.

    A "task" that is a text names the row's task, by which the report is divided. "next_turns" is dropped.

    skip_bad, check: of `read_prompts`.
    """
    rows = []
    for row in read_prompts(path, limit or None, skip_bad, check):
        dropped = ("next_turns",) if isinstance(row.get("task"), str) else ("next_turns", "task")
        rows.append({key: value for key, value in row.items() if key not in dropped})
    order = {task: place for place, task in enumerate(dict.fromkeys(row.get("task") for row in rows))}
    return sorted(rows, key=lambda row: order[row.get("task")])


def prepare_prompts(rows: Sequence[Mapping[str, Any]], codec: TextCodec) -> list[Prompt]:
    """The prompts of rows. Their noise id is the place in the task, which gives the same texts alone and among others.

    Raises DataError for a row that cannot be encoded or written, or has a sampling value out of range.
    """
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
    where, last = f"prompt {prompt.id}", prompt
    generator.check_prompt(prompt.token_ids, where, prompt.request)
    while last.later_turns:
        last = last.next_turn("", codec)
    if last is not prompt:
        turns, most = prompt.turns_left, generator.limits.settings.max_new_tokens
        generator.limits.check_room(len(last.token_ids), turns * most, f"{where}, of {turns} turns,")
