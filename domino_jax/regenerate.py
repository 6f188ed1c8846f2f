"""Let the target answer prompts: the paper's recipe trains on the target's own answers.

    python -m domino_jax.regenerate --config=configs/tiny.py --prompts=PROMPTS.jsonl --output=ROWS.jsonl

One row a prompt, in the prompts' order: {"id", "token_ids", "loss_mask", "finish_reason", "sampling", "messages"}.
token_ids are exactly the tokens that the target read and generated, and loss_mask is 1 on those it generated, so that
training never meets a text tokenised another way. Every user message is answered in turn, with the answers so far as
history; answers in the prompts are replaced. Answers that the template rewrites as history are also in earlier_turns,
as they were generated. With regenerate.use_drafter the drafter of drafter.path speeds this up.

It can be killed at any moment and started again with any number of processes: rows are appended whole, queue by queue,
and a prompt with an answer is not answered again (answer_files.py). Every process answers its share on all its
devices, which split the target's weights.
"""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from domino_jax.data.answer_files import AnswerFiles, ProcessGroup, local_output
from domino_jax.data.bad_rows import BadRows
from domino_jax.data.chat import TextCodec
from domino_jax.data.prompts import digest_rows, read_jsonl, read_prompts
from domino_jax.decoding.conversations import Answerer, converse, first_turn, output_row, queues, split_turns
from domino_jax.decoding.prompts import Prompt
from domino_jax.decoding.requests import request_of
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.method.pair import Pair
from domino_jax.method.settings import SamplingParams
from domino_jax.models.sharding import make_mesh, placement, replicated
from domino_jax.recipe import cli, rules
from domino_jax.recipe.models import lower_to_drafter, refuse_other_head
from domino_jax.recipe.open_keys import decode_settings, width_of
from domino_jax.runtime import distributed
from domino_jax.runtime.agreement import barrier, refuse_differences
from domino_jax.runtime.distributed import say
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.runtime.journal import Journal
from domino_jax.runtime.progress import Progress
from domino_jax.weights.drafter import stored_head
from domino_jax.weights.identity import target_identity
from domino_jax.weights.loading import LoadedTarget, keep_compiled, load_models, load_target
from domino_jax.weights.target import read_target_config


def main(flags: cli.Flags) -> None:
    config = flags.config
    rules.check(config, "regenerate", flags.set_keys)
    if flags.head and config.regenerate.use_drafter and config.drafter.path:
        refuse_other_head(stored_head(config.drafter.path), flags.head, config.drafter.path)
    distributed.initialize(flags.distributed, preemptible=False)  # every answered row is on the disk
    keep_compiled()
    identity = target_identity(config.target.path)
    answer_prompts(config, flags.prompts, flags.output, identity, flags.set_keys)


def answer_prompts(
    config, prompts: str, output: str | os.PathLike, identity: Mapping[str, Any], set_keys: Collection[str] = ()
) -> None:
    """Answers the prompts of a file into `output` with the recipe's settings; all processes of a run call it together.

    The target is loaded onto devices of this process and released again, or not loaded when every row has its answer.
    Call it before the target of a training run takes the memory, and outside of jax.set_mesh.
    """
    skip_bad, settings = config.data.skip_bad_rows, settings_of(config, set_keys)
    rows = read_prompts(prompts, config.regenerate.num_prompts or None, skip_bad, refuse_unanswerable)
    origin = origin_of(rows, identity, config.target.quantize, settings)
    answer_rows(config, rows, local_output(output), origin, settings, config.regenerate.use_drafter)


