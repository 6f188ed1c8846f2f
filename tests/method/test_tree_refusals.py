"""tree.py: trees that cannot be are refused before anything runs; those that may be are not."""

import pytest

from domino_jax.method.settings import TreeSettings
from domino_jax.runtime.errors import DominoError
from tests.helpers.decoding_models import VOCAB, make_generator, random_models

BAD = [
    ({"nodes": 1}, "decode.tree.nodes is 1: give 2 or more"),
    ({"lanes": 0}, "decode.tree.lanes is 0: give 1"),
    ({"candidates": 65}, "decode.tree.candidates is 65, but the vocabulary has 64"),
    ({"lanes": 9, "candidates": 8}, "decode.tree.lanes is 9: depth 1 has only 8"),
    ({"nodes": 18, "lanes": 4}, "decode.tree.nodes is 18, but 4 lanes of 4 drafts and the anchor are 17"),
    ({"depth": 5}, "decode.tree.depth is 5, but this drafter makes at most 4 drafts"),
    ({"beta": 0.1}, "decode.tree.beta is 0.1"),
    ({"beta": float("-inf")}, "decode.tree.beta is -inf"),
    ({"nodes": 48}, "decode.cache_length is 64: it holds the prompt, max_new_tokens 16 and the 48 nodes"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[next(iter(bad)) for bad, _ in BAD])
def test_a_tree_that_cannot_be_is_refused_with_a_sentence(bad, message):
    with pytest.raises(DominoError, match=message):
        make_generator(random_models(4), tree=TreeSettings(**{"nodes": 16, **bad}))


def test_the_largest_tree_that_fits_is_accepted():
    tree = TreeSettings(nodes=17, lanes=4, candidates=4, beta=0.0)
    make_generator(random_models(4), tree=tree, cache_length=34, max_new_tokens=16)


def test_fixed_shape_parity_is_refused_for_a_tree():
    with pytest.raises(DominoError, match="it is a promise for chains"):
        make_generator(random_models(4), tree=TreeSettings(nodes=16), parity="fixed_shape")


def test_the_caches_slack_follows_the_tree():
    models = random_models(4)
    assert make_generator(models).limits.block_rows == 5
    made = make_generator(models, tree=TreeSettings(nodes=32))
    assert made.limits.block_rows == 32
    with pytest.raises(DominoError, match="needs 65 cache rows .17 prompt . 16 new . 32 block."):
        made.generate([[1] * 17], "tree")


def test_beside_a_shallower_tree_there_is_room_for_the_chain():
    shallow = TreeSettings(nodes=2, lanes=1, candidates=VOCAB, depth=1)
    assert make_generator(random_models(4), tree=shallow).limits.block_rows == 5  # the chain's anchor and 4 drafts
