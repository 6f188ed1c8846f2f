"""Load on `domino_jax.serve` by OpenAI's client over loopback: latencies, throughput, τ, and whether texts are right.

    python -m benchmarks.device.serve_load --config=configs/qwen3_8b.py --config.drafter.path=DIR
    python -m benchmarks.device.serve_load --small                         # a test of the command, on any CPU

The server is a separate process. Each level keeps a number of requests in flight, or lets them arrive at random with a
mean rate, in plain and drafted mode. Every text is compared with the one that the same models give without a server.
Flags that begin with --config go to the server.
"""

import argparse
import asyncio
import contextlib
import json
import pathlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence

import numpy as np
import openai

from benchmarks.tables import DOCS, conditions, publish
from domino_jax import serve
from domino_jax.decoding.requests import Request
from domino_jax.decoding.settings import BASELINE
from domino_jax.recipe import cli

SMALL = (
    "--config=configs/tiny.py",
    "--config.serve.batch_size=4",
    "--config.decode.cache_length=256",
    "--config.decode.max_new_tokens=96",
    "--config.decode.modes=('autoregressive','draft')",
    "--config.decode.width=fixed",  # so few tokens do not show the adaptive width which is faster
)
PERCENTILES = (50, 95, 99)
COLUMNS = {
    "mode": "mode",
    "load": "load",
    "requests": "requests",
    "tokens_s": "tokens/s",
    "ttft_50": "first token p50 ms",
    "ttft_99": "p99",
    "itl_99": "next token p99 ms",
    "e2e_50": "whole answer p50 ms",
    "e2e_99": "p99",
    "tau": "τ",
    "same": "texts as offline",
}


async def ask(client: openai.AsyncOpenAI, model: str, mode: str, messages: list[dict], limit: int) -> dict:
    """One streamed request: its text, and the seconds from its start at which tokens came."""
    begin, text, times, usage = time.perf_counter(), "", [], None
    options = {"stream_options": {"include_usage": True}, "extra_body": {"mode": mode, "rounds": True}}
    stream = await client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=limit, stream=True, **options
    )
    async for part in stream:
        usage = part.usage or usage
        if part.choices:
            text += part.choices[0].delta.content or ""
            update = (part.model_extra or {}).get("domino")
            times += [time.perf_counter() - begin] * (len(update["tokens"]) if update else 0)
    return {"text": text, "times": times, "usage": usage, "seconds": time.perf_counter() - begin}


async def level(
    client: openai.AsyncOpenAI, model: str, mode: str, prompts: Sequence[list[dict]], limit: int, load: str
) -> tuple[list[dict], float]:
    """All requests at one load, "8" at a time or "3/s", and the seconds that they took."""
    begin = time.perf_counter()
    if load.endswith("/s"):
        arrivals = np.random.default_rng(0).exponential(1 / float(load[:-2]), len(prompts)).cumsum()

        async def later(prompt, seconds):
            await asyncio.sleep(seconds)
            return await ask(client, model, mode, prompt, limit)

        answers = await asyncio.gather(*map(later, prompts, arrivals))
    else:
        free = asyncio.Semaphore(int(load))

        async def in_turn(prompt):
            async with free:
                return await ask(client, model, mode, prompt, limit)

        answers = await asyncio.gather(*map(in_turn, prompts))
    return answers, time.perf_counter() - begin


def figures(answers: list[dict], seconds: float, expected: Sequence[str]) -> dict:
    """The row of one level."""
    gaps = [1e3 * gap for answer in answers for gap in np.diff(answer["times"])]
    columns = {"ttft": [1e3 * answer["times"][0] for answer in answers], "itl": gaps or [0.0]}
    columns["e2e"] = [1e3 * answer["seconds"] for answer in answers]
    tokens = sum(answer["usage"].completion_tokens for answer in answers)
    accepted = sum(answer["usage"].completion_tokens_details.accepted_prediction_tokens for answer in answers)
    later = tokens - len(answers)
    row = {"requests": len(answers), "tokens_s": tokens / seconds, "tau": later / max(later - accepted, 1)}
    for name, values in columns.items():
        row |= {f"{name}_{part}": float(np.percentile(values, part)) for part in PERCENTILES}
    same = sum(answer["text"] == text for answer, text in zip(answers, expected, strict=True))
    return {**row, "same": f"{same} of {len(answers)}"}


