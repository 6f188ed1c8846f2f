"""tokens/s of the regeneration of training rows with and without the drafter, and what finished rows cost.

    python -m benchmarks.device.regeneration --batches=16 --batch_size=32

The shipped tiny models answer the first prompts of the tiny recipe with its settings, greedy, in queues of neighbours
by length, as `python -m domino_jax.regenerate` does. Both ways answer each queue, and they alternate in going first. A
first pass over all queues compiles and is not counted; a figure is the median over the repetitions. Both must give the
same answers.

A batch computes rows × rounds in each dispatch. Row-rounds of rows whose answer is already complete, or that never had
a prompt, are the share spent on finished rows.
"""

import argparse
import dataclasses
import pathlib
import statistics
from collections.abc import Sequence

import jax
import numpy as np

from benchmarks.tables import DOCS, conditions, publish, ratio
from configs import tiny
from domino_jax.data.prompts import read_prompts
from domino_jax.decoding.conversations import Answerer, Conversation, converse, queues, start_conversation
from domino_jax.decoding.generate import Generator
from domino_jax.method.settings import MODES
from domino_jax.regenerate import new_answerer, settings_of
from domino_jax.weights import loading

PLAIN, DRAFTED = ("target alone", "with the drafter")


@dataclasses.dataclass
class RowRounds:
    """computed: rows × rounds of all dispatches.  unfinished: those of rows whose answer was not complete."""

    computed: int = 0
    unfinished: int = 0

    @property
    def finished_share(self) -> float:
        return 1 - self.unfinished / self.computed


@dataclasses.dataclass(frozen=True, eq=False)
class CountingGenerator(Generator):
    """A generator that counts the row-rounds of its dispatches."""

    row_rounds: RowRounds = dataclasses.field(kw_only=True)

    def run(self, clock, key, function, arguments, donate=()):
        if key[0] not in MODES:  # a prefill, or a change of the batch
            return super().run(clock, key, function, arguments, donate)

        def taken(state) -> np.ndarray:
            return np.asarray(state.counts if self.plain(key[0]) else state.rounds)

        before = taken(arguments[1])  # the state is donated
        state, seconds = super().run(clock, key, function, arguments, donate)
        rounds = taken(state) - before
        self.row_rounds.computed += len(rounds) * int(rounds.max())
        self.row_rounds.unfinished += int(rounds.sum())
        return state, seconds


class CountingAnswerer(Answerer):
    def __init__(self, *args):
        super().__init__(*args)
        self.row_rounds = RowRounds()

    def take(self) -> tuple[float, RowRounds]:
        """The seconds and row-rounds since the last call."""
        taken = self.seconds, dataclasses.replace(self.row_rounds)
        self.seconds, self.row_rounds.computed, self.row_rounds.unfinished = 0.0, 0, 0
        return taken

    def generator(self, longest: int) -> Generator:
        drafts = self.drafts(longest)
        if drafts not in self.generators:
            self.generators[drafts] = CountingGenerator(**vars(super().generator(longest)), row_rounds=self.row_rounds)
        return self.generators[drafts]


@dataclasses.dataclass
class Run:
    """What one way of answering needed for all queues of a repetition."""

    tokens: int
    seconds: float
    row_rounds: RowRounds


def answerers(batch_size: int) -> tuple[dict[str, CountingAnswerer], loading.LoadedTarget]:
    """Way → its answerer, and the target."""
    config = tiny.get_config()
    settings = dataclasses.replace(settings_of(config), batch_size=batch_size)
    loaded = loading.load_target(config.target.path, config.target.dtype)
    drafters = {PLAIN: None, DRAFTED: config.drafter.path}
    plain = {way: new_answerer(loaded, settings, drafter) for way, drafter in drafters.items()}
    return {way: CountingAnswerer(one.models, one.settings, one.stop_ids) for way, one in plain.items()}, loaded


def conversations(loaded: loading.LoadedTarget, count: int, batch_size: int) -> list[list[Conversation]]:
    rows = read_prompts(tiny.get_config().data.train, count)
    started = [start_conversation(row, place, loaded.tokenizer, False) for place, row in enumerate(rows)]
    return list(queues(started, batch_size))


def measure(made: dict[str, CountingAnswerer], work: list[list[Conversation]], tokenizer, repetitions: int):
    """Way → a Run for every repetition; one more comes first.

    Raises:
        RuntimeError: the drafter changed an answer.
    """
    runs: dict[str, list[Run]] = {way: [] for way in made}
    for repetition in range(repetitions + 1):
        tokens = dict.fromkeys(made, 0)
        for number, queue in enumerate(work):
            texts = []
            for way in list(made)[:: 1 if (repetition + number) % 2 else -1]:
                copies = [dataclasses.replace(one, messages=list(one.messages), earlier=[]) for one in queue]
                tokens[way] += converse(copies, made[way], tokenizer, False)
                texts.append([one.answer.token_ids for one in copies])
            if texts[0] != texts[1]:
                raise RuntimeError(f"queue {number} has another answer with the drafter than without.")
        for way, answerer in made.items():
            runs[way].append(Run(tokens[way], *answerer.take()))
    return {way: counted for way, (_, *counted) in runs.items()}  # the first repetition compiles


def rows_of(runs: dict[str, list[Run]]) -> list[dict[str, float | str]]:
    """One row for each way of answering."""
    rates = {way: [run.tokens / run.seconds for run in each] for way, each in runs.items()}
    rows = []
    for way, each in runs.items():
        spent = each[0].row_rounds
        row = {"way": way, "tokens_s": statistics.median(rates[way]), "row_rounds": spent.computed}
        rows.append(row | {"finished": spent.finished_share, **ratio(rates[way], rates[PLAIN])})
    return rows


COLUMNS = {"way": "", "tokens_s": "tokens/s", "ratio": "against the target alone", "row_rounds": "row-rounds"}
COLUMNS |= {"finished": "share of them on finished rows"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batches", 16), ("batch_size", 32), ("repetitions", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--page", type=pathlib.Path, default=DOCS / "benchmarks.md")
    parser.add_argument("--small", action="store_true", help="two prompts, once: a test of the command")
    choices = parser.parse_args(arguments)
    if choices.small:
        choices.batches, choices.batch_size, choices.repetitions = 1, 2, 1
    jax.config.update("jax_platforms", "cpu")
    by_way, loaded = answerers(choices.batch_size)
    count = choices.batches * choices.batch_size
    runs = measure(by_way, conversations(loaded, count, choices.batch_size), loaded.tokenizer, choices.repetitions)
    flags = "".join(f" --{name}={getattr(choices, name)}" for name in ("batches", "batch_size", "repetitions"))
    text = (
        f"`python -m benchmarks.device.regeneration{flags}`\n\n{count} prompts in queues over {choices.batch_size} "
        f"rows, {runs[PLAIN][0].tokens:,} new tokens, all answers the same both ways; medians of {choices.repetitions} "
        f"repetitions, alternating, prefill included, compilation left out. {conditions()}"
    )
    print(publish(choices.page, "regeneration", rows_of(runs), COLUMNS, text))


if __name__ == "__main__":
    main()