def answer_rows(
    config,
    rows: Sequence[Mapping[str, Any]],
    output: Path,
    origin: Mapping[str, Any],
    settings: DecodeSettings,
    use_drafter: bool = False,
    processes: ProcessGroup | None = None,
) -> None:
    """`answer_prompts` for rows that were read.

    origin: of origin_of.  processes: that answer together; None: all of the run.
    """
    processes = processes or ProcessGroup(jax.process_index(), jax.process_count(), barrier)
    files = AnswerFiles(output, [row["id"] for row in rows], origin, processes)
    if processes.count > 1:
        refuse_differences({"what the answers are made with": files.origin})
    if files.is_finished():
        report(files, f"{output} holds all {len(rows)} answers already")
        return
    drafter_path = config.drafter.path if use_drafter else None
    if use_drafter and not drafter_path:
        raise DominoError(
            "config.regenerate.use_drafter is True, but config.drafter.path is not set; name a drafter's folder there,"
            " or leave use_drafter off."
        )
    with local_mesh(config.target.path, settings.batch_size) as sharding:
        loaded = load_target(config.target.path, settings.dtype, sharding, config.target.quantize)
        regenerate_rows(loaded, rows, files, settings, drafter_path, config.data.skip_bad_rows)


def settings_of(config, set_keys: Collection[str] = ()) -> DecodeSettings:
    """How prompts are answered: the recipe's values, with chains as `decode` drafts them.

    The width is adaptive unless decode.width is among set_keys, the keys that the command line sets.
    """
    section = config.regenerate
    drafting = decode_settings(config.decode, config.drafter.head, config.data.train).drafting
    return DecodeSettings(
        batch_size=section.batch_size,
        max_new_tokens=section.max_new_tokens,
        sampling=SamplingParams(section.temperature, section.top_k, section.top_p),
        seed=config.seed,
        drafting=dataclasses.replace(drafting, tree=None),
        thinking=config.decode.thinking,
        dtype=config.target.dtype,
        width=width_of(config.decode, set_keys),
    )


