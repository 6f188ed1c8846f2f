"""sampling.py: the law of the choice, the rule of what is kept, and what the noise depends on."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from domino_jax.method.sampling import RowSampling, choose, position_noise, process_logits, request_keys
from domino_jax.method.settings import SamplingParams
from tests.helpers.decoding_models import chi_square, make_generator, random_models, total_variation, uncached
from tests.helpers.twin import exact_law, kept_tokens

VOCAB, DRAWS = 32, 100_000
LOGITS = np.random.default_rng(0).normal(0, 1.5, VOCAB).astype(np.float32)
# 69.1 is passed by a right sampler once in 10,000 runs at 31 degrees of freedom; total variation stays below 0.008.
CHI_SQUARE, VARIATION = 69.1, 0.010
LAWS = [
    SamplingParams(1.0),
    SamplingParams(0.7),
    SamplingParams(1.3, top_k=9),
    SamplingParams(1.0, top_p=0.8),
    SamplingParams(1.0, min_p=0.05),
    SamplingParams(0.8, top_k=20, top_p=0.9, min_p=0.03),
]


@jax.jit(static_argnames=("params", "requests", "positions"))
def draw(logits, params, requests=1_000, positions=100):
    """DRAWS tokens, one per request and absolute position, all from the same logits."""
    keys = request_keys(7, jnp.arange(requests))
    where = jnp.broadcast_to(jnp.arange(positions), (requests, positions))
    return choose(jnp.broadcast_to(logits, (requests, positions, logits.size)), keys, where, params)


def fits(tokens, law) -> bool:
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=law.size)
    assert counts.sum() == DRAWS
    return chi_square(counts, law) < CHI_SQUARE and total_variation(counts, law) < VARIATION


@pytest.mark.parametrize("params", LAWS, ids=str)
def test_the_choices_follow_the_exact_law(params):
    assert fits(draw(LOGITS, params), exact_law(LOGITS, params))


def test_noise_reused_across_positions_fails_the_law():
    params = SamplingParams(1.0)
    keys = request_keys(7, jnp.arange(1_000))
    tokens = choose(jnp.broadcast_to(LOGITS, (1_000, 1, VOCAB)), keys, jnp.zeros((1_000, 1), jnp.int32), params)
    assert not fits(np.repeat(tokens, 100), exact_law(LOGITS, params))


def test_accepting_a_greedy_draft_at_min_1_p_over_q_fails_the_law():
    """A greedy draft is a point mass; treating it as a sample of q is not lossless."""
    p = exact_law(LOGITS, SamplingParams(1.0))
    q = exact_law(np.random.default_rng(1).normal(0, 1.5, VOCAB), SamplingParams(1.0))
    random = np.random.default_rng(2)
    residual = np.maximum(p - q, 0)
    accepted = random.random(DRAWS) < min(1, p[q.argmax()] / q[q.argmax()])
    tokens = np.where(accepted, q.argmax(), random.choice(VOCAB, DRAWS, p=residual / residual.sum()))
    assert not fits(tokens, p)


def sequence_law(models, prompt, params) -> np.ndarray:
    """p of the second and third new token, [V, V], by one uncached pass over every prefix; the first is summed out."""
    vocab = models.target.config.vocab_size
    logits = uncached(models, [[*prompt, *pair] for pair in itertools.product(range(vocab), repeat=2)])
    logits = logits[:, len(prompt) - 1 :]
    laws = np.array([[exact_law(row, params) for row in rows] for rows in logits]).reshape(vocab, vocab, 3, vocab)
    first, second, third = laws[0, 0, 0], laws[:, 0, 1], laws[:, :, 2]
    return np.einsum("a,ab,abc->bc", first, second, third)


def sample_sequences(models, prompt, params, count, mode="domino"):
    """The second and third new tokens of `count` requests; the loop drafts both in its first round."""
    generator = make_generator(models, cache_length=16, max_new_tokens=3, batch_size=2_000, sampling=params)
    answers = [
        generator.generate([prompt] * 2_000, mode, range(start, start + 2_000)) for start in range(0, count, 2_000)
    ]
    flat = [answer for batch in answers for answer in batch]
    rounds = {tuple(answer.accept_lengths) for answer in flat}
    assert rounds == {(2,), (1, 1)}  # drafts were accepted and rejected, else this would say nothing about the loop
    return np.array([answer.token_ids for answer in flat])


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "params"),
    [
        (6_000, SamplingParams(1.0)),
        pytest.param(200_000, SamplingParams(0.8, top_k=6, top_p=0.9), marks=pytest.mark.slow),
    ],
)
def test_two_tokens_of_the_speculative_loop_follow_their_joint_law(count, params):
    models, prompt = random_models(vocab=8), [3, 1, 4]
    law = sequence_law(models, prompt, params)
    tokens = sample_sequences(models, prompt, params, count)
    counts = np.zeros((8, 8))
    np.add.at(counts, (tokens[:, 1], tokens[:, 2]), 1)
    limit = scipy.stats.chi2.isf(1e-4, 63)
    assert chi_square(counts, law) < limit
    # Two tokens with the right laws but drawn independently must not pass.
    apart = np.zeros((8, 8))
    np.add.at(apart, (tokens[:, 1], np.roll(tokens[:, 2], 1)), 1)
    assert chi_square(apart, law) > limit


def twin_rows() -> np.ndarray:
    """Random rows, rows full of ties, all equal, one token far above, and values at the ends of float32."""
    random = np.random.default_rng(3)
    extreme = random.choice([-1e30, -1e4, 0, 1e4, 1e30], (64, VOCAB))
    rows = [random.normal(0, 3, (64, VOCAB)), random.integers(-2, 3, (64, VOCAB)), np.zeros((1, VOCAB))]
    return np.concatenate([*rows, np.eye(4, VOCAB) * 500, extreme]).astype(np.float32)


TWIN_PARAMS = [
    SamplingParams(t, k, p, m)
    for t, k, p, m in itertools.product((0.5, 1.0), (0, 1, 7, 99), (1.0, 0.91, 0.3), (0.0, 0.13))
]


def test_the_kept_tokens_are_those_of_a_plain_sort():
    rows = twin_rows()
    for params in TWIN_PARAMS:
        kept = np.isfinite(process_logits(rows, params))
        assert (kept == [kept_tokens(row, params) for row in rows]).all(), params


def test_a_pool_of_a_large_vocabulary_is_that_of_a_plain_sort():
    rows, params = np.random.default_rng(4).integers(0, 300, (3, 2, 2000)).astype(np.float32), SamplingParams(1.0, 3)
    edges = np.sort(rows, axis=-1)[..., -3:-2]
    assert (np.isfinite(process_logits(rows, params)) == (rows >= edges)).all()


def test_greedy_takes_the_lowest_id_among_ties_row_by_row():
    logits = jnp.array([[[0.0, 2.0, 2.0, 1.0]], [[0.0, 0.0, 0.0, 0.0]], [[-1.0, -2.0, -3.0, 5.0]]])
    tokens = choose(logits, request_keys(0, jnp.arange(3)), jnp.zeros((3, 1), jnp.int32), SamplingParams())
    assert tokens.tolist() == [[1], [0], [3]]


def test_noise_depends_on_seed_request_and_position_and_on_nothing_else():
    noise = np.asarray(position_noise(request_keys(0, jnp.array([5, 9, 5])), jnp.array([[3, 4], [3, 4], [4, 3]]), 8))
    np.testing.assert_array_equal(noise[0], noise[2, ::-1])
    different = [noise[0, 0], noise[0, 1], noise[1, 0], noise[1, 1]]
    different.append(np.asarray(position_noise(request_keys(1, jnp.array([5])), jnp.array([[3]]), 8))[0, 0])
    for one, two in itertools.combinations(different, 2):
        assert not np.isclose(one, two).any()


def test_values_that_a_device_takes_for_0_or_infinity_leave_a_token():
    rows = [SamplingParams(t, k, p) for t in (1e-46, 1e-39, 1e38) for k, p in ((0, 1.0), (3, 1.0), (0, 0.9))]
    rows += [SamplingParams(1.0, k, 1e-39) for k in (0, 3)]
    logits = jnp.tile(jnp.array([1.0, 5.0, 3.0, 2.0]), (len(rows), 1, 1))
    for params in (*rows, RowSampling.of(rows)):
        assert jnp.isfinite(process_logits(logits, params)).any(-1).all()
    for params in rows[-2:]:
        assert jnp.argmax(process_logits(logits, params), -1).tolist() == [[1]] * len(rows)


def test_no_processing_moves_the_argmax_that_a_greedy_draft_is():
    """Logits with many ties, near 0 and far from it; one setting for all rows, and another for each."""
    random = np.random.default_rng(2)
    rows = [SamplingParams(), SamplingParams(7.0), *LAWS, SamplingParams(0.6, top_k=1, top_p=1e-6, min_p=1.0)]
    for offset in (0.0, -40.0, 1e4):
        logits = jnp.asarray(np.round(random.normal(0, 2, (len(rows), 8, VOCAB)), 1) + offset, jnp.float32)
        expected = np.asarray(logits).argmax(-1)
        for params in (*rows, RowSampling.of(rows)):
            assert (jnp.argmax(process_logits(logits, params), -1) == expected).all()
