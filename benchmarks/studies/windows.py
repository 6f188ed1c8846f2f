"""τ and the time of a round on long conversations, by the window of text that the draft reads (docs/smollm2.md).

    python -m benchmarks.studies.windows --config=configs/smollm2_135m.py --config.decode.cache_length=4096 \\
        --config.decode.num_prompts=8 --config.decode.max_new_tokens=64
    python -m benchmarks.studies.windows --config=configs/smollm2_135m.py --config.decode.num_prompts=1 \\
        --config.decode.max_new_tokens=8 --config.decode.cache_length=512                 # a test of the command

A conversation is the training rows, prompts with the target's answers, up to a number of tokens, and then a held-out
prompt. All windows answer the same conversations alternately, one request at a time; the times are medians.
"""

import gzip
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence

from benchmarks.tables import DOCS, conditions, publish
from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import read_prompts
from domino_jax.decoding.generate import Generation, Generator, new_generator
from domino_jax.decoding.settings import BASELINE, DRAFT
from domino_jax.method.pair import Models
from domino_jax.recipe import cli, rules
from domino_jax.recipe.open_keys import decode_settings
from domino_jax.weights.loading import keep_compiled, load_models, load_target

ROWS = 40  # of the training that a conversation chooses from
LENGTHS = (200, 1_000, 3_000)  # tokens of a conversation, at most
WINDOWS = {"all": {}, "256": {"draft_window": 256}, "256 + 4": {"draft_window": 256, "draft_sink": 4}}
COLUMNS = {"length": "tokens before the answer", "step": "plain step, ms"}
COLUMNS |= {f"tau {name}": f"τ, {name}" for name in WINDOWS} | {
    f"round {name}": f"round, {name}, ms" for name in WINDOWS
}


def main(flags: cli.Flags) -> None:
    config = flags.config
    config.decode.modes, config.decode.batch_size = (BASELINE, DRAFT), 1
    rules.check(config, "decode")
    keep_compiled()
    settings = decode_settings(config.decode, config.drafter.head).change(tree=None)
    loaded = load_target(config.target.path, settings.dtype, quantize=config.target.quantize)
    draftings = {name: settings.change(**one).drafting for name, one in WINDOWS.items()}
    models = {name: load_models(loaded, config.drafter.path, drafting=one) for name, one in draftings.items()}
    rows = read_prompts(config.eval.prompts, config.decode.num_prompts)
    prompts = [encode_prompt(loaded.tokenizer, row, settings.thinking, f"prompt {row['id']}") for row in rows]
    generators = {name: new_generator(one, settings, loaded.stop_ids) for name, one in models.items()}
    room = config.decode.cache_length - settings.max_new_tokens - config.drafter.block_size
    table = []
    for length in (length for length in LENGTHS if length <= room):
        with gzip.open(config.data.train, "rt", encoding="utf-8") as lines:
            history = (json.loads(line)["token_ids"] for line in lines)
            texts = [conversation(prompt, history, length) for prompt in prompts]
        row = {"length": statistics.fmean(map(len, texts)), "prompts": len(texts)}
        steps, rounds, lengths = [], {name: [] for name in WINDOWS}, {name: [] for name in WINDOWS}
        for text, (name, generator) in itertools.product(texts, generators.items()):
            if name == "all":
                answer, seconds = answered(generator, models[name], text, BASELINE)
                steps.append(seconds / max(len(answer.token_ids) - 1, 1))
            answer, seconds = answered(generator, models[name], text, DRAFT)
            rounds[name].append(seconds / len(answer.accept_lengths))
            lengths[name] += answer.accept_lengths
        row |= {"step": 1e3 * statistics.median(steps)}
        row |= {f"tau {name}": statistics.fmean(some) for name, some in lengths.items()}
        row |= {f"round {name}": 1e3 * statistics.median(some) for name, some in rounds.items()}
        print(row, flush=True)
        table.append(row)
    text = f"""## Long conversations

{len(prompts)} held-out prompts, each after earlier turns of a conversation (training rows up to the stated length),
at most {settings.max_new_tokens} tokens each, by what the draft reads: all of the text, its last 256 tokens, or these
with the first 4. {conditions(("jax",))}"""
    print(publish(DOCS / "smollm2.md", "windows smollm2", table, COLUMNS, text), flush=True)


def answered(generator: Generator, models: Models, text: Sequence[int], mode: str) -> tuple[Generation, float]:
    """The answer, and its seconds without the prefill; decoded again until nothing is compiled."""
    while True:
        [answer], clock = generator.generate(models, [text], mode)
        if not clock.compile_seconds:
            return answer, clock.decode_seconds


def conversation(prompt: Sequence[int], history: Iterator[Sequence[int]], length: int) -> list[int]:
    """The next ROWS of `history` that fit, without their system prompt, and then `prompt`: at most `length` tokens."""
    rows, turns = list(itertools.islice(history, ROWS)), []
    shared = next(place for place, (one, other) in enumerate(zip(prompt, rows[0], strict=False)) if one != other)
    begin = shared - 1 - list(prompt[:shared])[::-1].index(prompt[0])  # of the user's turn; each begins with one token
    for row in rows:
        if len(prompt) + len(turns) + len(row) - begin < length:
            turns += [*row[begin:], prompt[begin - 1]]
    return [*prompt[:begin], *turns, *prompt[begin:]]


if __name__ == "__main__":
    cli.run(main, required=("config",))
