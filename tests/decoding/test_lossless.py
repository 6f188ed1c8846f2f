"""Speculative decoding changes the speed and never the text: drafters × modes × sampling × drafts × batches × caches.

Every case answers the same six requests, and every answer is held against the slow twin (tests/helpers/twin.py). A
first divergence is let pass only as a shown near tie. The rounds of every chain are also those that one pass over the
answers predicts (decoding/answers.py). A new head adds one line to DRAFTERS.
"""

import contextlib
import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.decoding.acceptance import accept_lengths
from domino_jax.decoding.answers import NEAR_TIE, AnswerPasses, TargetAnswer
from domino_jax.decoding.generate import Generation
from domino_jax.decoding.requests import Request
from domino_jax.decoding.settings import refused_mode
from domino_jax.decoding.width import Choice, WidthController
from domino_jax.method import exact, rounds
from domino_jax.method.drafters import CONFIGS
from domino_jax.method.rollout import choose_drafts
from domino_jax.method.sampling import choice_values
from domino_jax.method.settings import SamplingParams, TreeSettings
from tests.helpers.decoding_models import (
    SmallGenerator,
    in_eight_bits,
    make_generator,
    planted_drafts,
    random_models,
    random_prompts,
    with_tokens,
    with_window,
)
from tests.helpers.pairwise import pairwise
from tests.helpers.twin import cut, plain_texts

WINDOW, SOFTCAP = {"layer_types": ("sliding_attention",), "sliding_window": 4}, {"final_logit_softcapping": 2.0}
# Sizes are in HEAD_SIZES (tests/helpers/decoding_models.py). Tied: the target's lm_head is its embedding.
DRAFTERS = {
    "none": {"head": "none", "shift_label": False, "tied": True},
    "domino": {},
    "domino sparse": {"sparse": True},  # a target with experts
    "domino unshifted": {"shift_label": False, "pure_draft_prefix_len": 0},
    "domino windowed": {"pure_draft_prefix_len": 2, **WINDOW},
    "markov rnn": {"head": "markov", "tied": True},
    "markov vanilla": {"head": "markov", "markov_head_type": "vanilla"},
    "markov gated": {"head": "markov", "markov_head_type": "gated"},
    "dflash2": {"head": "dflash2"},
    "dflash2 transformed": {"head": "dflash2", **WINDOW, "is_causal": False, "output_multiplier": 1.5, **SOFTCAP},
    "xpress": {"head": "xpress"},
    "xpress shifted": {"head": "xpress", "shift_label": True, "tied": True},
    "eagle3": {"head": "eagle3"},
}
# "mixed": every request has its own.
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(0.8, top_k=20, top_p=0.9),
    "mixed": SamplingParams(1.0),
}
OWN = [None, SamplingParams(), SamplingParams(1.3, top_p=0.8), SamplingParams(1.0, 9, 0.9, 0.05), SamplingParams(0.7)]
# Drafts share the noise, but for the greedy two of a head that corrects five tokens per slot. Changing: every dispatch
# has another width (ForcedWidths).
WIDTHS = {
    "all": {},
    "two": {"num_drafts": 2, "head_candidates": 5, "draft_sharpness": math.inf},
    "changing": {"width": "adaptive", "widths": (0, 1, 2)},
    "in passes": {"head_passes": 1},
}
TREE = TreeSettings(nodes=9, lanes=4, candidates=8, beta=-0.1)
AXES = {
    "drafter": tuple(DRAFTERS),
    # In one axis, so that every drafter drafts its own chain and its own tree.
    "mode": ("autoregressive", "backbone", "draft", "draft planted", "tree", "tree planted"),
    "sampling": tuple(SAMPLINGS),
    "width": tuple(WIDTHS),
    "batch": (1, 2, 4),  # rows; six requests queue for them, and four rows shrink to one
    "tokens": (0, 24),  # of the draft vocabulary; 0 are all
    "cache": (64, 16),  # slots of the smallest cache; all are 64, or they grow
    "eight_bits": ("none", "target", "drafter"),  # whose matrices are in int8
}


