"""conversations.py: turns, batches of neighbours, and earlier answers in the row of a later one."""

import pytest

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.conversations import AnsweredPrompt, converse, find_answer, first_turn, output_row, split_turns
from domino_jax.decoding.generate import Generation
from domino_jax.decoding.prompts import Prompt
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
    done = Generation([5, 6], [], "stop")
    one = AnsweredPrompt(Prompt("a", [1, 8, 9, 2], 0), done, [([1], [8, 9])])
    row = output_row(one, TextCodec(None, False))
    assert (row["token_ids"], row["loss_mask"]) == ([1, 8, 9, 2, 5, 6], [0, 1, 1, 0, 1, 1])


def test_a_conversation_that_no_longer_fits_ends_with_the_answers_it_has():
    class Answerer:
        def fits(self, prompt):
            return len(prompt) < 20

        def answer(self, prompts, between):
            return [Generation([ord("y")], [], "stop") for _ in prompts]

    row = {"id": "a", "messages": [{"role": "user", "content": text} for text in ("hi", "a far longer text")]}
    codec = TextCodec(BytesTokenizer(), False)
    [one] = converse([first_turn(row, 0, codec)], Answerer(), codec)
    assert one.tokens == 1 and one.answer.token_ids == [ord("y")]
    assert [message["content"] for message in output_row(one, codec)["messages"]] == ["hi", "y"]
