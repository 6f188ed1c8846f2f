"""held_out.py: the choice of held-out prompts, and that no row with them is trained on."""

from tests.helpers.chat import encode_prompt, make_tokenizer, turns
from tests.helpers.data_files import batches_of, take, write_rows


def answers(count: int, prompt: int = 2) -> list[dict]:
    """Row k: a prompt of ids 100 k, 100 k + 1, …, then three supervised tokens."""
    mask = [0] * prompt + [1] * 3
    return [{"token_ids": [100 * k + i for i in range(prompt + 3)], "loss_mask": mask} for k in range(count)]


def prompts_of(batches) -> list[list[int]]:
    return [row["token_ids"] for row in batches.rows.held_out_prompts()]


def trained_on(batches, rows: int) -> set[int]:
    """The first ids of the rows of one epoch."""
    return {int(tokens[0]) for batch in take(batches, rows // 4) for tokens in batch["tokens"]}


def test_held_out_prompts_are_not_trained_on_and_the_rest_is(tmp_path):
    rows = answers(40)
    rows.append(rows[7] | {"token_ids": [*rows[7]["token_ids"][:2], 7, 7, 7]})  # another answer to the prompt of row 7
    lines = []
    batches = batches_of(write_rows(tmp_path, rows), held_out=2, report=lines.append)
    chosen = {prompt[0] for prompt in prompts_of(batches)}
    assert len(chosen) == 2 and all(prompt == [prompt[0], prompt[0] + 1] for prompt in prompts_of(batches))
    assert trained_on(batches, 40) == {100 * k for k in range(40)} - chosen
    left_out = 3 if 700 in chosen else 2
    assert lines[0].endswith(f"{41 - left_out} of 41 rows are trained on, 0 have no anchor")
    [first, _] = batches.rows.held_out_prompts()
    assert first["id"].startswith(f"{tmp_path}/rows.jsonl:")
    assert lines[1] == f"held out for evaluation: 2 prompts, {left_out} rows with these prompts"


def test_prompts_of_an_earlier_start_are_held_out_of_other_rows(tmp_path):
    before = [{"id": "rows:8", "token_ids": [700, 701]}, {"id": "gone", "token_ids": [1, 2]}]
    batches = batches_of(write_rows(tmp_path, answers(40)), held_out=2, held_out_before=before)
    assert batches.rows.held_out_prompts() == before and batches.rows.num_held_out == 1
    assert trained_on(batches, 40) == {100 * k for k in range(40)} - {700}
    named = batches_of(write_rows(tmp_path, answers(40)), held_out=0, held_out_before=before)  # eval.prompts
    assert named.rows.held_out_prompts() == [] and len(named.rows) == 40


def test_every_start_every_process_and_any_order_of_the_rows_choose_the_same(tmp_path):
    file = write_rows(tmp_path, answers(60))
    first = prompts_of(batches_of(file, held_out=3, cache=tmp_path / "cache"))
    again = batches_of(file, held_out=3, cache=tmp_path / "cache", rows=slice(2, 4), seed=5)  # from the stored index
    reversed_rows = write_rows(tmp_path, answers(60)[::-1], "other.jsonl")
    assert first == prompts_of(again) == prompts_of(batches_of(reversed_rows, held_out=3))


def test_rows_whose_prompts_evaluate_the_drafter_are_counted(tmp_path):
    rows = batches_of(write_rows(tmp_path, answers(40)), held_out=1).rows
    [held_out] = prompts_of(batches_of(write_rows(tmp_path, answers(40)), held_out=1))
    assert rows.count_evaluated([held_out]) == 0  # it is not trained on
    others = [k for k in range(40) if 100 * k != held_out[0]]
    assert rows.count_evaluated([[100 * k, 100 * k + 1] for k in others[:3]] + [[7, 8]]) == 3
    assert rows.counts()["rows_with_evaluated_prompts"] == 3


def test_conversations_of_several_turns_are_found_by_their_first_prompt(tmp_path):
    """A row's prompt ends before its first answer; what evaluates the drafter is the conversation before its last."""
    first = list(range(100, 120))
    mask = [0] * 20 + [1, 1, 0, 0, 1, 1]
    turns = [{"token_ids": [*first[:-1], k, 1, 2, 3, 4, 5, 6], "loss_mask": mask} for k in (7, 8)]
    rows = batches_of(write_rows(tmp_path, [*turns, *answers(40)]), max_length=32).rows
    assert rows.count_evaluated([[*first[:-1], 7, 1, 2, 3, 4]]) == 1
    assert rows.count_evaluated([[*first[:-1], 9, 1, 2, 3, 4], [0, 1, 5, 6]]) == 0  # two tokens begin many texts


def test_a_question_of_several_turns_is_held_out_as_it_is_asked_and_with_all_its_rows(tmp_path):
    """The template drops the empty think block before an answer that others follow."""
    tokenizer, asked = make_tokenizer(), [f"What is {number}?" for number in range(40)]
    rows = [{"messages": turns(question, "One.", "Sure?", "Yes.")} for question in asked]
    rows += [{"messages": turns(question, "Two.")} for question in asked]
    batches = batches_of(write_rows(tmp_path, rows), tokenizer, held_out=2, max_length=256)
    prompts = {question: encode_prompt(tokenizer, {"messages": turns(question)}, False) for question in asked}
    [first, second] = (next(q for q in asked if prompts[q] == held_out) for held_out in prompts_of(batches))
    learned = [tokenizer.decode(batches.rows[place][1].token_ids) for place in range(len(batches.rows))]
    assert len(learned) == 76 and not any(first in text or second in text for text in learned)
    assert batches.rows.count_evaluated(prompts.values()) == 76


def test_a_question_that_was_answered_with_thoughts_is_held_out_without_the_empty_block(tmp_path):
    tokenizer, thinks = make_tokenizer(), {"chat_template_kwargs": {"enable_thinking": True}}
    rows = [{"messages": turns(f"Why {number}?", "<think>\nHm.\n</think>\n\nSo."), **thinks} for number in range(40)]
    asked = [encode_prompt(tokenizer, {"messages": row["messages"][:1], **thinks}, False) for row in rows]
    [prompt] = prompts_of(batches_of(write_rows(tmp_path, rows), tokenizer, held_out=1, max_length=256))
    assert prompt in asked
