"""A draft that is a tree: the likeliest continuations under the head, several at each depth, verified in one pass.

The backbone runs once, and the head follows several paths (lanes) at a time over a few candidates per depth. A chain is
the tree of one lane. Without a head every path has the same distribution at a depth, the backbone's.

Letters: B rows, M depths, W lanes, Q candidates per depth, V vocabulary, E rank of the head, T nodes, the root (the
anchor) included. A ledger holds all M·W nodes that lanes passed through; a tree keeps T-1 of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from domino_jax.method.candidates import Candidates
from domino_jax.method.loop import DecodeState
from domino_jax.method.pair import Pair
from domino_jax.method.propose import draft_base, read_prefix, slot_candidates
from domino_jax.method.rollout import scan_drafts
from domino_jax.method.sampling import Sampling, divisor_of, process_logits
from domino_jax.method.settings import DraftSettings
from domino_jax.method.verify import Tree
from domino_jax.models.cache import Cache
from domino_jax.models.shapes import Hidden, Logits

ROOT = -1  # as the parent of a ledger's node


class Ledger(NamedTuple):
    """All nodes that lanes passed through, depth by depth: node d·W + w is lane w at depth d+1.

    tokens, parents int32 [B, M·W]: a parent is a place in the ledger or ROOT.  scores float32 [B, M·W]: log-probability
    of the path to the node, -inf where there is none.
    """

    tokens: jax.Array
    parents: jax.Array
    scores: jax.Array


def propose_tree(models: Pair, state: DecodeState, sampling: Sampling, settings: DraftSettings) -> tuple[Tree, Cache]:
    """The draft of one round, and the draft cache with the backbone's block after the committed length."""
    tree = settings.tree
    z, base, cache = draft_base(models, state, settings.width(models.drafter.config))
    ledger = roll_out_lanes(models, state, z, base, sampling, settings)
    return keep_best(state.anchors, ledger, tree.lanes, tree.nodes, tree.beta), cache


def roll_out_lanes(
    models: Pair, state: DecodeState, z: Hidden, base: Logits, sampling: Sampling, settings: DraftSettings
) -> Ledger:
    """The counterpart of roll_out_head: from z [B, T, D] and base logits float32 [B, M, V] the nodes to choose from."""
    config = models.drafter.config
    only = config.only_candidates if settings.use_head else 0
    candidates = slot_candidates(models, state, base, only or settings.tree.candidates, sampling, settings)
    divisor = divisor_of(sampling)
    candidates = candidates._replace(logits=candidates.logits / divisor)
    rest = log_rest(base / divisor, candidates.logits)
    if only:
        rest = jnp.full_like(rest, -jnp.inf)  # a selector gives the other tokens no probability
    return grow_lanes(models, read_prefix(models, state), z, candidates, rest, sampling, settings)


def log_rest(base: Logits, candidates: jax.Array) -> jax.Array:
    """The log-sum-exp float32 [B, M] of the logits [B, M, V] that are not among the candidates' [B, M, Q]."""
    total = jax.nn.logsumexp(base, axis=-1)
    # The share of the candidates may round to all of the mass or more.
    inside = jnp.minimum(jax.nn.logsumexp(candidates, axis=-1) - total, -1e-7)
    return total + jnp.log1p(-jnp.exp(inside))


def grow_lanes(
    models: Pair,
    prefix_tokens: jax.Array,
    z: jax.Array,
    candidates: Candidates,
    rest: jax.Array,
    sampling: Sampling,
    settings: DraftSettings,
) -> Ledger:
    """Follows the W likeliest paths depth by depth, each with a separate state of the head.

    Args:
        prefix_tokens, z: as for roll_out.
        candidates: of each depth, logits divided by `divisor_of`, and the target's noise where the draft shares it.
        rest: log_rest of the other logits, float32 [B, M].
    """
    (batch, depths, count), lanes = candidates.token_ids.shape, settings.tree.lanes
    per_depth = {**candidates._asdict(), "rest": rest}
    state = ()
    if settings.use_head:
        z_terms, extra = models.head.z_terms(z), prefix_tokens.shape[1] - 1
        per_depth["terms"] = z_terms[:, extra : extra + depths]
        per_depth["rows"] = models.head.rows(candidates.vocab_ids)
        state = models.head.initial_state(batch, lanes)
        for index in range(extra):
            tokens = jnp.broadcast_to(prefix_tokens[:, index, None], (batch, lanes))
            state, _ = models.head.step(state, models.head_inputs(tokens), z_terms[:, index, None])

    def deepen(carry, at):
        scores, slots, tokens, state = carry
        depth, here = at
        logits = here["logits"][:, None]  # [B, 1 or W, Q]
        if settings.use_head:
            state, code = models.head.step(state, models.head_inputs(tokens), here["terms"][:, None])
            change = models.head.residual_of(code, here["rows"])
            prefix = models.drafter.config.pure_draft_prefix_len
            logits = logits + jnp.where(depth >= prefix, change / divisor_of(sampling), 0.0)
        shared = None if here["noise"] is None else here["noise"][:, None]
        edges = edge_scores(logits, here["rest"][:, None, None], shared, sampling, settings)
        scores, best = jax.lax.top_k((scores[:, :, None] + edges).reshape(batch, -1), lanes)
        lane, place = best // count, best % count
        tokens = jnp.take_along_axis(here["token_ids"], place, axis=1)
        level = Ledger(tokens, jnp.take_along_axis(slots, lane, axis=1), scores)
        slots = jnp.broadcast_to(depth * lanes + jnp.arange(lanes), (batch, lanes))
        state = jax.tree.map(lambda x: jnp.take_along_axis(x, jnp.expand_dims(lane, range(2, x.ndim)), axis=1), state)
        return (scores, slots, tokens, state), level

    scores = jnp.full((batch, lanes), -jnp.inf).at[:, 0].set(0.0)
    slots = jnp.full((batch, lanes), ROOT)
    tokens = jnp.broadcast_to(prefix_tokens[:, -1:], (batch, lanes))
    by_depth = jax.tree.map(lambda column: column.swapaxes(0, 1), per_depth)
    _, levels = scan_drafts(deepen, (scores, slots, tokens, state), (jnp.arange(depths), by_depth))
    return Ledger(*(level.swapaxes(0, 1).reshape(batch, -1) for level in levels))


