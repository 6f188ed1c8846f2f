"""Let the target answer prompts: the paper's recipe trains on the target's own answers.

    python -m domino_jax.regenerate --config=configs/tiny.py --prompts=PROMPTS.jsonl --output=ROWS.jsonl

One row a prompt, in the prompts' order: {"id", "token_ids", "loss_mask", "finish_reason", "messages"}. token_ids are
exactly the tokens that the target read and generated, and loss_mask is 1 on those it generated, so that training
never meets a text tokenised another way. Every user message is answered in turn, with the answers so far as history;
answers in the prompts are replaced. With regenerate.use_drafter the drafter of drafter.path speeds this up.

It can be killed at any moment and started again with any number of processes: rows are appended whole, queue by queue,
and a prompt with an answer is not answered again (answer_files.py). Every process answers its share on all its
devices, which split the target's weights.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from domino_jax.data.answer_files import AnswerFiles, ProcessGroup, local_output
from domino_jax.data.bad_rows import BadRows
from domino_jax.data.chat import TextCodec
from domino_jax.data.prompts import digest_rows, read_prompts
from domino_jax.decoding.conversations import (
    Answerer,
    Conversation,
    converse,
    output_row,
    queues,
    split_turns,
    start_conversation,
)
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.evals.models import check_kind
from domino_jax.method.pair import Models
from domino_jax.method.settings import SamplingParams
from domino_jax.models.sharding import make_mesh, placement, replicated
from domino_jax.recipe import cli, rules
from domino_jax.recipe.decoding import fit_to_drafter
from domino_jax.recipe.values import decode_settings, width_of
from domino_jax.runtime import distributed
from domino_jax.runtime.agreement import barrier, refuse_differences
from domino_jax.runtime.distributed import say
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.runtime.progress import Progress
from domino_jax.weights.drafter import stored_head
from domino_jax.weights.identity import target_identity
from domino_jax.weights.loading import LoadedTarget, keep_compiled, load_models, load_target
from domino_jax.weights.target import read_target_config


def main(flags: cli.Flags) -> None:
    config = flags.config
    rules.check(config, "regenerate")
    if flags.head and config.regenerate.use_drafter and config.drafter.path:
        check_kind(stored_head(config.drafter.path), flags.head, config.drafter.path)
    keep_compiled()
    distributed.initialize(flags.distributed, preemptible=False)  # every answered row is on the disk
    answer_prompts(config, flags.prompts, flags.output, flags.set_keys)


def answer_prompts(config, prompts: str, output: str | os.PathLike, set_keys: Collection[str] = ()) -> None:
    """Answers the prompts of a file into `output` with the recipe's settings; all processes of a run call it together.

    The target is loaded onto devices of this process and released again, or not loaded at all when every row has its
    answer. Call it before the target of a training run takes the memory, and outside of jax.set_mesh.
    """
    output = local_output(output)
    skip_bad = config.data.skip_bad_rows
    rows = read_prompts(prompts, config.regenerate.num_prompts or None, skip_bad, refuse_unanswerable)
    answer_rows(config, rows, output, settings_of(config, set_keys), config.regenerate.use_drafter)


def answer_rows(
    config,
    rows: Sequence[Mapping[str, Any]],
    output: Path,
    settings: DecodeSettings,
    use_drafter: bool = False,
    processes: ProcessGroup | None = None,
) -> None:
    """`answer_prompts` for given rows and settings. processes: that answer together; None: all of the run."""
    skip_bad = config.data.skip_bad_rows
    processes = processes or ProcessGroup(jax.process_index(), jax.process_count(), barrier)
    identity = {**target_identity(config.target.path), "quantize": config.target.quantize}
    files = files_of(rows, output, identity, settings, processes)
    if processes.count > 1:
        refuse_differences({"what the answers are made with": json.dumps(files.made_with)})
    if files.is_finished():
        say(f"{output} holds all {len(rows)} answers already.")
        return
    drafter_path = config.drafter.path if use_drafter else None
    if use_drafter and not drafter_path:
        raise DominoError(
            "config.regenerate.use_drafter is True, but config.drafter.path is not set; name a drafter's folder there,"
            " or leave use_drafter off."
        )
    with local_mesh(config.target.path, settings.batch_size) as sharding:
        loaded = load_target(config.target.path, settings.dtype, sharding, config.target.quantize)
        regenerate_rows(loaded, rows, files, settings, drafter_path, skip_bad)


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

    The devices that divide the key/value heads split the weights, and the others share the rows of a batch, as far as
    it can be cut evenly.
    """
    devices, kv_heads = own_devices(), read_target_config(path).num_key_value_heads
    tensor = math.gcd(len(devices), kv_heads)
    data = math.gcd(len(devices) // tensor, batch_size)
    if data * tensor == 1:
        yield jax.sharding.SingleDeviceSharding(devices[0])
        return
    mesh = make_mesh(data, 1, tensor, devices[: data * tensor])
    with jax.set_mesh(mesh):
        yield placement(mesh, kv_heads)


def own_devices() -> list[jax.Device]:
    """This process' devices; one of a CPU, whose devices share its cores."""
    devices = jax.local_devices()
    return devices[:1] if devices[0].platform == "cpu" else devices


def files_of(
    rows: Sequence[Mapping[str, Any]],
    output: Path,
    identity: Mapping[str, Any],
    settings: DecodeSettings,
    processes: ProcessGroup,
) -> AnswerFiles:
    """The files of an output, with what decides what its rows say: prompts, target and settings.

    Batch size, drafter and processes change nothing.
    """
    made_with = {
        "prompts_sha256": digest_rows(rows),
        "target": {**identity, "dtype": settings.dtype},
        "max_new_tokens": settings.max_new_tokens,
        **dataclasses.asdict(settings.sampling),
        "seed": settings.seed,
        "thinking": settings.thinking,
    }
    return AnswerFiles(output, [row["id"] for row in rows], made_with, processes)


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
        loaded: the target, its parameters on a device of this process.
        files: of files_of. Each of several processes answers every count-th queue, and the first one merges.
        drafter_path: a drafter that makes it faster and changes nothing else.
        skip_bad: rows that the template refuses or that do not fit the target are left out.
    """
    processes = files.processes
    codec = TextCodec(loaded.tokenizer, settings.thinking)
    with files.opened() as done:
        if not all(row["id"] in done for row in rows):
            answerer = new_answerer(loaded, settings, drafter_path)
            started = start_conversations(rows, answerer, codec, skip_bad)
            files.ids = [conversation.row["id"] for conversation in started]
            work = list(own_queues(started, settings.batch_size, done, processes))
            answer(work, files, answerer, codec, done)
        files.finish()
    say(f"{files.output} holds {len(files.ids)} answers.")


def start_conversations(
    rows: Sequence[Mapping[str, Any]], answerer: Answerer, codec: TextCodec, skip_bad: bool
) -> list[Conversation]:
    """The conversations of the rows; those that cannot be answered are refused together, or left out."""
    started, bad = [], BadRows()
    for row in rows:
        try:
            conversation = start_conversation(row, len(started), codec)  # keyed by its place in the output
            answerer.generator(len(conversation.prompt)).check_prompt(conversation.prompt, f"prompt {row['id']}")
            started.append(conversation)
        except DataError as error:
            bad.add(error)
    bad.settle("the prompts", len(rows), skip_bad)
    return started


def refuse_unanswerable(row: Mapping[str, Any]) -> None:
    """Refuses messages that no target can answer (split_turns)."""
    if "messages" in row:
        split_turns(row["messages"], f"prompt {row['id']}")


def new_answerer(loaded: LoadedTarget, settings: DecodeSettings, drafter_path: str | None) -> Answerer:
    """The target with a drafter, or without one."""
    if drafter_path is None:
        return Answerer(Models(loaded.model, loaded.params), settings, loaded.stop_ids)
    mesh = jax.sharding.get_mesh()
    everywhere = None if mesh.empty else replicated(mesh)
    models = load_models(loaded, drafter_path, everywhere, settings.drafting)
    return Answerer(models, fit_to_drafter(settings, models.drafter.config), loaded.stop_ids)


def own_queues(
    started: Sequence[Conversation], batch_size: int, done: set[str], processes: ProcessGroup
) -> Iterator[list[Conversation]]:
    """The work of this process: every count-th queue, unless all its rows have an answer.

    The queues are the same whatever is done already and however many processes there are. So a row is always computed
    beside the same neighbours, and the rows are those of an uninterrupted run also where the arithmetic rounds; but for
    near ties of an adaptive width, which depends on the clock.
    """
    for number, queue in enumerate(queues(started, batch_size)):
        missing = any(conversation.row["id"] not in done for conversation in queue)
        if missing and number % processes.count == processes.index:
            yield queue


def answer(
    work: Sequence[Sequence[Conversation]],
    files: AnswerFiles,
    answerer: Answerer,
    codec: TextCodec,
    done: set[str],
) -> None:
    """Answers queue after queue into this process' file; rows that have an answer are not written again."""
    processes, total = files.processes, len(files.ids)
    missing = sum(one.row["id"] not in done for queue in work for one in queue)
    here = f", {missing} of them in this one of {processes.count} processes" if processes.count > 1 else ""
    say(f"the target answers {total - len(done)} of {total} prompts into {files.output}{here}")
    before = len(done) if processes.count == 1 else 0
    tokens, rate = 0, "starting"
    with files.appending() as rows, Progress("regenerate", before + missing, before) as progress:
        for queue in work:
            # Copies, so that a conversation's answers are freed once they are written.
            queue = [dataclasses.replace(one, messages=list(one.messages), earlier=[]) for one in queue]

            def show(finished: int, size: int = len(queue), rate: str = rate) -> None:
                progress.advance(0, f"{rate}, {finished} of the next {size}")

            tokens += converse(queue, answerer, codec, show)
            rate = f"{tokens / answerer.seconds:,.0f} tokens/s"
            fresh = [output_row(one, codec) for one in queue if one.row["id"] not in done]
            rows.append(*fresh)
            progress.advance(len(fresh), rate)


if __name__ == "__main__":
    cli.run(main, required=("config", "prompts", "output"), optional=("distributed",))
