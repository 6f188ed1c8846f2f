"""Where a round's time goes: its parts in separate timed loops, and the whole round."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.decoding.generate import Clock, Generator, new_generator
from domino_jax.decoding.settings import BACKBONE, BASELINE, DOMINO, DRAFT, DecodeSettings
from domino_jax.method.loop import DecodeState, emit, record_round
from domino_jax.method.pair import Pair, TargetRows
from domino_jax.method.propose import draft_base, draft_positions, propose, roll_out_head
from domino_jax.method.sampling import Sampling, choose
from domino_jax.method.settings import DraftSettings
from domino_jax.method.verify import accept_chain, verify
from domino_jax.runtime.keys import LARGEST

# Turns of a timed loop. The short parts follow a whole pass that prepares them, and need more turns to be measurable.
LOOPED = 16
SHORT = {"head": 128, "commit": 128}
CHAINS = (BACKBONE, DRAFT, DOMINO)


def round_split(
    models: Pair, generator: Generator, state: DecodeState, modes: Sequence[str], repeats: int = 7
) -> dict[str, dict[str, float]]:
    """By mode the median seconds of one round and of its parts, each timed inside a separate jitted loop.

    draft: the backbone's pass and the base logits; the whole draft where there is no backbone.
    head: its rollout.  verify: the target's pass and its choices.
    commit: accepting, the drafter's context, the bookkeeping.  other: round - draft - head - verify.
    Of a tree, of chains without drafts and of plain decoding the whole round alone is timed.

    A single call of a part would include a copy of the cache and a dispatch. So a turn's time is measured by how much
    longer many turns take than one. Each turn feeds the next one, so that the compiler cannot move it out of the loop.
    """
    seconds = turn_seconds(round_stopwatches(models, generator, state, modes), repeats)
    with_head = _with_head(generator, modes)
    return {mode: _split(mode, seconds, mode in with_head) for mode in modes}


def round_seconds(
    models: Pair, settings: DecodeSettings, prompts: Sequence[Sequence[int]], widths: Sequence[int], repeats: int = 7
) -> dict[str, float]:
    """Median seconds of a plain step, under "0", and of rounds with these numbers of drafts, after these prompts."""
    generators = {drafts: new_generator(models, settings.change(num_drafts=drafts or None)) for drafts in (0, *widths)}
    live = endless(generators[max(widths)].start(models, prompts, list(range(len(prompts)))))
    timed = {
        str(drafts): round_stopwatch(models, generator, live, DRAFT if drafts else BASELINE)
        for drafts, generator in generators.items()
    }
    return turn_seconds(timed, repeats)


def round_stopwatches(
    models: Pair, generator: Generator, state: DecodeState, modes: Sequence[str]
) -> dict[str, Callable[[int], float]]:
    """Turns → seconds of everything that round_split times: parts of a chain by name, whole rounds by round_of."""
    live, parts = endless(state), {}
    drafting = generator.drafting(DRAFT)
    if set(modes) & set(CHAINS) and drafting.num_drafts != 0:
        parts = _parts(state.sampling or generator.settings.sampling, drafting)
    if not _with_head(generator, modes):
        parts.pop("head", None)
    timed = {name: stopwatch(jax.jit(program), models, live) for name, program in parts.items()}
    # Named apart from the parts, because `draft` is both a part and a mode.
    return timed | {round_of(mode): round_stopwatch(models, generator, live, mode) for mode in modes}


def _with_head(generator: Generator, modes: Sequence[str]) -> set[str]:
    return {mode for mode in modes if mode in CHAINS and generator.drafting(mode).use_head}


def endless(state: DecodeState) -> DecodeState:
    """The state with rows that never finish (with -1 for every stop id): timed rounds must not end early."""
    limits = jnp.full_like(state.limits, np.iinfo(np.int32).max)
    return state.replace(done=jnp.zeros_like(state.done), limits=limits)


def stopwatch(program: Callable, *arguments) -> Callable[[int], float]:
    """turns → seconds that program(*arguments, turns) takes."""

    def seconds(turns: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(program(*arguments, np.int32(turns)))
        return time.perf_counter() - begin

    return seconds


def round_stopwatch(models: Pair, generator: Generator, live: DecodeState, mode: str) -> Callable[[int], float]:
    """turns → seconds of that many rounds, or plain steps, by the program that generations run."""
    if generator.plain(mode):
        live = live.replace(draft_cache=())  # as plain generations start
    endless_generator = dataclasses.replace(generator, stop_ids=jnp.full_like(generator.stop_ids, -1))

    def seconds(turns: int) -> float:
        clock = Clock()
        # Rounds past the end of the caches cost the same, and their text is of no interest.
        endless_generator.advance(models, jax.tree.map(jnp.copy, live), mode, turns, longest=LARGEST, clock=clock)
        return clock.decode_seconds

    return seconds


def round_of(mode: str) -> str:
    return f"round of {mode}"


def _split(mode: str, seconds: Mapping[str, float], with_head: bool) -> dict[str, float]:
    whole = seconds[round_of(mode)]
    if mode not in CHAINS or "verify" not in seconds:  # a tree, a plain step
        return {"round": whole}
    parts = {name: seconds[name] for name in ("draft", "verify")} | {"head": seconds["head"] if with_head else 0.0}
    return {**parts, "commit": seconds["commit"], "other": max(0.0, whole - sum(parts.values())), "round": whole}


def _parts(sampling: Sampling, settings: DraftSettings) -> dict[str, Callable]:
    """The parts of a round as programs (models, state, turns) → arrays; turns is a traced int32."""

    def draft(models, state, turns):
        def turn(_, carry):
            anchors, cache = carry
            now = _moved(state, anchors).replace(anchors=anchors, draft_cache=cache)
            if not models.drafter.config.has_backbone:
                now = now.replace(draft_cache=_traced(cache, anchors))
                drafts, cache = propose(models, now, sampling, settings)
                return drafts[:, -1], cache
            _, base, cache = draft_base(models, now, settings.num_drafts)
            return jnp.argmax(base[:, 0], -1).astype(jnp.int32), cache

        return jax.lax.fori_loop(0, turns, turn, (state.anchors, state.draft_cache))

    def head(models, state, turns):
        z, base, _ = draft_base(models, state, settings.num_drafts)

        def turn(_, anchors):
            now = _moved(state, anchors).replace(anchors=anchors)
            return roll_out_head(models, now, z, base, sampling, settings).tokens[:, -1]

        return jax.lax.fori_loop(0, turns, turn, state.anchors)

    def check(models, state, turns):
        def turn(_, carry):
            tokens, cache = carry
            now = _moved(state, tokens[:, 0])
            out = verify(models, cache, tokens, now.lengths, tap_layers=models.drafter.config.target_layer_ids)
            chosen = choose(out.logits, now.keys, draft_positions(now, tokens.shape[1]), sampling)
            # A round uses the features, so they are used here; their sum is far below a token id.
            return chosen + (1e-30 * out.features.sum()).astype(jnp.int32), out.cache

        return jax.lax.fori_loop(0, turns, turn, (_block(models, state, settings), state.target_cache))

    def commit(models, state, turns):
        tokens = _block(models, state, settings)
        # Features of the right size: their values do not change the time, and a pass of the target compiles slowly.
        embedded = models.embed(tokens)
        taps = len(models.drafter.config.target_layer_ids)

        def turn(_, carry):
            positions = draft_positions(_moved(carry, carry.counts), tokens.shape[1]) - 1
            # Constants would be computed once, before the loop.
            states = _traced(embedded, carry.counts)
            accepted = accept_chain(tokens + carry.rounds[:, None], tokens)
            text = TargetRows(jnp.tile(states, (1, 1, taps)), states, accepted + 1)
            context = models.bound.extend_context(carry.draft_cache, text, positions)
            carry, emitted = emit(carry.replace(draft_cache=context), tokens, accepted + 1, jnp.array([-1]))
            return record_round(carry, emitted)

        # Without the target's cache, which would be copied on the way out.
        after = jax.lax.fori_loop(0, turns, turn, state)
        return after.counts, after.tokens, after.accepts, after.draft_cache

    return {"draft": draft, "head": head, "verify": check, "commit": commit}


def _moved(state: DecodeState, feed: jax.Array) -> DecodeState:
    """The same state with lengths that seem to depend on `feed` int32 [B], which is never negative: else masks,
    positions and rotations would be computed once, before the loop."""
    return state.replace(lengths=state.lengths + (feed < 0))


def _traced(tree, feed: jax.Array):
    """The tree with a trace of `feed` in its arrays, caches left out."""
    trace = 1e-30 * feed.sum()
    return jax.tree.map(lambda x: x if x.ndim == 4 else x + trace.astype(x.dtype), tree)


def _block(models, state: DecodeState, settings: DraftSettings) -> jax.Array:
    """Tokens int32 [B, M+1] of a round's width."""
    width = settings.width(models.drafter.config) + 1
    return jnp.broadcast_to(state.anchors[:, None], (state.anchors.shape[0], width))


def turn_seconds(timed: Mapping[Any, Callable[[int], float]], repeats: int) -> dict[Any, float]:
    """Seconds of one turn by name, from functions turns → seconds: medians of `repeats` calls after a warm-up.

    The calls alternate, so that a noisy machine disturbs all of them alike. Names in SHORT make more turns.
    """
    more = {name: SHORT.get(name, LOOPED) for name in timed}
    times = {name: ([], []) for name in timed}  # of one turn, of many more
    for repeat in range(repeats + 1):
        for name, series in times.items():
            for seconds, further in zip(series, (0, more[name]), strict=True):
                spent = timed[name](1 + further)
                if repeat:
                    seconds.append(spent)
    medians = {name: [statistics.median(seconds) for seconds in series] for name, series in times.items()}
    return {name: max(0.0, many - single) / more[name] for name, (single, many) in medians.items()}
