"""benchmarks/against_transformers.py: its torch yardstick says what we say, and its ratios; skipped without torch."""

import pytest

from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import read_prompts
from domino_jax.weights import loading
from tests.helpers.decoding_models import make_generator
from tests.helpers.paths import ASSETS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TARGET, DRAFTER = str(ASSETS / "tiny_qwen3"), str(ASSETS / "tiny_domino")


def test_all_four_loops_give_the_same_tokens_and_both_domino_loops_the_same_rounds():
    from benchmarks import torch_domino

    loaded = loading.load_target(TARGET, "float32")
    models = loading.load_models(loaded, DRAFTER)
    rows = read_prompts(f"{TARGET}/prompts_heldout.jsonl", 2)
    prompts = [encode_prompt(loaded.tokenizer, row, False) for row in rows]
    generator = make_generator(models, stop_ids=loaded.stop_ids, cache_slots=192, max_new_tokens=24)
    target = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    drafter = torch_domino.TorchDrafter(DRAFTER)
    plain, domino = (generator.generate(prompts, mode) for mode in ("autoregressive", "domino"))
    for prompt, ours, ours_domino in zip(prompts, plain, domino, strict=True):
        theirs = torch_domino.plain_generate(target, prompt, 24, loaded.stop_ids)
        tokens, accepts = torch_domino.domino_generate(target, drafter, prompt, 24, loaded.stop_ids)
        assert theirs == tokens == ours.token_ids == ours_domino.token_ids
        assert accepts == ours_domino.accept_lengths


def test_a_ratio_is_of_the_same_repetition_and_their_median_is_given():
    from benchmarks.against_transformers import Measured

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