def head_of(drafter: str) -> str:
    return DRAFTERS[drafter].get("head", "domino")


def valid(drafter, mode, width, tokens, eight_bits, **_) -> bool:
    """Whether the case is different from all others: plain decoding reads no drafter."""
    mode, _, planted = mode.partition(" ")
    if width == "in passes" and (mode != "draft" or not CONFIGS[head_of(drafter)].has_head):
        return False
    if tokens and (planted or not CONFIGS[head_of(drafter)].has_backbone):
        return False
    if eight_bits == "drafter" and (planted or mode == "autoregressive"):
        return False
    if mode == "autoregressive":
        return (drafter, width, tokens) == ("domino", "all", 0)
    if mode == "backbone":
        return drafter in ("domino", "markov rnn", "dflash2")
    return not refused_mode(mode, CONFIGS[head_of(drafter)])


CASES = pairwise(AXES, valid)
# Without the mark `long`: the first chain or tree of each head, and the first case of each mode.
FIRST = {
    head_of(case["drafter"]): index
    for index, case in reversed([*enumerate(CASES)])
    if case["mode"] in ("draft", "tree")
}
FIRST |= {case["mode"]: index for index, case in reversed([*enumerate(CASES)])}

# The third fills the cache to its last slot: 20 tokens, 35 new ones and the 9 rows of a tree.
PROMPTS = [[7], *random_prompts(1, 12, 12), *random_prompts(1, 20, 20, seed=5), *random_prompts(3, 2, 9, seed=1)]
LIMITS = (12, 12, 35, 7, 12, 1)
LONGEST = max(LIMITS)


def requests_of(sampling: str) -> list[Request]:
    """The noise of no request is its index, and two of the seeds are their own."""
    mixed = sampling == "mixed"
    noises, seeds = (11, 2, 30, 4, 1, 17), (None, 3, None, None, None, 8)
    return [
        Request(noise, seed if mixed else None, limit, OWN[index % len(OWN)] if mixed else None)
        for index, (noise, seed, limit) in enumerate(zip(noises, seeds, LIMITS, strict=True))
    ]


def filled_requests(sampling: str) -> list[Request]:
    """With the generator's values where a request has none."""
    return [
        dataclasses.replace(one, seed=one.seed or 0, sampling=one.sampling or SAMPLINGS[sampling])
        for one in requests_of(sampling)
    ]


@functools.lru_cache
def models_of(drafter: str, tokens: int = 0, eight_bits: str = "none"):
    models = random_models(4, **DRAFTERS[drafter])
    models = in_eight_bits(models, "target") if eight_bits == "target" else models
    models = with_tokens(models, np.linspace(0, 63, tokens).astype(int)) if tokens else models
    return in_eight_bits(models, "drafter") if eight_bits == "drafter" else models


@functools.lru_cache
def expected(tied: bool, sparse: bool, layers: int, sampling: str, int8: bool):
    """(texts by the twin, stop ids): the texts are cut at the stop ids, which end two of them early."""
    models = random_models(4, tied=tied, sparse=sparse, **({"head": "eagle3"} if layers == 4 else {}))
    models = in_eight_bits(models, "target") if int8 else models
    texts = plain_texts(models, PROMPTS, filled_requests(sampling))
    # One ends a text inside a block, the other one at its first token; the third text, which fills the cache, is whole.
    free = [texts[row] for row in (1, 0, 4)]
    inside = next(text[at] for text in free for at in range(3, 12) if text[at] not in texts[2] + text[:at])
    first = next(texts[row][0] for row in (4, 3, 0) if texts[row][0] not in texts[2])
    return [cut(text, (inside, first)) for text in texts], (inside, first)


