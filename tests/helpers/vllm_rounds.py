"""A program for a Python that has vLLM: decodes on a CPU with an exported drafter.

Its arguments are two files. The first is read: a JSON object with `options` of the engine, `prompts` (lists of token ids),
`max_tokens` and `runs`, each with `together`, the requests in flight, and optionally a `temperature` and `cancel`, the
step after which one more request is cancelled. The second is written: for each run the list of the answers, each with its
`token_ids`, how many of the prompt's tokens were `cached`, and `steps`, the number of tokens that each step of the engine
emitted; the first step is the prefill.
"""

import json
import sys

import torch
from vllm import LLM, SamplingParams
from vllm import _custom_ops as ops
from vllm.sampling_params import RequestOutputKind

kernel = ops.rms_norm
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


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    """vLLM's kernel, called once for each row of weights.

    DFlash norms its context keys [layers, tokens, heads, head_dim] with weights [layers, head_dim]. The CPU kernel of
    vLLM 0.32.0 uses the first row for all layers, so that its drafts are not those of the drafter that was trained.
    """
    if weight is None or weight.ndim == 1:
        kernel(out, x, weight, epsilon)
    else:
        for layer, row in enumerate(weight):
            kernel(out[layer], x[layer], row, epsilon)


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
    ops.rms_norm = rms_norm
    llm, runs = LLM(**SMALL | job["options"]), []
    for run in job["runs"]:
        sampling = SamplingParams(
            temperature=run.get("temperature", 0.0),
            seed=0,
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
        json.dump(runs, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
