"""The same weights in several loops of one process, alternating: transformers and torch against this package.

    pip install -r requirements.txt torch            # the CPU build will do
    python -m benchmarks.peers.transformers                                       # the shipped tiny models
    python -m benchmarks.peers.transformers --target=DIR --drafter=DIR --prompts=ROWS.jsonl --page=PAGE.md

1. transformers' own `generate`: greedy, with its cache.   2. the same with its prompt-lookup decoding, where --lookup
says how many tokens it drafts.   3. the draft-and-verify loop of Domino written plainly over transformers and torch
modules (torch_domino.py).   4. our autoregressive loop.   5. our Domino loop.

Float32, greedy, batch 1, from the prompt's ids to the answer's. Every repetition runs every prompt through all loops,
in an order that rotates with each prompt, so that a noisy machine disturbs them alike; a figure is the median of the
repetitions, each the sum over the prompts. Compilation and warm-up are timed separately, in a first pass over all
prompts that no other figure includes. Both sides have the same cores, `--threads` of them (0: all this process may
use). With one thread, other work on the machine hardly affects the CPU seconds that are reported beside the wall
seconds. With several, torch's threads spin while they wait. That time is counted too, and on a busy machine the threads
also wait for each other's time slices.
"""

import argparse
import dataclasses
import operator
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers import torch_domino
from benchmarks.tables import DOCS, ROOT, conditions, publish, ratio
from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import read_prompts
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.weights import loading

ASSETS = ROOT / "assets"
GENERATE, LOOKUP, TORCH_DOMINO, OUR_PLAIN, OUR_DOMINO = (
    "transformers generate",
    "transformers prompt lookup",
    "Domino, plain torch",
    "ours, autoregressive",
    "ours, Domino",
)
PAUSE = 0.03  # seconds between two loops: an OpenMP pool spins for a moment after its last work
PAIRS = ((OUR_PLAIN, GENERATE), (OUR_DOMINO, TORCH_DOMINO), (OUR_DOMINO, LOOKUP))  # like against like


@dataclasses.dataclass
class Measured:
    """seconds and cpu_seconds[loop][repetition]; tokens and accepts[loop][prompt]; first[loop]: the first pass."""

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    tokens: dict[str, list[list[int]]]
    accepts: dict[str, list[list[int]]]
    first: dict[str, float]

    def tau(self, loop: str) -> float:
        lengths = [length for lengths in self.accepts[loop] for length in lengths]
        return sum(lengths) / len(lengths)


def loops_of(choices: argparse.Namespace) -> tuple[dict[str, Callable], list[list[int]]]:
    """{name: prompt ids → (new tokens, tokens per round)} and the prompts."""
    loaded = loading.load_target(choices.target, "float32")
    models = loading.load_models(loaded, choices.drafter)
    rows = read_prompts(choices.prompts, choices.num_prompts)
    prompts = [encode_prompt(loaded.tokenizer, row, False, f"prompt {row['id']}") for row in rows]
    limit, stops = choices.max_new_tokens, loaded.stop_ids
    slots = max(map(len, prompts)) + limit + models.drafter.config.num_drafts + 1
    slots += -slots % 64
    generator = new_generator(models, DecodeSettings(cache_length=slots, max_new_tokens=limit), stops)
    target = AutoModelForCausalLM.from_pretrained(choices.target, dtype=torch.float32).eval()
    drafter = torch_domino.TorchDrafter(choices.drafter)

    def ours(mode: str):
        def run(prompt: list[int]):
            [answer] = generator.generate(models, [prompt], mode).answers
            return answer.token_ids, answer.accept_lengths

        return run

    loops = {
        GENERATE: lambda prompt: (torch_domino.plain_generate(target, prompt, limit, stops), []),
        LOOKUP: lambda prompt: (torch_domino.plain_generate(target, prompt, limit, stops, choices.lookup), []),
        TORCH_DOMINO: lambda prompt: torch_domino.domino_generate(target, drafter, prompt, limit, stops),
        OUR_PLAIN: ours("autoregressive"),
        OUR_DOMINO: ours("domino"),
    }
    if not choices.lookup:
        del loops[LOOKUP]
    return loops, prompts