def edge_scores(
    logits: jax.Array, rest: jax.Array, noise: jax.Array | None, sampling: Sampling, settings: DraftSettings
) -> jax.Array:
    """The log-probability of each candidate [B, W, Q] to be the target's choice, at most 0.

    Args:
        logits: the candidates', divided by `divisor_of`.  rest: log_rest of the other tokens, [B, 1, 1]; the head's
            correction of it is taken as 0. Left out, a path through a flat distribution would score too high.
        noise: the target's at this depth [B, 1, Q], or None for a draft that shares none.

    The edges of top-k, top-p and min-p are the target's.
    """
    if not sampling.kind.greedy:
        inside = jnp.isfinite(process_logits(logits * divisor_of(sampling), sampling))
        logits = jnp.where(inside, logits, -jnp.inf)
        rest = jnp.where(inside.all(-1, keepdims=True), rest, -jnp.inf)
    total = jnp.logaddexp(jax.nn.logsumexp(logits, axis=-1, keepdims=True), rest)
    log_q = jnp.minimum(logits - total, 0.0)
    if noise is None:
        return log_q
    # The order of siblings is that of c·log q + g; divided by c, paths are as far apart as those of a greedy draft.
    drawn = jax.nn.log_softmax(log_q + noise / settings.draft_sharpness, axis=-1)
    return jnp.where(sampling.columns()[0] > 0, jnp.minimum(drawn, 0.0), log_q)


def keep_best(anchors: jax.Array, ledger: Ledger, lanes: int, nodes: int, beta: float) -> Tree:
    """The anchor and the nodes - 1 best of the ledger by score + beta · depth, in the ledger's order.

    Neither term rises along a path, and ties go to the earlier node, so a node's parent is kept with it.
    """
    size = ledger.tokens.shape[1]
    depths = jnp.arange(size) // lanes + 1
    keys, chosen = jax.lax.top_k(ledger.scores + beta * depths, nodes - 1)
    order = jnp.argsort(chosen, axis=1)
    chosen = jnp.take_along_axis(chosen, order, axis=1)
    filled = jnp.isfinite(jnp.take_along_axis(keys, order, axis=1))
    member = (chosen[:, :, None] == jnp.arange(size)).any(axis=1)
    numbers = jnp.cumsum(member, axis=1)  # of the ledger's nodes in the tree, from 1
    parents = jnp.take_along_axis(ledger.parents, chosen, axis=1)
    parents = jnp.where(parents == ROOT, 0, jnp.take_along_axis(numbers, jnp.maximum(parents, 0), axis=1))
    drafts = jnp.where(filled, jnp.take_along_axis(ledger.tokens, chosen, axis=1), anchors[:, None])

    def with_root(column: jax.Array) -> jax.Array:
        return jnp.pad(jnp.where(filled, column, 0), ((0, 0), (1, 0)))

    parents = with_root(parents)
    tokens = jnp.concatenate([anchors[:, None], drafts], axis=1)
    return Tree(tokens, with_root(depths[chosen]), parents, ancestor_table(parents, size // lanes))


def ancestor_table(parents: jax.Array, deepest: int) -> jax.Array:
    """bool [B, T, T] from parents int32 [B, T]; row i is true at i and at every node above it.

    Squaring the table of "itself or its parent" doubles the number of steps up that it knows.

    >>> parents 0 0 0 1  →  1 0 0 0
                            1 1 0 0
                            1 0 1 0
                            1 1 0 1
    """
    index = jnp.arange(parents.shape[1])
    table = (parents[:, :, None] == index) | (index[:, None] == index)
    for _ in range(deepest.bit_length()):
        steps = table.astype(jnp.float32)
        table = jnp.einsum("btu,bus->bts", steps, steps) > 0.5
    return table
