"""SmolLM2 with the shipped drafter, if it is installed."""

import pytest

import domino_jax
from domino_jax.data.chat import TextCodec
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.method.pair import Pair
from domino_jax.weights.loading import load_target
from tests.helpers.paths import ASSETS


@pytest.mark.slow
def test_the_real_model_answers_in_english(smollm2):
    loaded = load_target(str(smollm2), "float32")
    row = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    models = Pair(loaded.model, loaded.params)
    generator = new_generator(models, DecodeSettings(cache_length=96, max_new_tokens=24), loaded.stop_ids)
    prompt = TextCodec(loaded.tokenizer, False).encode(row, "row")
    [answer] = generator.generate(models, [prompt], "autoregressive").answers
    assert loaded.tokenizer.decode(answer.token_ids) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow(minutes=2)
def test_the_shipped_drafter_changes_no_token_of_the_real_model(smollm2):
    drafter = ASSETS / "smollm2_domino"
    settings = {"dtype": "float32", "cache_length": 256, "max_new_tokens": 48, "head_candidates": 0}
    decoder = domino_jax.load(str(smollm2), str(drafter), width="fixed", **settings)
    asked = ["List three healthy breakfast ideas.", "What is the difference between a lake and a pond?"]
    for temperature in (0.0, 0.7):
        plain, drafted = (
            decoder.generate(asked, mode=mode, temperature=temperature) for mode in ("autoregressive", "domino")
        )
        assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
        lengths = [length for answer in drafted for length in answer.accept_lengths]
        assert max(lengths) > 1 and sum(lengths) / len(lengths) > 1.2
