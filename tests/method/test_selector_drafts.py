"""DFlash2's selector when drafting: it chooses among its own candidates, in chains and trees."""

import functools

import jax
import numpy as np
import pytest

from domino_jax.method.propose import draft_base, propose
from domino_jax.method.settings import DraftSettings, SamplingParams, TreeSettings
from domino_jax.method.tree import propose_tree, roll_out_lanes
from tests.helpers.decoding_models import make_generator, random_models

GREEDY, WARM = SamplingParams(), SamplingParams(0.8, top_k=20, top_p=0.9)
PROMPTS = [[5, 9, 2, 60, 7, 7, 1], [3, 3, 8]]
TRANSFORMS = {"output_multiplier": 1.5, "final_logit_softcapping": 2.0}
K = 5
TREE = TreeSettings(nodes=9, lanes=4, candidates=16, beta=-0.1)


@functools.lru_cache
def started(**changes):
    models = random_models(5, head="dflash2", **changes)
    return models, make_generator(models, batch_size=2).start(PROMPTS, [0, 1])


@functools.partial(jax.jit, static_argnames=("sampling", "settings"))
def drafted(models, state, sampling=GREEDY, settings=DraftSettings(draft_sharpness=1.0)):  # noqa: B008
    return *draft_base(models, state)[:2], propose(models, state, sampling, settings)[0]


def scores_of(models, unary, z, previous):
    """(candidates int [K], their scores) of one slot after the token `previous`, in numpy."""
    head = models.drafter_params["head"]
    likeliest = np.argsort(-unary)[:K]
    code = np.asarray(head["predecessor"]["embedding"])[previous] * (
        z @ np.asarray(head["hidden_projection"]["kernel"])
    )
    return likeliest, unary[likeliest] + code @ np.asarray(head["up"]["kernel"])[:, likeliest]


@pytest.mark.parametrize("changes", [{}, TRANSFORMS], ids=["plain", "transformed"])
def test_each_draft_is_the_best_candidate_after_the_one_before_it(changes):
    models, state = started(**changes)
    z, base, drafts = (np.asarray(part) for part in drafted(models, state))
    for row, token in enumerate(state.anchors.tolist()):
        for slot in range(4):
            ids, scores = scores_of(models, base[row, slot], z[row, slot], token)
            token = ids[scores.argmax()]
            assert drafts[row, slot] == token
    assert (drafts != base.argmax(-1)).any()


def test_logits_are_transformed_before_they_are_compared():
    (models, state), (plain, same) = started(**TRANSFORMS), started()
    base, untouched = drafted(models, state)[1], drafted(plain, same)[1]
    np.testing.assert_allclose(base, 2.0 * np.tanh(1.5 * np.asarray(untouched) / 2.0), atol=1e-5)
    assert abs(untouched).max() > 2.0


@pytest.mark.long
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "coupled"])
def test_a_tree_of_one_lane_is_the_chain(sampling):
    models, state = started()
    settings = DraftSettings(draft_sharpness=1.0, tree=TreeSettings(nodes=5, lanes=1, candidates=1, beta=0.0))
    tree, _ = jax.jit(lambda models, state: propose_tree(models, state, sampling, settings))(models, state)
    assert tree.tokens[:, 1:].tolist() == drafted(models, state, sampling)[2].tolist()


def test_a_tree_scores_paths_by_the_softmax_over_the_candidates():
    """Against numpy along the best lane; tokens that are no candidates have no probability."""
    models, state = started()
    settings = DraftSettings(tree=TREE)
    z, base, _ = drafted(models, state)
    ledger = jax.jit(lambda *drafted: roll_out_lanes(*drafted, GREEDY, settings))(models, state, z, base)
    z, base = np.asarray(z), np.asarray(base)
    tokens, parents, scores = (np.asarray(part) for part in ledger)
    for row in range(2):
        for node in range(tokens.shape[1]):
            path, at = [], node
            while at >= 0:
                path.insert(0, at)
                at = parents[row, at]
            total, previous = 0.0, int(state.anchors[row])
            for depth, place in enumerate(path):
                ids, found = scores_of(models, base[row, depth], z[row, depth], previous)
                previous = tokens[row, place]
                log_law = found - np.log(np.exp(found).sum())
                total += log_law[ids.tolist().index(previous)] if previous in ids else -np.inf
            np.testing.assert_allclose(scores[row, node], total, atol=1e-4)
