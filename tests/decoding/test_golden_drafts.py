"""Drafts and texts of the golden sets, float32; test_golden.py has the target and the training pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.candidates import Candidates, pick_candidates
from domino_jax.method.propose import draft_base, propose, read_prefix
from domino_jax.method.rollout import choose_drafts, draft_in_passes
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.method.step import correct_logits
from tests.decoding.test_golden import SETS, close, models_of
from tests.helpers.decoding_models import golden_models, make_generator
from tests.helpers.models import GOLDEN_SETS, load_golden, reference_accept_lengths

# Sets whose drafts start at given prefixes of the data, where the anchor is not always the target's choice.
DRAFTED = SETS[2:]


@functools.lru_cache
def generator(name: str):
    shape = {"cache_length": 128, "max_new_tokens": 64, "batch_size": 4}
    return make_generator(golden_models(name), **shape, num_drafts=load_golden(name).figures.get("num_drafts"))


@functools.lru_cache
def drafting(name: str):
    """Jitted (models, state) → greedy drafts."""
    settings = DraftSettings(num_drafts=load_golden(name).figures.get("num_drafts"), head_candidates=0)
    return jax.jit(lambda models, state: propose(models, state, SamplingParams(), settings)[0])


@functools.lru_cache
def prefixes(name: str):
    """A state at the reference's prefixes, whose anchors are tokens of the data."""
    a = load_golden(name).arrays
    starts, rows = a["draft.starts"], a["target.input_ids"][a["draft.rows"]]
    state = generator(name).start([row[:start].tolist() for row, start in zip(rows, starts, strict=True)], range(4))
    anchors = [row[start] for row, start in zip(rows, starts, strict=True)]
    return state.replace(anchors=jnp.asarray(anchors, jnp.int32))


@pytest.mark.parametrize("name", DRAFTED)
def test_drafts_after_given_prefixes_equal_the_reference(name):
    """A Markov head drafts from slots 0 to B - 1. A public loop leaves slot 0 out, so it is one position off."""
    drafts = drafting(name)(golden_models(name), prefixes(name))
    assert drafts.shape[1] == load_golden(name).figures["num_drafts"]
    np.testing.assert_array_equal(drafts, load_golden(name).arrays["draft.tokens"])


def drafted_block(models, state, drafts) -> dict[str, jax.Array]:
    """The arrays of a block after the drafts before each slot."""
    config, before = models.drafter.config, jnp.concatenate([state.anchors[:, None], drafts[:, :-1]], axis=1)
    z, base, _ = draft_base(models, state)
    if config.head == "dflash2":
        candidates = pick_candidates(base, config.only_candidates)
        codes = models.head.step((), before, models.head.z_terms(z))[1]
        change = models.head.residual_of(codes[:, :, None], models.head.rows(candidates.token_ids))[:, :, 0]
        scores = candidates.logits + change
        ours = {"block_hidden": z, "unary_logits": base, "candidate_ids": candidates.token_ids}
        return ours | {"candidate_scores": scores}
    if config.head == "xpress":
        previous = jnp.concatenate([read_prefix(models, state), drafts[:, :-1]], axis=1)
        codes = models.head.codes(models.head.z_terms(z), previous)
        return {"block_hidden": z, "base_logits": base, "final_logits": base + models.head.residual(codes[:, 1:])}
    codes = models.head.codes(models.head.z_terms(z), before)
    final = correct_logits(models.drafter, models.drafter_params, base, codes)
    confidence = {"confidence_logits": models.head.confidence(z, before)} if config.enable_confidence_head else {}
    return {"block_hidden": z, "base_logits": base, "final_logits": final} | confidence


@pytest.mark.parametrize("name", [name for name in DRAFTED if name != "eagle3"])
def test_arrays_of_a_drafted_block_match_the_reference(name):
    arrays = load_golden(name).arrays
    drafts = arrays["draft.pass_tokens"][:, -2] if name == "xpress" else arrays["draft.tokens"]  # F of the last pass
    ours = jax.jit(drafted_block)(golden_models(name), prefixes(name), jnp.asarray(drafts, jnp.int32))
    stored = {key.removeprefix("draft.") for key in arrays if key.startswith("draft.")}
    assert stored - set(ours) - {"pass_tokens", "sequential_tokens"} == {"rows", "starts", "tokens"}
    for array, values in ours.items():
        close(values, arrays["draft." + array][:, -values.shape[1] :])  # slot 0 of unshifted blocks predicts nothing