def expected_for(drafter: str, sampling: str, eight_bits: str = "none"):
    config = models_of(drafter).target.config
    shape = config.tie_word_embeddings, config.experts is not None, config.num_hidden_layers
    return expected(*shape, sampling, eight_bits == "target")


def generator_of(
    drafter: str, sampling: str, width: str, batch: int, cache: int, tokens: int = 0, eight_bits: str = "none"
) -> SmallGenerator:
    shape = {"cache_length": 64, "max_new_tokens": LONGEST, "batch_size": batch, "smallest_cache": cache}
    choices = {
        "sampling": SAMPLINGS[sampling],
        "stop_ids": expected_for(drafter, sampling, eight_bits)[1],
        "tree": TREE,
    }
    models = models_of(drafter, tokens, eight_bits)
    if width == "two" and models.drafter.config.has_backbone:
        models = with_window(models, 6)
    made = make_generator(models, **shape, **choices, **WIDTHS[width])
    if width == "changing":
        made.controllers.update({mode: ForcedWidths(made.widths(mode)) for mode in ("backbone", "draft", "tree")})
    return made


class ForcedWidths(WidthController):
    """Plain steps, the widest round, plain steps, the next one, …, a few rounds each; a tree has one kind of round."""

    dispatches = 0

    def choose(self, pace, rows) -> Choice:
        number, drafting = self.dispatches, self.widths[:0:-1]
        self.dispatches += 1
        return Choice(drafting[number // 2 % len(drafting)] if number % 2 else 0, 1 + number % 3)


def check(made: SmallGenerator, drafter: str, mode: str, sampling: str, eight_bits: str = "none") -> list[Generation]:
    """The answers of a mode, after they were held against the twin's texts."""
    texts, requests = expected_for(drafter, sampling, eight_bits)[0], requests_of(sampling)
    answers = made.generate(PROMPTS, mode, requests)
    reference = [Generation(text, [], "") for text in texts]
    wrong = [entry for entry in made.divergences(PROMPTS, reference, answers, requests) if not entry.near_tie]
    assert not wrong, f"not lossless: {wrong}"
    for answer in answers:
        assert sum(answer.accept_lengths) == (0 if mode == "autoregressive" else len(answer.token_ids) - 1)
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] in made.stop_ids.tolist() else "length")
    return answers


def judge(made: SmallGenerator, drafter: str, sampling: str, eight_bits: str = "none"):
    """The twin's texts in two packed rows, and one of nothing."""
    columns = zip(PROMPTS, expected_for(drafter, sampling, eight_bits)[0], filled_requests(sampling), strict=True)
    answers = [TargetAnswer(str(row), *answer) for row, answer in enumerate(columns)]
    return AnswerPasses(answers, made.drafting("draft"), 3, slice_blocks=9)(made.models)


@functools.lru_cache
def predicted(drafter: str, sampling: str, width: str, tokens: int, eight_bits: str = "none"):
    made = generator_of(drafter, sampling, width, 2, 64, tokens, eight_bits)
    return judge(made, drafter, sampling, eight_bits)


def margins(made: SmallGenerator, drafter: str, sampling: str, eight_bits: str):
    """For every draft how far its value is above the next best one, in place of log_q."""

    def with_margin(candidates, sampling, sharpness):
        drafted = choose_drafts(candidates, sampling, sharpness)
        best = jnp.sort(choice_values(candidates.logits, candidates.noise, sampling, sharpness), axis=-1)
        return drafted._replace(log_q=best[..., -1] - best[..., -2])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "choose_scored_drafts", with_margin)
        return [one.log_q for one in judge(made, drafter, sampling, eight_bits)]


