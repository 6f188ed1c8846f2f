"""generate.py: any prompts in fixed shapes; what fits, what is refused, and that no row depends on its neighbours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from domino_jax.method.pair import Models
from domino_jax.method.sampling import position_noise, request_keys
from domino_jax.method.settings import SamplingParams
from domino_jax.runtime.errors import DataError, DominoError
from tests.helpers.decoding_models import (
    SmallGenerator,
    make_generator,
    random_models,
    random_prompts,
    random_target,
    texts,
    uncached,
)

GREEDY, WARM = SamplingParams(), SamplingParams(1.0)
MODES = ("autoregressive", "backbone", "draft", "domino")


@functools.lru_cache
def generator(batch: int, sampling: SamplingParams) -> SmallGenerator:
    return make_generator(random_models(), batch_size=batch, sampling=sampling)


def same_up_to_near_ties(made, prompts, one, two) -> bool:
    """Equal texts and accept lengths, row by row; a row that parts at a shown near tie is let pass."""
    excused = {entry.prompt for entry in made.divergences(prompts, one, two) if entry.near_tie}
    rows = [row for row in range(len(prompts)) if row not in excused]
    return [one[row] for row in rows] == [two[row] for row in rows] and len(rows) > len(prompts) // 2


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_the_autoregressive_text_is_the_argmax_after_every_prefix(sampling):
    """The oracle: no cache, no loop, one pass per token; log p + g by hand."""
    prompts = random_prompts(3)
    answers = generator(8, sampling).generate(prompts, "autoregressive")
    for request, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        text = list(prompt)
        for _ in range(16):
            values = scipy.special.log_softmax(uncached(random_models(), [text])[0, -1])
            if not sampling.greedy:
                keys = request_keys(0, jnp.array([request]))
                values = values + np.asarray(position_noise(keys, jnp.array([[len(text)]]), values.size))[0, 0]
            text.append(int(values.argmax()))
        assert answer.token_ids == text[len(prompt) :]
        assert (answer.accept_lengths, answer.finish_reason) == ([], "length")


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_row_of_a_ragged_batch_equals_its_solo_run(sampling):
    prompts = [*random_prompts(7), [4]]
    together = generator(8, sampling).generate(prompts, "domino")
    alone = [generator(1, sampling).generate([prompts[row]], "domino", [row])[0] for row in range(8)]
    assert same_up_to_near_ties(generator(1, sampling), prompts, together, alone)
    assert len({tuple(answer.accept_lengths) for answer in together}) > 1


def test_the_request_and_not_the_batch_slot_keys_the_noise():
    made = generator(8, WARM)
    prompts, requests = random_prompts(8), [3, 14, 15, 92, 65, 35, 89, 79]
    straight = made.generate(prompts, "domino", requests)
    turned = made.generate(prompts[::-1], "domino", requests[::-1])
    assert same_up_to_near_ties(made, prompts, straight, turned[::-1])
    assert texts(made.generate(prompts, "domino")) != texts(straight)


def test_one_prompt_with_many_requests_gives_many_texts():
    answers = generator(8, WARM).generate([[5, 9, 2]] * 8, "domino")
    assert len({tuple(answer.token_ids) for answer in answers}) == 8


def test_the_seed_changes_the_text():
    made = generator(8, WARM)
    other = make_generator(random_models(), batch_size=8, sampling=WARM, seed=1)
    assert texts(made.generate([[5]], "domino")) != texts(other.generate([[5]], "domino"))


def test_a_batch_that_is_not_full_answers_its_own_rows_only():
    prompts = random_prompts(11)
    made = generator(8, WARM)
    answers = made.generate(prompts, "domino")
    assert len(answers) == 11
    rest = made.generate(prompts[8:], "domino", [8, 9, 10])
    assert same_up_to_near_ties(made, prompts[8:], answers[8:], rest)


def test_tokens_are_one_from_the_prefill_and_those_of_the_rounds():
    for answer in generator(8, WARM).generate(random_prompts(8), "domino"):
        assert 1 + sum(answer.accept_lengths) == len(answer.token_ids) == 16
        assert min(answer.accept_lengths) >= 1 and max(answer.accept_lengths) <= 5


@pytest.mark.parametrize("mode", MODES)
def test_a_one_token_prompt_has_the_text_of_the_plain_argmax(mode):
    [answer] = generator(1, GREEDY).generate([[7]], mode)
    text = [7]
    for _ in range(16):
        text.append(int(uncached(random_models(), [text])[0, -1].argmax()))
    assert answer.token_ids == text[1:]


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_id_as_first_token_ends_the_text_there(mode):
    made = generator(1, GREEDY)
    [free] = made.generate([[7, 8]], mode)
    [answer] = made.with_stop_ids(free.token_ids[0]).generate([[7, 8]], mode)
    assert (answer.token_ids, answer.accept_lengths, answer.finish_reason) == (free.token_ids[:1], [], "stop")


def test_no_token_follows_any_of_several_stop_ids():
    prompts = random_prompts(8)
    free = texts(generator(8, WARM).generate(prompts, "domino"))
    stops = {free[0][3], free[1][5], free[2][9]}
    made = make_generator(random_models(), batch_size=8, sampling=WARM, stop_ids=[*stops, *stops])
    for text, answer in zip(free, made.generate(prompts, "domino"), strict=True):
        end = next((place + 1 for place, token in enumerate(text) if token in stops), 16)
        assert answer.token_ids == text[:end]
        assert answer.finish_reason == ("stop" if text[end - 1] in stops else "length")
        assert 1 + sum(answer.accept_lengths) == end


def test_an_empty_stop_list_stops_nothing():
    assert generator(1, GREEDY).stop_ids.tolist() == [-1]
    assert generator(1, GREEDY).generate([[7]], "domino")[0].finish_reason == "length"


def test_one_new_token_needs_no_round():
    made = make_generator(random_models(), max_new_tokens=1)
    [answer] = made.generate([[7, 8]], "domino")
    [longer] = generator(1, GREEDY).generate([[7, 8]], "domino")
    assert (answer.token_ids, answer.accept_lengths) == (longer.token_ids[:1], [])


def test_a_prompt_that_just_fits_has_the_text_of_a_roomy_cache():
    """40 slots = 19 of the prompt + 16 new + the 5 rows of a block."""
    [prompt] = random_prompts(1, 19, 19)
    tight = make_generator(random_models(), cache_slots=40, sampling=WARM)
    assert tight.generate([prompt], "domino") == generator(1, WARM).generate([prompt], "domino")


@pytest.mark.parametrize(("shift_label", "block_rows"), [(True, 5), (False, 4)])
def test_a_prompt_one_token_over_the_caches_edge_is_refused(shift_label, block_rows):
    made = make_generator(random_models(shift_label=shift_label), cache_slots=40)
    fitting = [1] * (24 - block_rows)
    made.check_prompt(fitting, "prompt 0")
    with pytest.raises(DataError, match=f"prompt 1 needs 41 cache rows .*{block_rows} block.* is 40"):
        made.generate([fitting, [*fitting, 1]], "domino")
    assert not made.compiled  # told before anything runs


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "prompt 0 is empty"), ([3, 64], "token id 64, but the target has 64"), ([-2, 3], "token id -2")],
)
def test_a_prompt_that_cannot_be_is_refused(prompt, message):
    with pytest.raises(DataError, match=message):
        generator(1, GREEDY).generate([prompt], "domino")


def test_modes_that_the_models_cannot_do_are_refused():
    target, params = random_target()
    with pytest.raises(DominoError, match="needs a drafter"):
        make_generator(Models(target, params)).generate([[1]], "backbone")
    with pytest.raises(DominoError, match="plain DFlash"):
        make_generator(random_models(head="none")).generate([[1]], "domino")
    with pytest.raises(DominoError, match="'forest' is not one of"):
        generator(1, GREEDY).generate([[1]], "forest")


def test_plain_decoding_needs_no_drafter():
    target, params = random_target()
    made = make_generator(Models(target, params))
    assert made.generate([[7]], "autoregressive") == generator(1, GREEDY).generate([[7]], "autoregressive")


def test_buckets_are_powers_of_two_up_to_the_cache():
    made = make_generator(random_models(), cache_slots=100)
    assert [made.bucket(length) for length in (1, 16, 17, 32, 33, 64, 65, 100)] == [16, 16, 32, 32, 64, 64, 100, 100]


class Compilations:
    """Counts the programs that XLA is asked to build while it is open."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self.listen)
        return self

    def listen(self, event: str, seconds: float, **_):
        self.count += event.endswith("backend_compile_duration")

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self.listen)


