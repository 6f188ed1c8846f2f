"""A draft vocabulary: drafts are the best of its tokens, a file gives the order, what does not fit is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.decoding.settings import DecodeSettings
from domino_jax.method.drafters import CONFIGS
from domino_jax.method.propose import draft_base, propose, roll_out_head, slot_candidates
from domino_jax.method.rollout import choose_drafts
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.models.quantized import dequantized
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.weights.draft_vocab import choose_tokens, lm_head_of, order_bytes, read_order
from domino_jax.weights.hf import TOKEN_ORDER
from tests.helpers.decoding_models import VOCAB, in_eight_bits, make_generator, random_models, with_tokens

PROMPTS = [[5, 9, 2, 60, 7, 7, 1], [3, 3, 8]]
TOKENS = np.arange(1, VOCAB, 3)
SAMPLINGS = [SamplingParams(), SamplingParams(1.0, top_k=20)]


def drafts_of_few(models, state, sampling, settings):
    """The chain of the whole vocabulary whose base logits are -inf but for TOKENS."""
    z, base, _ = draft_base(models, state)
    base = jnp.where(jnp.isin(jnp.arange(VOCAB), TOKENS), base, -jnp.inf)
    if models.drafter.config.has_head:
        return roll_out_head(models, state, z, base, sampling, settings).tokens
    candidates = slot_candidates(models, state, base, 0, sampling, settings)
    return choose_drafts(candidates, sampling, settings.draft_sharpness).tokens


@pytest.mark.long
@pytest.mark.parametrize("count", [0, 5], ids=["all", "candidates"])
@pytest.mark.parametrize("head", [head for head in CONFIGS if CONFIGS[head].has_backbone])
def test_drafts_are_those_of_logits_without_the_other_tokens(head, count):
    models, settings = random_models(4, head=head), DraftSettings(head_candidates=count, draft_sharpness=1.0)
    state = make_generator(models, batch_size=2).start(PROMPTS, [0, 1])
    for sampling in SAMPLINGS:
        choices = {"sampling": sampling, "settings": settings}
        few = jax.jit(functools.partial(propose, **choices))(with_tokens(models, TOKENS), state)[0]
        assert few.tolist() == jax.jit(functools.partial(drafts_of_few, **choices))(models, state).tolist()
        assert np.isin(few, TOKENS).all()


def test_the_order_comes_from_the_drafters_folder_or_from_a_file_of_answers(tmp_path):
    (tmp_path / TOKEN_ORDER).write_bytes(order_bytes(np.array([7, 200, 3])))
    config = dataclasses.replace(random_models(4).drafter.config, vocab_size=256)
    arguments = {"tokenizer": None, "stop_ids": (90, 300)}  # the embedding has no row 300
    assert choose_tokens(tmp_path, config, DraftSettings(draft_vocab=3), **arguments).tolist() == [7, 90, 200]
    (tmp_path / "rows.jsonl").write_text('{"token_ids": [4, 8, 8, 9], "loss_mask": [0, 1, 1, 1]}')
    counted = DraftSettings(draft_vocab=4, draft_vocab_rows=str(tmp_path / "rows.jsonl"))
    assert choose_tokens(tmp_path / "without", config, counted, **arguments).tolist() == [0, 8, 9, 90]
    with pytest.raises(DataError, match=TOKEN_ORDER):
        read_order(tmp_path, vocab=200)


@pytest.mark.parametrize(
    ("head", "size", "error"),
    [
        ("domino", 32, DataError),  # no frequencies
        ("none", VOCAB + 1, DominoError),  # more than there are
        ("dflash2", 4, DominoError),  # fewer than the selector's candidates
        ("eagle3", 32, DominoError),  # a drafter with a vocabulary
    ],
)
def test_a_size_that_cannot_be_is_refused(head, size, error, tmp_path):
    config, drafting = random_models(4, head=head).drafter.config, DraftSettings(draft_vocab=size, head_candidates=0)
    with pytest.raises(error, match=f"decode.draft_vocab is {size}, but ") as refused:
        choose_tokens(tmp_path, config, drafting, None, ())
    assert type(refused.value) is error and len(str(refused.value).splitlines()) == 1
    if error is DominoError:  # before the training whose final decoding would use it
        with pytest.raises(DominoError, match=f"decode.draft_vocab is {size}, but "):
            DecodeSettings(drafting=drafting).check(VOCAB, config)


@pytest.mark.parametrize("tied", [False, True])
def test_a_drafter_in_eight_bits_reads_a_copy_of_a_floating_lm_head(tied):
    models = random_models(tied=tied)
    z = jax.random.normal(jax.random.key(0), (2, 3, models.target.config.hidden_size))
    rounded = in_eight_bits(models, "drafter")
    copy = rounded.drafter_params["lm_head"]["kernel"]
    np.testing.assert_allclose(rounded.draft_logits(z), z @ dequantized(copy), rtol=1e-5, atol=1e-5)
    exact = lm_head_of(models.target.config, models.target_params)
    assert (abs(dequantized(copy) - exact) < 0.51 * copy["scale"]).all()
    of_int8 = in_eight_bits(in_eight_bits(models, "target"), "drafter")
    assert ("lm_head" in of_int8.drafter_params) == tied  # an embedding is never in eight bits
