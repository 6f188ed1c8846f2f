"""conversations.py: turns, batches of neighbours, and earlier answers in the row of a later one."""

import types

import pytest

from domino_jax import regenerate
from domino_jax.data.answer_files import ProcessGroup
from domino_jax.data.chat import TextCodec, training_rows
from domino_jax.decoding.conversations import AnsweredPrompt, converse, find_answer, first_turn, output_row, split_turns
from domino_jax.decoding.generate import Generation
from domino_jax.decoding.prompts import Prompt
from domino_jax.decoding.requests import Request
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.runtime.errors import DataError
from tests.helpers.data_files import BytesTokenizer


def test_turns_are_the_messages_before_each_answer():
    roles = ("system", "user", "user", "assistant", "tool")
    system, first, second, answer, tool = ({"role": role, "content": str(i)} for i, role in enumerate(roles))
    assert split_turns([system, first, answer, second], "row") == [[system, first], [second]]
    assert split_turns([first, second, answer], "row") == [[first], [second]]
    with pytest.raises(DataError, match="role 'tool'"):
        split_turns([first, tool], "row")
    with pytest.raises(DataError, match="no message is a user's"):
        split_turns([system, answer], "row")


def test_an_earlier_answer_is_found_after_its_prompt_or_not_at_all():
    assert find_answer([1, 2, 8, 9, 3], [1, 2], [8, 9]) == 2
    assert find_answer([1, 2, 8, 9, 3], [1, 2, 7, 7], [8, 9]) == 2  # the think block went
    assert find_answer([1, 2, 8, 5, 3], [1, 2], [8, 9]) is None
    assert find_answer([8, 9, 2, 5, 3], [8, 9], [8, 9]) is None


def test_an_earlier_answer_is_supervised_in_its_place():
    done, before = Generation([5, 6], [], "stop"), Generation([8, 9], [], "stop")
    one = AnsweredPrompt(Prompt("a", [1, 8, 9, 2], 0), done, [([1], before)])
    row = output_row(one, TextCodec(None, False), DecodeSettings())
    assert (row["token_ids"], row["loss_mask"]) == ([1, 8, 9, 2, 5, 6], [0, 1, 1, 0, 1, 1])
    assert "earlier_turns" not in row


def test_an_answer_that_history_keeps_in_part_is_learned_in_a_row_of_its_turn():
    """Its thoughts, 3 and 4, are gone; the answer of the second turn is kept."""
    turns = [([1], Generation([3, 4, 8], [], "length")), ([1, 8, 2], Generation([7, 7], [], "stop"))]
    one = AnsweredPrompt(Prompt("a", [1, 8, 2, 7, 7, 2], 0), Generation([5, 6], [], "stop"), turns)
    row = output_row(one, TextCodec(None, False), DecodeSettings(seed=3))
    assert (row["token_ids"], row["loss_mask"]) == ([1, 8, 2, 7, 7, 2, 5, 6], [0, 0, 0, 1, 1, 0, 1, 1])
    first = {"token_ids": [1, 3, 4, 8], "loss_mask": [0, 1, 1, 1], "finish_reason": "length"}
    assert row["earlier_turns"] == [first]
    learned = [make() for make in training_rows(None, row, thinking=True, where="row")]
    assert [one.token_ids.tolist() for one in learned] == [first["token_ids"], row["token_ids"]]
    assert [one.loss_mask.tolist() for one in learned] == [first["loss_mask"], row["loss_mask"]]


def test_a_row_records_the_sampling_of_its_answer():
    prompt = {"id": "a", "token_ids": [1, 2], "temperature": 0.5, "max_new_tokens": 3}
    one = AnsweredPrompt(first_turn(prompt, 4, TextCodec(None, False)), Generation([5, 6], [], "stop"))
    row = output_row(one, TextCodec(None, False), DecodeSettings(seed=3))
    warm = {"seed": 3, "noise": 4, "temperature": 0.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert (row["sampling"], row["temperature"], row["max_new_tokens"]) == (warm, 0.5, 3)
    seeded = first_turn({"id": "a", "token_ids": [1, 2], "seed": 7}, 4, TextCodec(None, False))
    assert seeded.request == Request(0, 7)


def test_a_conversation_that_no_longer_fits_ends_with_the_answers_it_has_and_is_counted(tmp_path, capsys):
    class Answerer:
        settings, seconds = DecodeSettings(), 1.0

        def fits(self, prompt):
            return len(prompt.token_ids) < 20

        def answer(self, prompts, between):
            return [Generation([ord("y")], [], "stop") for _ in prompts]

    row = {"id": "a", "messages": [{"role": "user", "content": text} for text in ("hi", "a far longer text")]}
    codec = TextCodec(BytesTokenizer(), False)
    [one] = converse([first_turn(row, 0, codec)], Answerer(), codec)
    assert one.tokens == 1 and one.answer.token_ids == [ord("y")]
    assert [message["content"] for message in output_row(one, codec, DecodeSettings())["messages"]] == ["hi", "y"]
    files = types.SimpleNamespace(processes=ProcessGroup(0, 1), ids=["a"], output="OUT", part=tmp_path / "part.jsonl")
    regenerate.answer([[first_turn(row, 0, codec)]], files, Answerer(), codec, set())
    assert "1 conversations end early" in capsys.readouterr().out
