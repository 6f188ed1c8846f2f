"""What trees of other shapes would have accepted of the same texts.

A text does not depend on how it was drafted. So one pass over it gives, for every place where a round could begin, all
nodes that lanes would pass through; sorting them gives those that a tree of some size and beta keeps.
Letters: R places, M depths, W lanes.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.decoding.generate import Generation, Generator
from domino_jax.method.kinds import AnyConfig
from domino_jax.method.loop import DecodeState
from domino_jax.method.pair import Models
from domino_jax.method.settings import TREE, TreeSettings
from domino_jax.method.tree import ROOT, Ledger, draft_ledger
from domino_jax.runtime.errors import DominoError


@dataclasses.dataclass(frozen=True)
class Recording:
    """One answer, and what would be drafted after each of its tokens.

    answer: token ids.  ledger: arrays [R, M·W], row r drafted after answer[r]; R is one less than the answer's length.
    """

    answer: Sequence[int]
    ledger: Ledger
    lanes: int


def unrecorded(drafter: AnyConfig) -> str | None:
    """Why `record` cannot be used for this drafter; None where it can."""
    if drafter.has_backbone:
        return None
    return f"trees are compared at every place of an answer, and {drafter.head} keeps the state of its end alone"


def record(
    models: Models, generator: Generator, prompts: Sequence[Sequence[int]], answers: Sequence[Generation]
) -> list[Recording]:
    """For each prompt its answer with the ledgers that the generator's trees are chosen from, for any nodes and beta.

    Args:
        generator: with a tree; its prompts are requests 0, 1, … as in `Generator.generate`.
        answers: to these prompts, by any mode.

    Raises:
        DominoError: a drafter whose cache does not hold the earlier places (`unrecorded`).
    """
    if problem := unrecorded(models.drafter.config):
        raise DominoError(f"{problem}.")
    settings = generator.drafting(TREE)

    @jax.jit
    def ledgers(models: Models, state: DecodeState, starts: jax.Array, anchors: jax.Array) -> Ledger:
        def at(place):
            # Cache rows from `start` on belong to later tokens; they are past the length and never read.
            start, anchor = place
            here = state.replace(lengths=start[None], anchors=anchor[None])
            return draft_ledger(models, here, state.sampling or generator.settings.sampling, settings)[0]

        ledger = jax.lax.map(at, (starts, anchors))
        return jax.tree.map(lambda column: column[:, 0], ledger)

    recorded = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens = list(answer.token_ids)
        state = generator.start(models, [[*prompt, *tokens[:-1]]], [index], rows=1)
        # The same number of places for every answer, so that one program serves all; those after the end are dropped.
        places = np.minimum(np.arange(generator.settings.max_new_tokens), max(len(tokens) - 2, 0))
        anchors = np.asarray(tokens, np.int32)[places]
        ledger = jax.device_get(ledgers(models, state, jnp.asarray(len(prompt) + places), anchors))
        recorded.append(
            Recording(tokens, Ledger(*(column[: len(tokens) - 1] for column in ledger)), settings.tree.lanes)
        )
    return recorded


def replay(recording: Recording, tree: TreeSettings) -> list[int]:
    """Tokens emitted per round (accept_lengths of a Generation) with trees of this many nodes and this beta."""
    accepted = _accepted(recording, tree)
    emitted, place = [], 0
    while place < len(accepted):
        emitted.append(min(int(accepted[place]) + 1, len(accepted) - place))
        place += emitted[-1]
    return emitted


def replayed_tau(recordings: Sequence[Recording], tree: TreeSettings) -> float:
    """tau pooled over all rounds of all answers; 0 without rounds."""
    rounds = [emitted for recording in recordings for emitted in replay(recording, tree)]
    return sum(rounds) / len(rounds) if rounds else 0.0


def _accepted(recording: Recording, tree: TreeSettings) -> list[int]:
    """Drafts int [R] that each place's tree would have accepted: the deepest of its nodes on the answer's path."""
    tokens, parents, scores = recording.ledger
    depths = np.arange(tokens.shape[1]) // recording.lanes + 1
    keys = scores + np.float32(tree.beta) * depths.astype(np.float32)
    # As tree.keep_best: the best nodes, ties to the earlier one, and only real paths.
    best = np.argsort(-keys, axis=1, kind="stable")[:, : tree.nodes - 1]
    chosen = np.zeros(keys.shape, bool)
    np.put_along_axis(chosen, best, np.isfinite(np.take_along_axis(keys, best, axis=1)), axis=1)
    accepted = []
    for place in range(len(tokens)):
        node, depth = ROOT, 0
        for token in recording.answer[place + 1 :]:
            level = slice(depth * recording.lanes, (depth + 1) * recording.lanes)
            here = chosen[place, level] & (parents[place, level] == node) & (tokens[place, level] == token)
            if not here.any():
                break
            node, depth = level.start + int(here.argmax()), depth + 1
        accepted.append(depth)
    return accepted