def check_rounds(
    answers: list[Generation], judged, made: SmallGenerator, drafter: str, mode: str, sampling: str, eight_bits="none"
):
    """The rounds are those of the walk over what was judged, but for near ties of the drafter."""
    width = made.drafting(mode).width(made.drafter)
    for row, (answer, one) in enumerate(zip(answers, judged, strict=True)):
        accepted = one.backbone if mode == "backbone" else one.drafts
        walk = accept_lengths(accepted, width)
        if len(answer.token_ids) != len(accepted) + 1 or walk == answer.accept_lengths:
            continue  # the former at a near tie of the target
        pairs = enumerate(zip(walk, answer.accept_lengths, strict=False))
        first, draft = next((place, min(pair) - 1) for place, pair in pairs if len({*pair}) > 1)
        margin = margins(made, drafter, sampling, eight_bits)[row][sum(walk[:first]), draft]
        assert mode == "draft" and margin < NEAR_TIE["float32"], (row, walk, answer.accept_lengths, margin)


# A planted draft at an index of the text is 0 right, 1 wrong, 2 wrong where the sibling in a tree is right.
SCHEDULE = np.array([0, 0, 0, 0, 0, 1, 0, 2, 0, 0, 1, 1, 0, 0, 0, 2, 0])


def schedule(request: int) -> np.ndarray:
    return np.resize(np.roll(SCHEDULE, 3 * request), LONGEST)


def planted(drafter: str, sampling: str, eight_bits: str = "none"):
    """planted_drafts of the twin's texts with the mistakes of `schedule`."""
    known, decoys = np.zeros((6, LONGEST), int), np.zeros((6, LONGEST), int)
    for request, text in enumerate(expected_for(drafter, sampling, eight_bits)[0]):
        right, kinds = np.resize(text, LONGEST), schedule(request)
        known[request] = np.where(kinds == 0, right, (right + 1) % 64)
        decoys[request] = np.where(kinds == 2, right, (right + 2) % 64)
    return planted_drafts(known, decoys, filled_requests(sampling))


def pace(request: int, length: int, drafts: int, mode: str) -> list[int]:
    """The tokens of every round of an answer of `length` tokens with planted drafts."""
    emitted, lengths = 1, []
    while emitted < length:
        kinds = [*schedule(request)[emitted : emitted + drafts], *[1] * drafts][:drafts]
        run = next((place for place, kind in enumerate(kinds) if kind), drafts)
        run += mode == "tree" and run < drafts and kinds[run] == 2
        lengths.append(min(run + 1, length - emitted))
        emitted += lengths[-1]
    return lengths


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=[pytest.mark.long] * (index not in FIRST.values()), id="-".join(map(str, case.values()))
        )
        for index, case in enumerate(CASES)
    ],
)
def test_the_text_is_the_targets(case):
    drafter, mode, sampling, width, batch, tokens, cache, eight_bits = case.values()
    mode, _, drafts = mode.partition(" ")
    made = generator_of(drafter, sampling, width, batch, cache, tokens, eight_bits)
    with planted(drafter, sampling, eight_bits) if drafts else contextlib.nullcontext():
        answers = check(made, drafter, mode, sampling, eight_bits)
    if not drafts and mode in ("backbone", "draft") and width != "changing":
        check_rounds(
            answers, predicted(drafter, sampling, width, tokens, eight_bits), made, drafter, mode, sampling, eight_bits
        )
    ran = [key for key in made.compiled if key[0] == mode]  # (mode, rows, slots of the caches, …)
    assert {key[1] for key in ran} == ({4, 1} if case["batch"] == 4 else {case["batch"]})
    assert len({key[2] for key in ran}) > (case["cache"] < 64)
    if case["width"] == "changing":
        assert {key[-1] for key in ran} >= {0, made.widths(mode)[-1]} or mode == "autoregressive"
    elif drafts:
        width = made.drafting(mode).width(made.drafter)
        paces = [pace(request, len(answer.token_ids), width, mode) for request, answer in enumerate(answers)]
        assert [answer.accept_lengths for answer in answers] == paces


