"""tree.py: which nodes are drafted, which rows they read, which are accepted, and what is refused.

That the pass over a tree and what it commits give the target's text: tests/decoding/test_lossless.py.
"""

import dataclasses
import functools
import heapq
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.candidates import pick_candidates
from domino_jax.method.propose import draft_base, propose
from domino_jax.method.settings import DraftSettings, SamplingParams, TreeSettings
from domino_jax.method.tree import ROOT, Ledger, ancestor_table, edge_scores, keep_best, log_rest, propose_tree
from domino_jax.method.verify import Tree, accept_tree
from domino_jax.runtime.errors import DominoError
from tests.helpers.decoding_models import DRAFTERS, VOCAB, make_generator, random_models

GREEDY = SamplingParams()
PEAKED = SamplingParams(0.1)  # at which trees of random models are deep as well as broad
PROMPTS = [[5, 9, 2, 60, 7, 7, 1], [3, 3, 8]]
NODES = 13
WHOLE = TreeSettings(nodes=NODES, lanes=NODES - 1, candidates=VOCAB, beta=0.0)  # as many lanes as drafts
PLAIN = DraftSettings(draft_sharpness=math.inf, num_drafts=3, tree=WHOLE)


# With a head whose state is another, and which reads token ids.
KINDS = DRAFTERS | {"Markov, rnn": {"head": "markov", "markov_head_type": "rnn"}}
# With a pass for each draft, and with a head that chooses among a few candidates alone.
KINDS |= {"xPress, shifted": {"head": "xpress", "shift_label": True, "xpress_num_passes": 4}}
KINDS |= {"DFlash2": {"head": "dflash2"}}


@functools.lru_cache
def started():
    """One state for all of KINDS: where labels stand and what is corrected changes no weight and no cache."""
    return make_generator(random_models(4), batch_size=2).start(PROMPTS, [0, 1])


@functools.partial(jax.jit, static_argnames=("sampling", "settings"))
def drafted(models, state, sampling=PEAKED, settings=PLAIN):
    """(the tree, the tree of one lane, the chain, z, base logits): one program, for it costs more than it runs."""
    lane = TreeSettings(nodes=4, lanes=1, candidates=VOCAB)
    one_lane = dataclasses.replace(settings, tree=lane)
    trees = (propose_tree(models, state, sampling, choice)[0] for choice in (settings, one_lane))
    return *trees, propose(models, state, sampling, settings)[0], *draft_base(models, state, settings.num_drafts)[:2]


@functools.lru_cache
def drafted_by(kind: str):
    return drafted(random_models(4, **KINDS[kind]), started())


def check_it_is_the_chain(tree, chain):
    assert tree.tokens[:, 1:].tolist() == chain.tolist()
    assert tree.depths.tolist() == [[0, 1, 2, 3]] * 2
    assert tree.parents.tolist() == [[0, 0, 1, 2]] * 2
    assert (tree.ancestors == np.tril(np.ones((4, 4), bool))).all()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_one_lane_drafts_the_chain(kind):
    check_it_is_the_chain(*drafted_by(kind)[1:3])


@functools.lru_cache
def drafted_warm(use_head: bool):
    """Coupled with noise, top-k and top-p on, few lanes and candidates; with the head or without."""
    tree = TreeSettings(12, 4, 8, -0.2)
    settings = DraftSettings(use_head=use_head, draft_sharpness=0.5, num_drafts=3, tree=tree)
    return drafted(random_models(4), started(), SamplingParams(0.8, top_k=20, top_p=0.9), settings)


@pytest.mark.long
@pytest.mark.parametrize("use_head", [True, False])
def test_one_lane_drafts_the_chain_with_noise_and_without_a_head(use_head):
    check_it_is_the_chain(*drafted_warm(use_head)[1:3])


# ------------------------------------------------------------------------------------------- against a plain heap


@jax.jit
def head_logits(models, z, base, anchor, paths):
    """Corrected logits float32 [P, M, V] at every depth of P paths int32 [P, M]; depth i has consumed i drafts."""
    consumed = jnp.concatenate([jnp.full((paths.shape[0], 1), anchor), paths[:, :-1]], axis=1)
    slots = (consumed.T, models.head.z_terms(z)[: len(base), None])

    def step(state, slot):
        return models.head.step(state, models.head_inputs(slot[0]), slot[1])

    codes = jax.lax.scan(step, models.head.initial_state(len(paths)), slots)[1]
    change = models.head.residual(codes.swapaxes(0, 1))
    config = models.drafter.config
    corrected = jnp.arange(len(base))[:, None] >= config.pure_draft_prefix_len
    edge = jnp.sort(base)[:, -(config.only_candidates or VOCAB), None]
    return jnp.where(base >= edge, base, -jnp.inf) + jnp.where(corrected, change, 0.0)


def best_first(models, z, base, anchor: int, nodes: int) -> set[tuple[int, ...]]:
    """The nodes - 1 likeliest paths: a plain heap over log-probabilities, the whole vocabulary at each node."""
    depths = base.shape[0]
    queue, kept = [(0.0, ())], []
    while len(kept) < nodes:
        score, path = heapq.heappop(queue)
        kept.append(path)
        if len(path) == depths:
            continue
        padded = jnp.array([[*path, *[0] * (depths - len(path))]])
        logits = head_logits(models, z, base, jnp.int32(anchor), padded)[0, len(path)]
        log_q = np.asarray(jax.nn.log_softmax(logits / PEAKED.temperature))
        for token in range(VOCAB):
            heapq.heappush(queue, (score - float(log_q[token]), (*path, token)))
    return set(kept[1:])


