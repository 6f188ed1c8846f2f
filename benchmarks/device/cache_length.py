"""tokens/s of the same answers with different limits of the caches: a limit that no text reaches must cost nothing.

    python -m benchmarks.device.cache_length    # the shipped tiny models, cache_length 448 against 8,192

Float32, greedy, batch 1, on one core, in the modes autoregressive, draft and tree. Every repetition answers every
prompt with each limit in each mode; the order rotates, so that a noisy machine disturbs all alike. A figure is the
median over the repetitions of the decoding time (prefill and compilation left out, growing the caches included).
"""

import argparse
import json
import pathlib
import statistics

import jax

from configs import tiny
from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import read_prompts
from domino_jax.decoding.decode_settings import decode_settings
from domino_jax.decoding.generate import Generator, new_generator
from domino_jax.method.pair import Models
from domino_jax.method.settings import BASELINE, DRAFT, TREE
from domino_jax.runtime.cores import kept_to
from domino_jax.weights import loading

MODES = (BASELINE, DRAFT, TREE)
GOAL = 0.95


def generators(limits: list[int]) -> tuple[Models, dict[int, Generator], list[list[int]]]:
    """The models, a generator for each limit, and the prompts."""
    config = tiny.get_config()
    config.decode.modes = MODES
    loaded = loading.load_target(config.target.path, config.decode.dtype)
    models = loading.load_models(loaded, config.drafter.path)
    made = {}
    for limit in limits:
        config.decode.cache_length = limit
        made[limit] = new_generator(
            models, decode_settings(config.decode, config.drafter.head).generator(loaded.stop_ids)
        )
    rows = read_prompts(config.eval.prompts, config.decode.num_prompts)
    return models, made, [encode_prompt(loaded.tokenizer, row, False, f"prompt {row['id']}") for row in rows]


def measure(
    models: Models, made: dict[int, Generator], prompts: list[list[int]], repetitions: int
) -> dict[str, dict[int, list[float]]]:
    """mode → limit → tokens/s of each repetition; the first pass over the prompts compiles and is not counted.

    Raises:
        RuntimeError: an answer that depends on the limit, so that the rates could not be compared.
    """
    runs = [(mode, limit) for limit in made for mode in MODES]
    rates = {mode: {limit: [] for limit in made} for mode in MODES}
    texts: dict[tuple[str, int], list[int]] = {}
    for repetition in range(repetitions + 1):
        seconds, tokens = dict.fromkeys(runs, 0.0), dict.fromkeys(runs, 0)
        for index, prompt in enumerate(prompts):
            turn = (repetition + index) % len(runs)
            for mode, limit in runs[turn:] + runs[:turn]:
                [answer], clock = made[limit].generate(models, [prompt], mode, [index])
                seconds[mode, limit] += clock.decode_seconds
                tokens[mode, limit] += clock.decode_tokens
                if texts.setdefault((mode, index), answer.token_ids) != answer.token_ids:
                    raise RuntimeError(f"prompt {index} in mode {mode} has another answer with cache_length {limit}")
        for mode, limit in runs if repetition else ():
            rates[mode][limit].append(tokens[mode, limit] / seconds[mode, limit])
    return rates


def report(rates: dict[str, dict[int, list[float]]], limits: list[int]) -> str:
    """A Markdown table; the ratio is the median over the repetitions of the last limit's rate to the first one's."""
    heads = [f"tokens/s, cache_length {limit:,}" for limit in limits]
    lines = ["| mode | " + " | ".join(heads) + " | ratio | least, most |", "|---" + "|---:" * (len(limits) + 2) + "|"]
    for mode, by_limit in rates.items():
        ratios = [last / first for first, last in zip(by_limit[limits[0]], by_limit[limits[-1]], strict=True)]
        cells = [f"{statistics.median(by_limit[limit]):,.0f}" for limit in limits]
        cells += [f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f}, {max(ratios):.3f}"]
        lines.append(f"| {mode} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"Goal: a ratio of {GOAL} or more."])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limits", type=int, nargs="+", default=[448, 8_192])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--output", type=pathlib.Path, help="JSON file to write as well")
    choices = parser.parse_args(argv)
    models, made, prompts = generators(choices.limits)
    prompts = prompts[: choices.prompts]
    with kept_to(tiny.get_config().decode.cores):
        rates = measure(models, made, prompts, choices.repetitions)
    print(f"{len(prompts)} prompts, {choices.repetitions} repetitions, jax {jax.__version__}\n", flush=True)
    print(report(rates, choices.limits), flush=True)
    sizes = {limit: sorted({key[2] for key in one.compiled if key[0] in MODES}) for limit, one in made.items()}
    print(f"\nSlots of the caches that were used: {sizes}")
    if choices.output:
        choices.output.write_text(json.dumps(rates, indent=1) + "\n")


if __name__ == "__main__":
    main()
