"""The number of drafts by the rows of a batch: the same texts, plain steps that keep up the drafter's context."""

import dataclasses
import functools

from domino_jax.decoding.requests import Request
from domino_jax.method.settings import DraftSettings, SamplingParams, TreeSettings
from tests.helpers.decoding_models import SmallGenerator, make_generator, random_models, random_prompts, texts

WARM = SamplingParams(1.0)
PROMPTS = random_prompts(11)
LIMITS = (3, 30, 4, 1, 5, 40, 2, 4, 6, 5, 7)
REQUESTS = [Request(index, max_new_tokens=limit) for index, limit in enumerate(LIMITS)]


@functools.lru_cache
def generator(widths: tuple[tuple[int, int], ...] = (), batch: int = 8, **choices) -> SmallGenerator:
    shape = {"cache_length": 64, "max_new_tokens": 40, "batch_size": batch}
    return make_generator(random_models(), **shape, sampling=WARM, widths=widths, **choices)


def test_a_batch_takes_the_width_of_the_next_larger_measured_one():
    drafting = DraftSettings(num_drafts=3, widths=((1, 8), (4, 2), (8, 0)))
    assert [drafting.at(rows) for rows in (1, 2, 8, 99)] == [DraftSettings(num_drafts=n) for n in (8, 2, 0, 0)]
    assert drafting.width(random_models().drafter.config) == 8
    tree = TreeSettings(nodes=4, lanes=2)
    assert dataclasses.replace(drafting, tree=tree).at(8) == DraftSettings(num_drafts=3, tree=tree)
    assert DraftSettings().at(8) == DraftSettings()


def test_a_draft_that_is_plain_in_any_batch_has_no_context():
    made = generator(((8, 0),))
    answers = made.generate(PROMPTS[:2], "draft", REQUESTS[:2])
    assert {key[4] for key in made.compiled if key[0] == "prefill"} == {True}  # as plain decoding starts
    assert texts(answers) == texts(generator().generate(PROMPTS[:2], "autoregressive", REQUESTS[:2]))
    assert set(answers[1].accept_lengths) == {1}


def test_verified_drafts_are_counted_at_the_width_of_their_batch():
    """Rounds of eight rows verify one draft, those of two rows four."""
    made = generator(((2, 4), (8, 1)))
    clock = made.generator.generate(made.models, PROMPTS[:8], "draft", REQUESTS[:8])
    rounds = sum(len(answer.accept_lengths) for answer in clock.answers)
    assert rounds < clock.clock.drafts < 4 * rounds
    clock = made.generator.generate(made.models, PROMPTS[:2], "draft", REQUESTS[:2])
    assert clock.clock.drafts == 4 * sum(len(answer.accept_lengths) for answer in clock.answers)
