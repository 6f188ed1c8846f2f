"""Answers of the target: reading them, refusing those of others, and the rounds of a decoding as a walk."""

import dataclasses

import pytest

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.acceptance import accept_lengths, tau_per_prompt, tau_pooled
from domino_jax.decoding.answers import AnswerPasses, TargetAnswer, check_answers, count_cut, read_answers
from domino_jax.decoding.evaluate import Evaluation
from domino_jax.decoding.requests import Request, recorded
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.runtime.errors import DataError
from tests.helpers.decoding_models import make_generator, random_models, random_prompts, random_target
from tests.helpers.train_runs import write_rows

IDS = TextCodec(None, False)  # rows of token ids alone
WARM = SamplingParams(1.0, top_k=30)


def test_rounds_are_a_walk_over_the_accepted_drafts():
    accepted = [2, 0, 1, 0, 0]
    walks = {width: accept_lengths(accepted, width) for width in (0, 1, 2, 8)}
    assert walks == {0: [1] * 5, 1: [2, 2, 1], 2: [3, 1, 1], 8: [3, 1, 1]}
    assert accept_lengths([5, 4, 3], 8) == [3]  # cut where the answer ends
    assert accept_lengths([], 4) == []  # one token, from the prefill
    assert tau_pooled([[3, 1], [], [2]]) == 2.0 and tau_per_prompt([[3, 1], [], [4]]) == 3.0


def test_an_answer_is_the_last_one_of_its_row_with_the_noise_of_its_place(tmp_path):
    rows = [
        {"id": "a", "token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "task": "sums"},
        {"token_ids": [1, 2, 3, 4, 9, 9], "loss_mask": [0, 1, 0, 1, 1, 0], "temperature": 0.7, "top_k": 20},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    greedy = Request(0, 0, None, SamplingParams())
    assert read_answers(path, IDS, 1) == [TargetAnswer("a", [5, 6], [7, 8], greedy, "sums")]
    [_, second] = read_answers(path, IDS)
    assert second == TargetAnswer(f"{path}:2", [1, 2, 3], [4, 9], Request(1, 0, None, SamplingParams(0.7, 20)))


def test_the_sampling_in_a_row_goes_with_it_to_another_file_and_place(tmp_path):
    def read(rows):
        return {answer.id: answer.request for answer in read_answers(write_rows(tmp_path / "rows.jsonl", rows), IDS)}

    rows = [{"id": str(place), "token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]} for place in range(3)]
    requests = [Request(place, 42, None, WARM) for place in range(3)]
    rows = [row | {"sampling": recorded(request)} for row, request in zip(rows, requests, strict=True)]
    assert read(rows) == read(rows[::-1]) == dict(zip("012", requests, strict=True))
    with pytest.raises(DataError, match="sampling {'seed': 1}, which regenerate does not write"):
        read([{**rows[0], "sampling": {"seed": 1}}])
    unrecorded = {"id": "a", "token_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "temperature": 0.5, "seed": 9}
    unrecorded |= {"sampling": None, "top_p": None}  # of a table with rows of several makers
    assert read([unrecorded]) == {"a": Request(0, 9, None, SamplingParams(0.5))}


def test_answers_that_a_limit_cut_are_those_without_a_stop_token():
    assert count_cut([[5, 2], [5, 6], [7], [3], []], (2, 3)) == 2


def test_rows_without_an_answer_and_answers_that_the_models_cannot_read_are_refused(tmp_path):
    for rows, message in (
        ([], "holds no answers"),
        ([{"token_ids": [1, 2], "loss_mask": [1, 0]}], ":1: the row has no answer"),
        ([{"token_ids": [1, 2]}], "loss_mask has no"),
    ):
        with pytest.raises(DataError, match=message):
            read_answers(write_rows(tmp_path / "rows.jsonl", rows), IDS)
    for answer, message in (
        ([3] * 600, "row a has 602 tokens, but the target's max_position_embeddings is 512"),
        ([3], "rows.jsonl: every answer has one token"),
        ([64], "row a holds token id 64, but the target has 64 embedding rows"),
    ):
        with pytest.raises(DataError, match=message):
            check_answers([TargetAnswer("a", [1, 2], answer, Request(0))], random_models(), "rows.jsonl")


@pytest.fixture(scope="module")
def sampled():
    """Six answers of the target with their requests, and its models."""
    models, prompts = random_models(), random_prompts(6, 3, 9)
    made = make_generator(models, batch_size=2, sampling=WARM)
    requests = [Request(place, 7, None, WARM) for place in range(6)]
    texts = [one.token_ids for one in made.generate(prompts, "autoregressive", requests)]
    rows = enumerate(zip(prompts, texts, requests, strict=True))
    return models, [TargetAnswer(f"row {place}", *row) for place, row in rows]


def passes_of(answers) -> AnswerPasses:
    return AnswerPasses(answers, DraftSettings(), rows=2)


@pytest.mark.long
def test_answers_of_the_target_pass_and_those_of_another_one_or_without_their_seed_do_not(sampled):
    models, answers = sampled
    passes_of(answers).chosen_share(models, "rows.jsonl")
    greedy = [dataclasses.replace(one, request=Request(0, 0, None, SamplingParams())) for one in answers]
    with pytest.raises(DataError, match=r"rows.jsonl: \d+\.\d% of the answers' tokens .* in row row 0") as refused:
        passes_of(greedy).chosen_share(models, "rows.jsonl")
    assert refused.value.exit_code == 3 and "seed" in str(refused.value)
    other, params = random_target(tied=True)
    with pytest.raises(DataError, match="what this target would choose"):
        passes_of(answers).chosen_share(models.replace(target=other, target_params=params), "rows.jsonl")


@pytest.mark.long
def test_an_evaluation_gives_tau_at_the_widths_that_the_block_has(sampled):
    models, answers = sampled
    passes, stopped = passes_of(answers), []
    evaluation = Evaluation(models.replace(drafter_params=None), passes, 3)
    found = evaluation(models.drafter_params, lambda: stopped.append(1))
    taus = [found[f"eval_tau_{drafts}"] for drafts in (1, 2, 4)]
    assert 1.0 <= taus[0] <= taus[1] <= taus[2] and "eval_tau_8" not in found and len(stopped) == 2
    assert taus[1] <= found["eval_tau"] <= taus[2] and len(found["eval_accept_by_position"]) == 3
    assert {"eval_tau_per_prompt", "eval_tau_backbone", "eval_seconds"} < found.keys()
    with pytest.raises(KeyboardInterrupt):
        evaluation(models.drafter_params, lambda: (_ for _ in ()).throw(KeyboardInterrupt))


def test_what_an_evaluation_measures_with_is_its_answers_and_how_rounds_draft(sampled):
    models, answers = sampled
    fewer = AnswerPasses(answers, DraftSettings(head_candidates=5), rows=2)
    others = [Evaluation(models, passes_of(answers), 2), Evaluation(models, fewer, 3)]
    others += [Evaluation(models, passes_of(answers[:5]), 3)]
    names = [one.measured_with for one in (Evaluation(models, passes_of(answers), 3), *others)]
    assert len({*names}) == 4 and Evaluation(models, passes_of(answers), 3).measured_with == names[0]
