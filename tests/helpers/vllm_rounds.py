"""A program for a Python that has vLLM: decodes on a CPU with an exported drafter.

Its arguments are two files. The first is read: a JSON object with `options` of the engine, `prompts` (lists of token
ids), `max_tokens` and `runs`. Each run has `together`, the requests in flight, and optionally a `temperature` and
`cancel`, the step after which one more request is cancelled. The second is written: `drafter`, the engine's class, and
for each of `runs` the list of the answers. Each has its `token_ids`, how many tokens of the prompt were `cached`, and
`steps`, the number of tokens that each step of the engine emitted; the first step is the prefill.

VLLM_USE_V2_MODEL_RUNNER=1 picks the runner that GPUs use; Triton's interpreter then runs its kernels.
"""

import json
import os
import sys

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from triton.backends import Backend, backends

    # vLLM's CPU build runs Triton's kernels if Triton has a backend for CPUs, which no released one has.
    backends["cpu"] = Backend(compiler=None, driver=None)

sys.path.insert(0, os.path.dirname(__file__))

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm_norm import register  # noqa: E402

SMALL = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 1,
    "kv_cache_memory_bytes": 2**27,
    "skip_tokenizer_init": True,
    "enforce_eager": True,  # without a C++ compiler
    "enable_prefix_caching": False,
    "async_scheduling": False,  # a step is a round
}


def drafter_class(worker) -> str:
    runner = worker.model_runner
    return type(getattr(runner, "drafter", None) or runner.speculator).__name__


def decode(llm: LLM, prompts: list[list[int]], sampling: SamplingParams, cancel: int | None) -> list[dict]:
    """The answers to prompts that are decoded together."""
    engine, answers, step = llm.llm_engine, {}, 0
    for index, prompt in enumerate(prompts):
        answers[str(index)] = {"token_ids": [], "steps": [], "cached": 0}
        engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling)
    if cancel is not None:
        engine.add_request("cancelled", {"prompt_token_ids": prompts[0][::-1]}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens, answer = list(output.outputs[0].token_ids), answers.get(output.request_id)
            if tokens and answer:
                answer["token_ids"] += tokens
                answer["steps"].append(len(tokens))
                answer["cached"] = output.num_cached_tokens or 0
        step += 1
        if step == cancel:
            engine.abort_request(["cancelled"])
    return list(answers.values())


def main(job_file: str, answers_file: str) -> None:
    with open(job_file) as file:
        job = json.load(file)
    register()
    llm, runs = LLM(**SMALL | job["options"]), []
    for run in job["runs"]:
        sampling = SamplingParams(
            temperature=run.get("temperature", 0.0),
            max_tokens=job["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        together, answers = run["together"], []
        for first in range(0, len(job["prompts"]), together):
            answers += decode(llm, job["prompts"][first : first + together], sampling, run.get("cancel"))
        runs.append(answers)
    with open(answers_file, "w") as file:
        json.dump({"drafter": llm.collective_rpc(drafter_class)[0], "runs": runs}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