@contextlib.contextmanager
def local_mesh(path: str, batch_size: int) -> Iterator[Any]:
    """Where the target's weights go: one device, or a mesh of this process' devices, within which the block runs.

    The devices that divide the key/value heads split the weights; the others share the rows of a batch.
    """
    kv_heads, devices = read_target_config(path).num_key_value_heads, process_devices()
    tensor = math.gcd(len(devices), kv_heads)
    data = math.gcd(len(devices) // tensor, batch_size)
    if data * tensor == 1:
        yield jax.sharding.SingleDeviceSharding(devices[0])
        return
    mesh = make_mesh(data, 1, tensor, devices[: data * tensor])
    with jax.set_mesh(mesh):
        yield placement(mesh, kv_heads)


def process_devices() -> list[jax.Device]:
    """This process' devices; one of a CPU, whose devices share its cores."""
    devices = jax.local_devices()
    return devices[:1] if devices[0].platform == "cpu" else devices


def origin_of(
    rows: Sequence[Mapping[str, Any]], identity: Mapping[str, Any], quantize: str | None, settings: DecodeSettings
) -> dict[str, Any]:
    """The JSON values that decide the answers to rows. Batch size, drafter and processes change nothing."""
    return {
        "prompts_sha256": digest_rows(rows),
        "target": {**identity, "quantize": quantize, "dtype": settings.dtype},
        "max_new_tokens": settings.max_new_tokens,
        **dataclasses.asdict(settings.sampling),
        "seed": settings.seed,
        "thinking": settings.thinking,
    }


def regenerate_rows(
    loaded: LoadedTarget,
    rows: Sequence[Mapping[str, Any]],
    files: AnswerFiles,
    settings: DecodeSettings,
    drafter_path: str | None = None,
    skip_bad: bool = False,
) -> None:
    """Answers every prompt row into its files; existing rows stay as they are.

    Args:
        files: each of several processes answers every count-th queue, and the first one merges.
        drafter_path: a drafter that makes it faster and changes nothing else.
        skip_bad: rows that the template refuses or that do not fit the target are left out.
    """
    codec = TextCodec(loaded.tokenizer, settings.thinking)
    with files.opened() as done:
        if not all(row["id"] in done for row in rows):
            answerer = new_answerer(loaded, settings, drafter_path)
            prompts = first_turns(rows, answerer, codec, skip_bad)
            files.ids = [prompt.id for prompt in prompts]
            # The queues do not depend on what is done or on the number of processes. So a row is always computed beside
            # the same neighbours, and rounds as in an uninterrupted run; but for near ties of an adaptive width, which
            # depends on the clock.
            processes, all_queues = files.processes, queues(prompts, settings.batch_size)
            mine = itertools.islice(all_queues, processes.index, None, processes.count)
            work = [queue for queue in mine if not done.issuperset(prompt.id for prompt in queue)]
            answer(work, files, answerer, codec, done)
        files.finish()
    report(files, f"{files.output} holds {len(files.ids)} answers")


def report(files: AnswerFiles, held: str) -> None:
    """Prints what a finished file holds, and how many of its answers the limit cut; by the first process."""
    if files.processes.index == 0:
        cut = sum(row.get("finish_reason") == "length" for _, row in read_jsonl(files.output))
        say(f"{held}, {cut} of them cut by max_new_tokens." if cut else f"{held}.")


def first_turns(
    rows: Sequence[Mapping[str, Any]], answerer: Answerer, codec: TextCodec, skip_bad: bool
) -> list[Prompt]:
    """The prompts of the rows; those that cannot be answered are refused together, or left out."""
    prompts, bad = [], BadRows()
    for row in rows:
        try:
            prompt = first_turn(row, len(prompts), codec)  # keyed by its place in the output
            generator = answerer.generator(len(prompt.token_ids))
            generator.check_prompt(prompt.token_ids, f"prompt {row['id']}", prompt.request)
            prompts.append(prompt)
        except DataError as error:
            bad.add(error)
    bad.settle("the prompts", len(rows), skip_bad)
    return prompts


def refuse_unanswerable(row: Mapping[str, Any]) -> None:
    """Refuses messages that no target can answer (split_turns), and sampling values out of range."""
    request_of(row, 0)
    if "messages" in row:
        split_turns(row["messages"], f"prompt {row['id']}")


def new_answerer(loaded: LoadedTarget, settings: DecodeSettings, drafter_path: str | None) -> Answerer:
    if drafter_path is None:
        return Answerer(Pair(loaded.model, loaded.params), settings, loaded.stop_ids)
    mesh = jax.sharding.get_mesh()
    everywhere = None if mesh.empty else replicated(mesh)
    models = load_models(loaded, drafter_path, everywhere, settings.drafting)
    return Answerer(models, lower_to_drafter(settings, models.drafter.config), loaded.stop_ids)


def answer(
    work: Sequence[Sequence[Prompt]], files: AnswerFiles, answerer: Answerer, codec: TextCodec, done: set[str]
) -> None:
    """Answers queue after queue into this process' file; rows that have an answer are not written again."""
    processes, total = files.processes, len(files.ids)
    missing = sum(prompt.id not in done for queue in work for prompt in queue)
    here = f", {missing} of them in this one of {processes.count} processes" if processes.count > 1 else ""
    say(f"the target answers {total - len(done)} of {total} prompts into {files.output}{here}")
    before = len(done) if processes.count == 1 else 0
    tokens, rate, unfinished = 0, "starting", 0
    progress = Progress("regenerate", before + missing, before)
    with Journal(files.part) as rows:
        for queue in work:

            def show(finished: int, size: int = len(queue), rate: str = rate) -> None:
                progress.advance(0, f"{rate}, {finished} of the next {size}")

            answered = converse(queue, answerer, codec, show)
            tokens += sum(conversation.tokens for conversation in answered)
            rate = f"{tokens / answerer.seconds:,.0f} tokens/s"
            new = [conversation for conversation in answered if conversation.prompt.id not in done]
            rows.append(*(output_row(conversation, codec, answerer.settings) for conversation in new))
            progress.advance(len(new), rate)
            unfinished += sum(bool(conversation.prompt.later_turns) for conversation in new)
    if unfinished:
        say(f"{unfinished} conversations end early, because the target has no room for their next turn.")


if __name__ == "__main__":
    cli.run(main, required=("config", "prompts", "output"), optional=("distributed",))
