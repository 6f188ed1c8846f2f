"""A program for a Python that has vLLM: decodes on a CPU with an exported drafter, one request at a time.

Its arguments are two files. The first is read: a JSON object with `model` and `speculative_config` as vLLM takes them,
`prompts` (lists of token ids) and `max_tokens`. The second is written: a list with the `token_ids` of each answer and
`steps`, the number of tokens that each step of the engine emitted; the first step is the prefill.
"""

import json
import sys

import torch
from vllm import LLM, SamplingParams
from vllm import _custom_ops as ops
from vllm.sampling_params import RequestOutputKind

kernel = ops.rms_norm


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


def answer(llm: LLM, name: str, prompt: list[int], sampling: SamplingParams) -> dict[str, list[int]]:
    engine, pieces = llm.llm_engine, []
    engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        pieces += [list(output.outputs[0].token_ids) for output in engine.step()]
    return {"token_ids": sum(pieces, []), "steps": [len(piece) for piece in pieces if piece]}


def main(job_file: str, answers_file: str) -> None:
    with open(job_file) as file:
        job = json.load(file)
    ops.rms_norm = rms_norm
    llm = LLM(
        job["model"],
        speculative_config=job["speculative_config"],
        dtype="float32",
        max_model_len=256,
        max_num_seqs=1,
        kv_cache_memory_bytes=2**27,
        skip_tokenizer_init=True,
        enforce_eager=True,  # without a C++ compiler
        enable_prefix_caching=False,
        async_scheduling=False,  # a step is a round
    )
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    answers = [answer(llm, str(index), prompt, sampling) for index, prompt in enumerate(job["prompts"])]
    with open(answers_file, "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