def measure(loops: dict[str, Callable], prompts: list[list[int]], repetitions: int) -> Measured:
    first = {}
    answers: dict[str, list] = {}
    for name, loop in loops.items():
        begin = time.perf_counter()
        answers[name] = [loop(prompt) for prompt in prompts]
        first[name] = time.perf_counter() - begin
    seconds, cpu_seconds = ({name: [0.0] * repetitions for name in loops} for _ in range(2))
    for repetition in range(repetitions):
        for index, prompt in enumerate(prompts):
            names = list(loops)
            turn = (repetition + index) % len(names)
            for name in names[turn:] + names[:turn]:
                time.sleep(PAUSE)
                begin, cpu_begin = time.perf_counter(), time.process_time()
                loops[name](prompt)
                seconds[name][repetition] += time.perf_counter() - begin
                cpu_seconds[name][repetition] += time.process_time() - cpu_begin
    tokens = {name: [tokens for tokens, _ in each] for name, each in answers.items()}
    accepts = {name: [lengths for _, lengths in each] for name, each in answers.items()}
    return Measured(seconds, cpu_seconds, tokens, accepts, first)


COLUMNS = {"loop": "loop", "ms": "ms per token", "cpu_ms": "CPU ms", "ratio": "× generate", "least": "least"}
COLUMNS |= {"most": "most", "like": "× its like", "tau": "τ", "same": "same tokens as generate"}


def rows_of(measured: Measured) -> list[dict[str, Any]]:
    """One row for each loop; `like`: against the loop of PAIRS that does the same work."""
    reference, rows = measured.tokens[GENERATE], []
    for name, answers in measured.tokens.items():
        tokens = sum(map(len, answers))
        wall, cpu = (statistics.median(times[name]) / tokens for times in (measured.seconds, measured.cpu_seconds))
        row = {"loop": name, "ms": wall * 1e3, "cpu_ms": cpu * 1e3, "first_s": measured.first[name]}
        row |= ratio(measured.seconds[GENERATE], measured.seconds[name])
        for ours, theirs in PAIRS:
            if ours == name and theirs in measured.tokens and "like" not in row:
                row["like"] = ratio(measured.seconds[theirs], measured.seconds[ours])["ratio"]
        row["tau"] = measured.tau(name) if any(measured.accepts[name]) else None
        rows.append(row | {"same": f"{sum(map(operator.eq, answers, reference))} of {len(reference)}"})
    return rows


def flags(choices: argparse.Namespace) -> str:
    named = {"target": choices.target, "drafter": choices.drafter, "prompts": choices.prompts}
    own = "" if choices.tiny else "".join(f" --{key}={shown(value)}" for key, value in named.items())
    numbers = ("num_prompts", "max_new_tokens", "repetitions", "threads", "lookup")
    return own + "".join(f" --{key}={getattr(choices, key)}" for key in numbers)


def shown(path: str) -> str:
    """A path inside the repository from its root, any other by its last part: no report names a machine's folders."""
    place = pathlib.Path(path).resolve()
    return str(place.relative_to(ROOT)) if place.is_relative_to(ROOT) else place.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(ASSETS / "tiny_qwen3"))
    parser.add_argument("--drafter", default=str(ASSETS / "tiny_domino"), help="its folder in the public layout")
    parser.add_argument("--prompts", default=str(ASSETS / "tiny_qwen3" / "prompts_heldout.jsonl"))
    parser.add_argument("--num_prompts", type=int, default=16)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="cores for both sides; 0: all")
    parser.add_argument("--lookup", type=int, default=0, help="drafts of transformers' prompt lookup; 0: without it")
    parser.add_argument("--name", default="", help="the section's heading; the target's folder when absent")
    parser.add_argument("--page", type=pathlib.Path, default=DOCS / "benchmarks.md")
    choices = parser.parse_args()
    choices.tiny = choices.target == parser.get_default("target")
    choices.name = choices.name or pathlib.Path(choices.target).name
    jax.config.update("jax_platforms", "cpu")
    if choices.threads:  # before XLA starts one thread per core that it finds
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: choices.threads])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    loops, prompts = loops_of(choices)
    measured = measure(loops, prompts, choices.repetitions)
    text = (
        f"## {choices.name}\n\n`python -m benchmarks.peers.transformers{flags(choices)}`\n\n{len(prompts)} prompts, at "
        f"most {choices.max_new_tokens} new tokens each, float32, greedy, batch 1; medians of {choices.repetitions} "
        f"repetitions, alternating, {torch.get_num_threads()} torch threads. "
        f"{conditions(('jax', 'torch', 'transformers'))}"
    )
    print(publish(choices.page, f"against_transformers {choices.name}", rows_of(measured), COLUMNS, text))


if __name__ == "__main__":
    main()