@pytest.mark.long
@pytest.mark.parametrize("mode", ["autoregressive", "draft", "tree"])
def test_no_stop_id_ends_an_answer_before_min_tokens_or_at_all_where_it_is_ignored(mode):
    """min_tokens as in vLLM: until then no stop id can be chosen, so the text is another one. Ignored ids are in it."""
    usual, stop_ids = expected_for("domino", "mixed")
    short = [row for row, text in enumerate(usual) if text[-1] in stop_ids and len(text) < LIMITS[row]]
    choices = {short[0]: {"min_tokens": 9}, short[1]: {"ignore_eos": True}, 2: {"min_tokens": 99, "ignore_eos": True}}
    requests = [dataclasses.replace(one, **choices.get(row, {})) for row, one in enumerate(filled_requests("mixed"))]
    whole = plain_texts(models_of("domino"), PROMPTS, requests, stop_ids)
    texts = [text if one.ignore_eos else cut(text, stop_ids) for text, one in zip(whole, requests, strict=True)]
    assert {row for row in range(6) if texts[row] != usual[row]} == set(short[:2])
    answers = generator_of("domino", "mixed", "all", 2, 64).generate(PROMPTS, mode, requests)
    assert [answer.token_ids for answer in answers] == texts
    ends = [text[-1] in stop_ids and not one.ignore_eos for text, one in zip(texts, requests, strict=True)]
    assert [answer.finish_reason == "stop" for answer in answers] == ends


def test_every_head_is_in_the_matrix():
    assert {head_of(drafter) for drafter in DRAFTERS} == set(CONFIGS)
    for mode in ("draft", "tree"):
        able = {drafter for drafter in DRAFTERS if not refused_mode(mode, CONFIGS[head_of(drafter)])}
        assert {case["drafter"] for case in CASES if case["mode"] == mode} == able


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["domino", "eagle3"])
def test_an_answer_streamed_alone_has_the_rounds_that_it_has_in_a_queue_with_growing_caches(drafter):
    """So no draft depends on a neighbour, on the size of a cache, or on what an earlier request left in its row."""
    together = check(generator_of(drafter, "sampled", "all", 2, 16), drafter, "draft", "sampled")
    alone, requests = generator_of(drafter, "sampled", "all", 1, 64), requests_of("sampled")
    for row in (0, 2, 3):
        pieces = list(alone.stream(PROMPTS[row], "draft", chunk_rounds=3, request=requests[row]))
        assert sum((piece.token_ids for piece in pieces), []) == together[row].token_ids
        assert sum((piece.accept_lengths for piece in pieces), []) == together[row].accept_lengths


# ---------------------------------------------------------------------------------- controls: what has to be caught


def accept_too_many(accept):
    return lambda tokens, chosen: jnp.minimum(accept(tokens, chosen) + 1, tokens.shape[1] - 1)


def accept_too_deep(accept):
    """The first child of the last accepted node is accepted too."""

    def lenient(tree, chosen, deepest):
        accepted, path = accept(tree, chosen, deepest)
        last = jnp.take_along_axis(path, accepted[:, None], axis=1)
        child = jnp.argmax((tree.parents == last) & (tree.depths > 0), axis=1)
        deeper = accepted + (child > 0)
        return deeper, path.at[jnp.arange(len(child)), deeper].set(child)

    return lenient


def next_positions(positions):
    """Plain rounds count their positions themselves."""
    return lambda *arguments: positions(*arguments) + 1


@pytest.mark.parametrize(
    ("mode", "name", "fault"),
    [
        ("draft", "accept_chain", accept_too_many),
        ("tree", "accept_tree", accept_too_deep),
        ("draft", "draft_positions", next_positions),
    ],
)
def test_a_rule_that_is_not_lossless_is_caught(mode, name, fault, monkeypatch):
    monkeypatch.setattr(rounds, name, fault(getattr(rounds, name)))
    with planted("domino", "sampled"), pytest.raises(AssertionError, match="not lossless"):
        check(generator_of("domino", "sampled", "all", 2, 64), "domino", mode, "sampled")
