"""A program for a Python that has vLLM: it prints what the plug-in's speculator gives to the engine's estimator.

The engine wants full CUDA graphs for it, so a drafter's methods are called without an engine. Prints JSON: how sure the
estimator is of each draft, and the highest probability of the corrected logits, by request and draft.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
from triton.backends import Backend, backends

backends["cpu"] = Backend(compiler=None, driver=None)

import torch  # noqa: E402
from domino_vllm import engine  # noqa: E402
from domino_vllm.head import Head  # noqa: E402
from domino_vllm.proposer import DominoSpeculator  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator  # noqa: E402

REQUESTS, DRAFTS, WIDTH, VOCAB = 2, 3, 8, 50


class Model:
    """Its head is the plug-in's, with random tensors; backbone and lm_head are tables."""

    def __init__(self):
        torch.manual_seed(0)
        self.table, self.head = torch.randn(VOCAB, WIDTH), Head(WIDTH, 8, 4, VOCAB, 1, 16)
        for leaf in self.head.parameters():
            torch.nn.init.normal_(leaf)

    def roll_out(self, z, anchors, keep_logits=False):
        return self.head(z @ self.table.T, z, anchors, lambda tokens: self.table[tokens], keep_logits)


def main() -> None:
    engine.check()
    drafter = object.__new__(DominoSpeculator)
    drafter.model, hidden = Model(), torch.randn(REQUESTS * DRAFTS, WIDTH)
    drafter.num_speculative_steps = drafter.num_query_per_req = DRAFTS
    drafter._run_model = lambda tokens, *arguments, **named: hidden
    rows = torch.arange(REQUESTS * DRAFTS)
    drafter.sample_indices, drafter.sample_idx_mapping = rows, rows // DRAFTS
    drafter.sample_col = (rows % DRAFTS).to(torch.int32)
    drafter.input_buffers = type("Buffers", (), {"input_ids": rows})
    drafter.temperature = torch.zeros(REQUESTS)
    drafter.draft_tokens = torch.zeros(REQUESTS, DRAFTS, dtype=torch.int64)
    drafter.draft_token_confidence_probs = torch.full((REQUESTS, DRAFTS), -1.0)
    drafter.acceptance_estimator = None
    drafter._generate_draft(REQUESTS, REQUESTS * DRAFTS)
    without = drafter.draft_tokens.tolist()
    drafter.acceptance_estimator = OnlineAcceptanceEstimator(REQUESTS, DRAFTS, torch.device("cpu"))
    drafter._generate_draft(REQUESTS, REQUESTS * DRAFTS)
    assert drafter.draft_tokens.tolist() == without
    logits = drafter.model.roll_out(hidden.unflatten(0, (REQUESTS, DRAFTS)), rows[::DRAFTS], True)[1]
    best = torch.stack(logits, dim=1).softmax(-1).amax(-1)
    print(json.dumps({"sure": drafter.draft_token_confidence_probs.tolist(), "best": best.tolist()}))


if __name__ == "__main__":
    main()
