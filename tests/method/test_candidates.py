"""candidates.py: a chain whose head corrects few tokens per slot drafts the best of them and changes no text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method import rollout
from domino_jax.method.propose import draft_base, roll_out_head
from domino_jax.method.sampling import CHUNK, RowSampling, largest
from domino_jax.method.settings import DraftSettings, SamplingParams
from tests.helpers.decoding_models import (
    DRAFTERS,
    VOCAB,
    golden_models,
    make_generator,
    random_models,
    texts,
)
from tests.helpers.models import load_golden

GREEDY, WARM = SamplingParams(), SamplingParams(0.8, top_k=20, top_p=0.9)
MIXED = RowSampling.of([SamplingParams(1.0, min_p=0.05), GREEDY])
PROMPTS = [[5, 9, 2, 60, 7, 7, 1], [3, 3, 8]]
FEW = 4


@functools.lru_cache
def started():
    """One state for all of DRAFTERS: where labels stand and what is corrected changes no weight and no cache."""
    return make_generator(random_models(4), batch_size=2).start(PROMPTS, [0, 1])


def corrected_strongly(kind: str):
    """Models whose head moves the likeliest token out of a few candidates."""
    models = random_models(4, **DRAFTERS[kind])
    head = models.drafter_params["head"]
    strong = {**head, "up": jax.tree.map(lambda kernel: 4 * kernel, head["up"])}
    return models.replace(drafter_params={**models.drafter_params, "head": strong})


def drafted(models, state, sampling, scale):
    """Chains with 0, FEW and too many candidates; with FEW as accelerators draft it; with the base logits but FEW at
    -inf; the base logits."""

    @jax.jit
    def chains(models, state):
        z, base, _ = draft_base(models, state)
        edge = jax.lax.top_k(base, FEW)[0][:, :, -1:]

        def chain(base, count):
            settings = DraftSettings(draft_sharpness=scale, head_candidates=count)
            return roll_out_head(models, state, z, base, sampling, settings).tokens

        masked = chain(jnp.where(base >= edge, base, -jnp.inf), 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollout, "by_platform", lambda chain: chain(True))
            ahead = chain(base, FEW)
        return *(chain(base, count) for count in (0, FEW, VOCAB + 1)), ahead, masked, base

    return chains(models, state)


CASES = [(kind, GREEDY, 1.0) for kind in DRAFTERS]
CASES += [("shifted, prefix 1", sampling, scale) for sampling, scale in ((WARM, 1.0), (WARM, 0.5), (MIXED, 1.0))]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "sampling", "scale"), CASES)
def test_the_draft_is_the_best_of_the_candidates_and_with_all_tokens_the_whole_vocabularys(kind, sampling, scale):
    """Against the rollout over the whole vocabulary, and the same with all other base logits at -inf."""
    whole, few, every, ahead, masked, base = drafted(corrected_strongly(kind), started(), sampling, scale)
    assert every.tolist() == whole.tolist()
    assert few.tolist() == ahead.tolist() == masked.tolist() != whole.tolist()
    likeliest = np.argsort(-np.asarray(base), axis=-1)[:, :, :FEW]
    assert (likeliest == np.asarray(few)[:, :, None]).any(-1).all()


@pytest.mark.long
def test_a_trained_drafter_loses_little_with_a_quarter_of_the_vocabulary():
    """Against the texts and the rounds of the golden file, whose head corrects all tokens."""
    models, rows = golden_models("tied_shift"), load_golden("tied_shift").figures["generate"]
    few = {"head_candidates": models.target.config.vocab_size // 4}
    made = make_generator(models, cache_length=128, max_new_tokens=64, batch_size=4, **few)
    answers = made.generate([row["prompt"] for row in rows], "domino")
    assert texts(answers) == [row["output"] for row in rows]
    rounds = sum(len(answer.accept_lengths) for answer in answers)
    assert rounds < sum(len(row["accept_lengths"]) for row in rows) / 0.95 < 64 * 4 / 1.2


@pytest.mark.parametrize("size", [3 * CHUNK, 9 * CHUNK + 5])
def test_the_largest_are_found_without_a_sort_of_all(size):
    """Few distinct values, so that ties decide, and whole chunks of -inf; three candidates of two rows."""
    values = np.random.default_rng(size).integers(0, 30, (2, 1, size)).astype(np.float32)
    values[0, 0, CHUNK:] = -np.inf
    values[1, 0, : 2 * CHUNK] = -np.inf
    expected = jax.lax.top_k(values, 3)
    for ours, theirs in zip(largest(jnp.asarray(values), 3), expected, strict=True):
        assert ours.tolist() == theirs.tolist()
    none = jnp.full((1, size), -jnp.inf)
    assert largest(none, 3)[1].tolist() == [[0, 1, 2]]
