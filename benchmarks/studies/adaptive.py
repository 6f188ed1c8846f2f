"""Tokens/s of the adaptive width beside every fixed width and plain decoding, in one process (docs/decoding.md).

    taskset -c 0 python -m benchmarks.studies.adaptive --config=configs/tiny.py \\
        --config.decode.concurrency="(1,2,4,8,16,32)"
    python -m benchmarks.studies.adaptive --config=configs/smollm2_135m.py --config.decode.num_prompts=144 \\
        --config.decode.max_new_tokens=64 --config.decode.temperature=0.7            # prompts by kind, at one row
    python -m benchmarks.studies.adaptive --config=configs/tiny.py --config.decode.num_prompts=6 \\
        --config.decode.max_new_tokens=16                                            # a test of the command

Cases: all prompts in batches of each size of decode.concurrency (decode.batch_size alone if there is none); at one row
the prompts of each task, where rows name one; and a stream of the prompts whose drafts are accepted most often, those
whose drafts are accepted least often, and again the former. All widths answer a case REPEATS times, alternately: prompt
by prompt at one row, else all of its prompts. The controller of a size learns from case to case, as in a process that
goes on.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.tables import markdown
from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import read_prompts
from domino_jax.decoding.generate import Generation, Generator, new_generator
from domino_jax.decoding.programs import Clock
from domino_jax.decoding.settings import BASELINE, DRAFT, DecodeSettings
from domino_jax.method.pair import Models
from domino_jax.recipe import cli, rules
from domino_jax.recipe.open_keys import decode_settings
from domino_jax.weights.loading import keep_compiled, load_models, load_target

REPEATS = 3
ADAPTIVE = "adaptive"


@dataclasses.dataclass(frozen=True)
class Case:
    """Prompts by their place among all, decoded in batches of `rows` rows."""

    name: str
    rows: int
    places: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Study:
    """generators: by rows and the name of a width; that of plain decoding is 0."""

    models: Models
    prompts: Sequence[Sequence[int]]
    generators: Mapping[tuple[int, str], Generator]

    def decode(self, case: Case, width: str) -> tuple[list[Generation], Clock]:
        """The answers of a case, decoded again until nothing is compiled."""
        prompts, mode = [self.prompts[place] for place in case.places], BASELINE if width == "0" else DRAFT
        while True:
            made = self.generators[case.rows, width].generate(self.models, prompts, mode, case.places)
            if not made.clock.compile_seconds:
                return made

    def row(self, case: Case, names: Sequence[str]) -> dict[str, float | str]:
        """The table's row: tokens/s by width, and the adaptive one's relative to the best and to plain decoding."""
        turns = [case] if case.rows > 1 else [dataclasses.replace(case, places=[place]) for place in case.places]
        clocks = {name: [] for name in names}
        for turn, part in enumerate(turns * REPEATS):
            for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
                clocks[name].append(self.decode(part, name)[1])
        rates = {
            name: sum(clock.decode_tokens for clock in some) / sum(clock.decode_seconds for clock in some)
            for name, some in clocks.items()
        }
        fixed = {name: rate for name, rate in rates.items() if name != ADAPTIVE}
        adaptive = clocks[ADAPTIVE]
        lost = sum(clock.exploring_seconds for clock in adaptive) / sum(clock.decode_seconds for clock in adaptive)
        row = {"case": case.name, **rates, "best": rates[ADAPTIVE] / max(fixed.values())}
        row |= {"plain": rates[ADAPTIVE] / rates["0"], "lost": lost}
        print(row, flush=True)
        return row


def main(flags: cli.Flags) -> None:
    config = flags.config
    config.decode.modes = (BASELINE, DRAFT)
    rules.check(config, "decode")
    keep_compiled()
    settings = decode_settings(config.decode, config.drafter.head)
    rows = read_prompts(config.eval.prompts, config.decode.num_prompts or None)
    loaded = load_target(config.target.path, settings.dtype, quantize=config.target.quantize)
    models = load_models(loaded, config.drafter.path, drafting=settings.drafting)
    prompts = [encode_prompt(loaded.tokenizer, row, settings.thinking, f"prompt {row['id']}") for row in rows]
    sizes = sorted({1, *(settings.concurrency or (settings.batch_size,))})
    names, generators = widths_of(models, settings, loaded.stop_ids, sizes)
    study, every = Study(models, prompts, generators), range(len(prompts))
    cases = [Case(f"{size} rows", size, every) for size in sizes]
    for kind in dict.fromkeys(row["task"] for row in rows if "task" in row):
        cases.append(Case(kind, 1, [place for place in every if rows[place].get("task") == kind]))
    cases.append(stream_of(study, names[-2]))
    columns = {"case": "case", **{name: f"{name}, tokens/s" for name in names}}
    columns |= {"best": "adaptive ÷ best", "plain": "adaptive ÷ plain", "lost": "lost to exploring"}
    print(markdown([study.row(case, names) for case in cases], columns), flush=True)


def widths_of(
    models: Models, settings: DecodeSettings, stop_ids: Sequence[int], sizes: Sequence[int]
) -> tuple[list[str], dict[tuple[int, str], Generator]]:
    """The names of the widths, the widest fixed one before the adaptive one, and Study.generators."""
    adaptive = new_generator(models, settings.change(width=ADAPTIVE, tree=None), stop_ids)
    changes = {str(drafts): {"num_drafts": drafts or None} for drafts in adaptive.widths(DRAFT)}
    changes[ADAPTIVE] = {"width": ADAPTIVE}
    generators = {
        (size, name): new_generator(models, settings.change(tree=None, batch_size=size, **change), stop_ids)
        for size in sizes
        for name, change in changes.items()
    }
    return list(changes), generators


def stream_of(study: Study, widest: str) -> Case:
    """A third of the prompts with the highest τ, a third with the lowest, and the first ones again."""
    answers = study.decode(Case("", 1, range(len(study.prompts))), widest)[0]
    means = [statistics.fmean(answer.accept_lengths or [1]) for answer in answers]
    order = sorted(range(len(means)), key=lambda place: -means[place])
    third = max(len(order) // 3, 1)
    return Case("easy, hard, easy", 1, [*order[:third], *order[-third:], *order[:third]])


if __name__ == "__main__":
    cli.run(main, required=("config",))
