"""benchmarks/peers/transformers.py: its torch yardstick emits golden tokens; its ratios. Skipped without torch."""

import pytest

from tests.helpers.models import GOLDEN, load_golden

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PAIR, NEW = "tied_shift", 24


def test_all_torch_loops_give_the_golden_tokens_and_the_domino_loop_the_golden_rounds():
    from benchmarks.peers import torch_domino

    torch.set_num_threads(1)  # more would wait for each other on a busy machine
    target = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / PAIR / "target", dtype=torch.float32).eval()
    drafter = torch_domino.TorchDrafter(str(GOLDEN / PAIR / "drafter"))
    for case in load_golden(PAIR).figures["generate"][1:4:2]:
        theirs = torch_domino.plain_generate(target, case["prompt"], NEW, (257,))
        tokens, accepts = torch_domino.domino_generate(target, drafter, case["prompt"], NEW, (257,))
        looked_up = torch_domino.plain_generate(target, case["prompt"], NEW, (257,), lookup=3)
        assert theirs == looked_up == tokens == case["output"][:NEW]
        *whole, last = accepts  # the last round is cut to what was asked for
        assert whole == case["accept_lengths"][: len(whole)] and last <= case["accept_lengths"][len(whole)]
        assert max(accepts) > 2


def test_a_ratio_is_of_the_same_repetition_and_their_median_is_given():
    from benchmarks.peers.transformers import Measured

    measured = Measured(
        seconds={"a": [2.0, 4.0, 9.0], "b": [1.0, 4.0, 3.0]},
        cpu_seconds={"a": [1.0, 1.0, 1.0], "b": [2.0, 4.0, 2.0]},
        tokens={},
        accepts={"b": [[3, 1], [], [5]]},
        first={},
    )
    assert measured.ratio("b", "a") == (2.0, 1.0, 3.0)
    assert measured.cpu_ratio("b", "a") == 0.5
    assert measured.tau("b") == 3.0