@contextlib.contextmanager
def served(flags: Sequence[str]) -> Iterator[str]:
    """The URL of a server with these flags, once it is ready."""
    argv = [sys.executable, "-m", "domino_jax.serve", *flags, "--port=0"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        url = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
        while True:
            with contextlib.suppress(OSError):  # 503 until it is ready
                urllib.request.urlopen(f"{url}health")
                break
            if process.poll() is not None:
                raise SystemExit(process.returncode)
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def programs_compiling(url: str) -> int:
    with urllib.request.urlopen(f"{url}metrics") as answer:
        [line] = [line for line in answer.read().decode().splitlines() if line.startswith("domino:num_programs_comp")]
    return int(float(line.split()[1]))


def offline(flags: cli.Flags, prompts: Sequence[list[dict]], limit: int) -> list[str]:
    """The texts that the target alone gives."""
    with serve.loaded(flags, serve.settings_of(flags)) as models:
        template = models.tokenizer.apply_chat_template
        choices = {"add_generation_prompt": True, "enable_thinking": False, "return_dict": False}
        ids = [template(prompt, tokenize=True, **choices) for prompt in prompts]
        requests = [Request(0, max_new_tokens=limit) for _ in ids]
        answers = models.generator.generate(models.models, ids, BASELINE, requests).answers
        return [models.tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in answers]


async def measure(url: str, prompts: Sequence[list[dict]], expected: Sequence[str], limit: int, loads) -> list[dict]:
    rows = []
    async with openai.AsyncOpenAI(base_url=f"{url}v1", api_key="none", max_retries=0, timeout=3600) as client:
        [model] = (await client.models.list()).data
        for mode in (BASELINE, model.model_extra["modes"][-1]):
            for load in loads:
                few = max(32, 2 * int(float(load.removesuffix("/s"))))  # prompts of several lengths
                compiling = True
                while compiling:  # what this level needs is compiled while it is answered
                    await level(client, model.id, mode, prompts[:few], limit, load)
                    compiling = programs_compiling(url) > 0
                answers, seconds = await level(client, model.id, mode, prompts, limit, load)
                rows.append({"mode": mode, "load": load, **figures(answers, seconds, expected)})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--max_tokens", type=int, default=128)
    parser.add_argument("--loads", default="1,8,32,64,4/s", help="in flight, or arrivals a second")
    parser.add_argument("--page", type=pathlib.Path, default=DOCS / "serving.md")
    args, rest = parser.parse_known_args(argv)
    if args.small:
        rest, args.requests, args.max_tokens, args.loads = [*SMALL, *rest], 8, 12, "1,4,20/s"
    flags = cli.parse(["serve", *rest], ("config",), ("host", "port"))
    rows = [json.loads(line) for line in open(flags.config.eval.prompts, encoding="utf-8")]
    prompts = [row["messages"][:1] for row in rows if "messages" in row]
    prompts = [prompts[place % len(prompts)] for place in range(args.requests)]
    expected = offline(flags, list({json.dumps(prompt): prompt for prompt in prompts}.values()), args.max_tokens)
    by_prompt = dict(zip(dict.fromkeys(map(json.dumps, prompts)), expected, strict=True))
    texts = [by_prompt[json.dumps(prompt)] for prompt in prompts]
    with served(rest) as url:
        rows = asyncio.run(measure(url, prompts, texts, args.max_tokens, args.loads.split(",")))
    flags = f"{' '.join(rest)} --max_tokens={args.max_tokens} --requests={args.requests} --loads={args.loads}"
    text = f"`python -m benchmarks.device.serve_load {flags}`: {conditions()}"
    print(publish(args.page, "serve load", rows, COLUMNS, text))


if __name__ == "__main__":
    main()