def drafts_of(models, state, **choices) -> list[list[int]]:
    """Greedy drafts; choices: of DraftSettings."""
    settings = DraftSettings(head_candidates=0, **choices)
    return jax.jit(lambda models, state: propose(models, state, SamplingParams(), settings)[0])(models, state).tolist()


def test_every_pass_of_xpress_drafts_what_the_reference_does():
    """The base logits' choices, those after each pass, and with a pass for each draft those of the loop over slots."""
    arrays, models, state = load_golden("xpress").arrays, golden_models("xpress"), prefixes("xpress")
    passes = [drafts_of(models, state, use_head=False), *(drafts_of(models, state, head_passes=k) for k in (1, 2, 3))]
    assert np.swapaxes(passes, 0, 1).tolist() == arrays["draft.pass_tokens"].tolist()
    for count in (7, 9):
        assert drafts_of(models, state, head_passes=count) == arrays["draft.sequential_tokens"].tolist()
    assert drafts_of(models_of("xpress", "shifted"), state) == arrays["shifted.draft_tokens"].tolist()
    served = drafts_of(models, state.replace(before=state.anchors))  # as in vLLM 0.33 (docs/heads.md)
    assert [ours == theirs for ours, theirs in zip(passes[3], served, strict=True)] == [False, True, True, False]


def test_sampled_passes_of_xpress_share_the_noise_of_the_reference():
    arrays, figures = load_golden("xpress").arrays, load_golden("xpress").figures

    @jax.jit
    def drafted(models, state):
        z, base, _ = draft_base(models, state)
        choose = functools.partial(choose_drafts, sampling=SamplingParams(figures["temperature"]))
        candidates = Candidates(None, base, jnp.asarray(arrays["sample.noise"]))
        known, count = read_prefix(models, state), figures["num_passes"]
        return draft_in_passes(models, known, z, candidates, count, choose).tokens

    assert drafted(golden_models("xpress"), prefixes("xpress")).tolist() == arrays["sample.tokens"].tolist()


def test_every_step_of_an_eagle3_chain_matches_the_reference():
    """States and logits of six steps, each fed with the draft before it."""
    a, models, state = load_golden("eagle3").arrays, golden_models("eagle3"), prefixes("eagle3")
    step = jax.jit(
        lambda rows, hidden, tokens, slots: models.bound.draft_step(rows, hidden, models.embed(tokens), slots)
    )
    (rows, hidden), tokens = state.draft_cache, np.concatenate([state.anchors[:, None], a["draft.tokens"]], axis=1)
    for index in range(6):
        logits, hidden, rows = step(rows, hidden, tokens[:, index].astype(np.int32), state.lengths - 1 + index)
        close(hidden, a["draft.hidden"][:, index])
        close(logits, a["draft.logits"][:, index])


# ---------------------------------------------------------------------------------------------------- generations


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in GOLDEN_SETS)) for name in SETS]
)
def test_texts_accept_lengths_and_first_drafts_equal_the_reference(name):
    made, rows = generator(name), load_golden(name).figures["generate"]
    prompts = [row["prompt"] for row in rows]
    answers = made.generate(prompts, "draft")
    assert [answer.token_ids for answer in answers] == [row["output"] for row in rows]
    assert [answer.accept_lengths for answer in answers] == [reference_accept_lengths(row) for row in rows]
    first = drafting(name)(made.models, made.start(prompts, range(4)))
    assert first.tolist() == [row["first_round_draft"] for row in rows]
    if name in GOLDEN_SETS:  # those of the other sets have the same targets
        assert [answer.token_ids for answer in made.generate(prompts, "autoregressive")] == [
            row["output"] for row in rows
        ]