def test_one_program_per_bucket_and_none_after_warm_up():
    """20 requests of 1 to 39 tokens: three buckets for a whole batch and for a row, one program of rounds."""
    made = make_generator(random_models(), batch_size=2, sampling=WARM)
    prompts = random_prompts(20, 1, 39)
    for length in (1, 17, 33):
        made.generate([[1] * length] * 3, "domino")
    prefills = {("prefill", rows, bucket, 64, False, None) for rows in (1, 2) for bucket in (16, 32, 64)}
    assert set(made.compiled) == {*prefills, ("admit", 2, 64, 1, 64, False, None), ("draft", 2, 64, None, True)}
    with Compilations() as seen:
        clocks = [made.generator.generate(made.models, prompts, mode).clock for mode in ("domino", "draft")]
        made.generate(prompts[:3], "domino", [100, 7, 5])
    assert (seen.count, len(made.compiled)) == (0, 8)
    assert [clock.compile_seconds for clock in clocks] == [0.0, 0.0]


def test_the_counter_of_compilations_counts():
    with Compilations() as seen:
        jax.jit(lambda x: x * 3 + 1)(jnp.arange(7.0)).block_until_ready()
    assert seen.count > 0


def test_a_generation_is_one_dispatch_of_each_program():
    made = generator(8, WARM)
    made.generate(random_prompts(8), "domino")
    calls = []
    programs = dict(made.compiled)
    for key, program in programs.items():
        made.compiled[key] = lambda *arguments, key=key, program=program: calls.append(key) or program(*arguments)
    made.generate(random_prompts(8), "domino")
    made.compiled.update(programs)
    assert calls == [("prefill", 8, 16, 64, False, None), ("draft", 8, 64, None, True)]
