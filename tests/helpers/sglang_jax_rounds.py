"""A program for a Python that has sglang-jax: decodes on a CPU with the engine's own scheduler and our Domino worker.

Its arguments are two files. The first is read: a JSON object with `options` of the engine, `prompts` (lists of token
ids) and `max_tokens`. The second is written: `answers` and `again`, for the same prompts a second time, each with its
`token_ids`, the `accept_lengths` of its rounds, of which the last is not cut, and how many of the prompt's tokens were
`cached`; and `sampled`, the engine's answer to a request with a temperature.

python -m tests.helpers.sglang_jax_rounds JOB ANSWERS
"""

import json
import os
import sys

from tests.helpers import sglang_jax_kernels

# One request's pages, few and small programs; the engine's options for a drafter come with the job.
SMALL = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "fa",
    "grammar_backend": "none",
    "enable_single_process": True,
    "disable_precompile": True,
    "page_size": 16,
    "max_running_requests": 4,
    "max_total_tokens": 4096,
    "context_length": 384,
    "chunked_prefill_size": 256,
    # The drafter's pool ignores max_total_tokens: with the default a CPU would copy gigabytes in every round.
    "mem_fraction_static": 0.01,
    "precompile_bs_paddings": [4],
    "precompile_token_paddings": [64, 256],
    "log_level": "error",
}


def record_rounds(rounds: dict[tuple[int, ...], list[int]]) -> None:
    """Fills `rounds`, by prompt, with the tokens of each round as the scheduler reads them."""
    from sgl_jax.srt.speculative import overlap_utils

    resolve = overlap_utils.resolve_spec_decode_token_ids

    def recorded(result, batch, width):
        tokens, accepts = resolve(result, batch, width)
        for rank, info in enumerate(batch.reqs_info):
            for row, request in enumerate(info.reqs or []):
                if not request.finished():
                    accepted = accepts[rank * batch.per_dp_bs_size + row]
                    rounds.setdefault(tuple(request.origin_input_ids), []).append(int(accepted))
        return tokens, accepts

    overlap_utils.resolve_spec_decode_token_ids = recorded


def main(job_file: str, answers_file: str) -> None:
    with open(job_file) as file:
        job = json.load(file)
    sglang_jax_kernels.install()
    from integrations.sglang_jax import worker

    worker.install()
    rounds: dict[tuple[int, ...], list[int]] = {}
    record_rounds(rounds)
    from sgl_jax.srt.entrypoints.engine import Engine

    engine = Engine(**SMALL, **job["options"])
    greedy = {"temperature": 0.0, "max_new_tokens": job["max_tokens"], "ignore_eos": True}

    def decode():
        outputs = engine.generate(input_ids=job["prompts"], sampling_params=greedy)
        return [
            {
                "token_ids": list(output["output_ids"]),
                "accept_lengths": rounds.pop(tuple(prompt)),
                "cached": output["meta_info"]["cached_tokens"],
            }
            for prompt, output in zip(job["prompts"], outputs, strict=True)
        ]

    answers, again = decode(), decode()
    try:
        warm = engine.generate(input_ids=job["prompts"][0], sampling_params={"temperature": 0.7, "max_new_tokens": 4})
        sampled = json.dumps(warm, default=str)
    except Exception as error:
        sampled = str(error)
    with open(answers_file, "w") as file:
        json.dump({"answers": answers, "again": again, "sampled": sampled}, file)
    sys.stdout.flush()
    os._exit(0)  # the engine's threads would keep the process


if __name__ == "__main__":
    main(*sys.argv[1:])