def paths_of(tree, row: int) -> list[tuple[int, ...]]:
    """Tokens from the root to each node."""
    found = [()]
    for token, parent in zip(tree.tokens[row, 1:].tolist(), tree.parents[row, 1:].tolist(), strict=True):
        found.append((*found[parent], token))
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_with_as_many_lanes_as_drafts_the_tree_is_the_best_first_one(kind):
    models, state = random_models(4, **KINDS[kind]), started()
    tree, _, _, z, base = drafted_by(kind)
    for row in range(2):
        expected = best_first(models, z[row], base[row], int(state.anchors[row]), NODES)
        assert set(paths_of(tree, row)[1:]) == expected and max(map(len, expected)) >= 2
        assert tree.depths[row].tolist() == [len(path) for path in paths_of(tree, row)]


# ------------------------------------------------------------------------------------------------ scores and budget


def test_scores_are_log_probabilities_over_the_vocabulary_though_only_candidates_are_scored():
    """Without the rest the candidates' probabilities would add up to 1."""
    base = jnp.array(np.random.default_rng(0).normal(0, 2, (1, 3, VOCAB)), jnp.float32)
    few = pick_candidates(base, 4)
    rest = log_rest(base, few.logits)
    scores = edge_scores(few.logits[:, 1, None], rest[:, 1, None, None], None, GREEDY, DraftSettings())
    expected = jax.nn.log_softmax(base[0, 1])[few.vocab_ids[0, 1]]
    np.testing.assert_allclose(scores[0, 0], expected, atol=1e-5)
    assert few.vocab_ids[0, 1].tolist() == np.argsort(-np.asarray(base[0, 1]), kind="stable")[:4].tolist()


kept_best = functools.partial(jax.jit, static_argnames=("lanes", "nodes", "beta"))(keep_best)


def ledger(scores, parents, tokens=None) -> Ledger:
    tokens = range(10, 10 + len(scores)) if tokens is None else tokens
    return Ledger(jnp.array([tokens]), jnp.array([parents]), jnp.array([scores], jnp.float32))


def test_places_that_no_path_fills_hold_the_anchor_at_depth_0():
    book = ledger([-1.0, -jnp.inf, -2.0, -jnp.inf], [ROOT, ROOT, 0, 0])
    tree = kept_best(jnp.array([7]), book, lanes=2, nodes=5, beta=-0.1)
    assert tree.tokens.tolist() == [[7, 10, 7, 12, 7]]
    assert tree.depths.tolist() == [[0, 1, 0, 2, 0]]
    assert tree.parents.tolist() == [[0, 0, 0, 1, 0]]


# ------------------------------------------------------------------------------------------------------- ancestors


def brute_ancestors(parents: list[int]) -> np.ndarray:
    table = np.eye(len(parents), dtype=bool)
    for node in range(len(parents)):
        above = node
        while above:
            above = parents[above]
            table[node, above] = True
    return table


def test_the_ancestor_table_is_what_walking_up_gives():
    draw = np.random.default_rng(0)
    parents = np.array([[0] + [int(draw.integers(0, node)) for node in range(1, 64)] for _ in range(4)])
    parents[0] = [0, *range(63)]
    table = np.asarray(jax.jit(ancestor_table, static_argnums=1)(jnp.array(parents), 63))
    assert all((table[row] == brute_ancestors(parents[row].tolist())).all() for row in range(4))


# ------------------------------------------------------------------------------------------------------ acceptance


def accepted_along(tokens, parents, chosen):
    """By a walk down the tree."""
    node, path = 0, [0]
    while True:
        down = [
            child
            for child in range(1, len(tokens))
            if parents[child] == node and tokens[child] == chosen[node] and child not in path
        ]
        if not down:
            return path
        [node] = down
        path.append(node)


def test_random_choices_walk_random_trees_alike():
    draw = np.random.default_rng(1)
    accept = jax.jit(accept_tree, static_argnums=2)
    lengths = []
    for _ in range(100):
        parents, depths, tokens, children = [0], [0], [0], {}
        for node in range(1, 16):
            parent = int(draw.integers(0, node))
            parents.append(parent)
            depths.append(depths[parent] + 1)
            tokens.append(children.get(parent, 0))  # siblings differ
            children[parent] = tokens[-1] + 1
        chosen = draw.integers(0, 3, 16)
        tree = Tree(*(np.array([column]) for column in (tokens, depths, parents, brute_ancestors(parents))))
        accepted, path = accept(tree, chosen[None], 15)
        expected = accepted_along(tokens, parents, chosen)
        assert path[0, : accepted[0] + 1].tolist() == expected
        lengths.append(len(expected))
    assert min(lengths) == 1 and max(lengths) >= 4


# -------------------------------------------------------------------------------------------------------- refusals

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


def test_the_largest_tree_that_fits_is_accepted_but_for_fixed_shape_parity():
    tree = TreeSettings(nodes=17, lanes=4, candidates=4, beta=0.0)
    make_generator(random_models(4), tree=tree, cache_length=34, max_new_tokens=16)
    with pytest.raises(DominoError, match="it is a promise for chains"):
        make_generator(random_models(4), tree=tree, parity="fixed_shape")


def test_the_caches_slack_follows_the_tree():
    models = random_models(4)
    assert make_generator(models).limits.block_rows == 5
    made = make_generator(models, tree=TreeSettings(nodes=32))
    assert made.limits.block_rows == 32
    with pytest.raises(DominoError, match="needs 65 cache rows .17 prompt . 16 new . 32 block."):
        made.generate([[1] * 17], "tree")
