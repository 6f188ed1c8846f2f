"""regenerate.py: the target's own tokens, masked; killed at any byte and continued, the file comes out the same."""

import dataclasses
import json
import pathlib

import pytest

from domino_jax import cli, regenerate
from domino_jax.data.chat import encode_training_row
from domino_jax.data.prompts import read_jsonl
from domino_jax.decoding.generate import Generation
from domino_jax.decoding.sampling import SamplingParams
from domino_jax.errors import DataError, DominoError
from domino_jax.loading import load_target

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "tied_shift"
CASES = json.loads((GOLDEN / "golden.json").read_text())["generate"]
SETTINGS = {
    "batch_size": 2,
    "max_new_tokens": 12,
    "sampling": SamplingParams(),
    "seed": 0,
    "thinking": False,
}
PROMPTS = [{"id": f"p{index}", "token_ids": case["prompt"]} for index, case in enumerate(CASES)]
PROMPTS.append({"id": "p4", "token_ids": CASES[2]["prompt"][:9]})


class BytesTokenizer:
    """Bytes are ids; a turn is R(text|) with R the role's first letter; an open A asks for the assistant's."""

    chat_template = "R(text|)"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, enable_thinking):
        assert not tokenize
        turns = "".join(f"{message['role'][0].upper()}({message['content']}|)" for message in messages)
        return turns + "A(" * add_generation_prompt

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return list(text.encode())

    def decode(self, ids, skip_special_tokens):
        return bytes(token for token in ids if token < 128 and token != ord("|")).decode()


@pytest.fixture(scope="module")
def target():
    return load_target(str(GOLDEN / "target"), "float32")


@pytest.fixture(scope="module")
def generators():
    """Compiled generators, kept between the runs of this module."""
    return {}


@pytest.fixture
def shared(monkeypatch, generators):
    """Lets every run use the generators of the runs before it that had the same settings."""
    make = regenerate.Answerer.__init__

    def init(self, loaded, *settings):
        make(self, loaded, *settings)
        self.generators = generators.setdefault((id(loaded.params), settings), {})

    monkeypatch.setattr(regenerate.Answerer, "__init__", init)


@pytest.fixture
def rows_file(target, shared, tmp_path):
    """A finished file of five rows."""
    path = tmp_path / "rows.jsonl"
    regenerate.regenerate_rows(target, PROMPTS, path, **SETTINGS)
    return path


def rows_of(path):
    return {row["id"]: row for _, row in read_jsonl(path)}


def test_rows_hold_the_prompt_and_what_the_target_says_to_it(rows_file):
    rows = rows_of(rows_file)
    assert set(rows) == {"p0", "p1", "p2", "p3", "p4"}
    for index, case in enumerate(CASES):
        row = rows[f"p{index}"]
        assert row["token_ids"] == case["prompt"] + case["output"][:12]
        assert row["loss_mask"] == [0] * len(case["prompt"]) + [1] * 12
        assert row["finish_reason"] == "length"
        trained_on = encode_training_row(None, {key: row[key] for key in row}, thinking=False)
        assert trained_on.token_ids.tolist() == row["token_ids"]


def test_killed_at_any_byte_and_continued_the_file_is_the_same(target, rows_file):
    whole = rows_file.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (0, 1, ends[0] - 1, ends[0], ends[0] + 1, ends[1] + 7, ends[3] - 2, ends[4] - 1):
        rows_file.write_bytes(whole[:cut])
        regenerate.regenerate_rows(target, PROMPTS, rows_file, **SETTINGS)
        assert rows_file.read_bytes() == whole, cut


def test_a_whole_file_is_left_alone(target, rows_file, capsys):
    before = rows_file.stat().st_mtime_ns
    regenerate.regenerate_rows(target, PROMPTS, rows_file, **SETTINGS)
    assert rows_file.stat().st_mtime_ns == before
    assert "holds all 5 answers already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "prompts", "said"),
    [
        ({"max_new_tokens": 11}, PROMPTS, "max_new_tokens: 12 there, 11 now"),
        ({"seed": 3}, PROMPTS, "seed: 0 there, 3 now"),
        ({"sampling": SamplingParams(0.5)}, PROMPTS, "temperature: 0.0 there, 0.5 now"),
        ({}, PROMPTS[:4], "prompts_sha256"),
    ],
)
def test_a_file_made_with_something_else_is_refused(target, rows_file, changes, prompts, said):
    with pytest.raises(DominoError, match=said) as refused:
        regenerate.regenerate_rows(target, prompts, rows_file, **{**SETTINGS, **changes})
    assert refused.value.exit_code == 2 and len(str(refused.value).splitlines()) <= 5


def test_a_file_of_unknown_making_and_doubled_rows_are_refused(target, rows_file):
    first = rows_file.read_bytes().split(b"\n")[0]
    rows_file.write_bytes(first + b"\n" + first + b"\n")
    with pytest.raises(DataError, match=r"rows.jsonl:2: the id 'p\d' is missing or there twice"):
        regenerate.regenerate_rows(target, PROMPTS, rows_file, **SETTINGS)
    rows_file.with_name("rows.jsonl.meta.json").unlink()
    with pytest.raises(DominoError, match="it is not known what the rows were made with"):
        regenerate.regenerate_rows(target, PROMPTS, rows_file, **SETTINGS)


def test_a_row_does_not_depend_on_its_batch(target, shared, rows_file, tmp_path):
    other = tmp_path / "other.jsonl"
    regenerate.regenerate_rows(target, PROMPTS, other, **{**SETTINGS, "batch_size": 5})
    assert rows_of(other) == rows_of(rows_file)


def test_batches_are_neighbours_by_length_within_a_window():
    lengths = [5, 1, 4, 2, 3]
    rows = [regenerate.Conversation({"id": str(i)}, i, [[]], [], [0] * size) for i, size in enumerate(lengths)]
    found = [[len(one.prompt) for one in batch] for batch in regenerate.batches(rows, 2)]
    assert found == [[1, 2], [3, 4], [5]]
    many = [regenerate.Conversation({"id": str(i)}, i, [[]], [], [0] * (100 - i)) for i in range(100)]
    first = next(iter(regenerate.batches(many, 2)))
    assert [one.request for one in first] == [63, 62]  # the shortest two of the first 32 batches


def test_turns_are_what_stands_before_each_answer():
    system, one, two = (
        {"role": role, "content": text} for role, text in (("system", "s"), ("user", "1"), ("user", "2"))
    )
    given = {"role": "assistant", "content": "old"}
    assert regenerate.split_turns([system, one, given, two], "row") == [[system, one], [two]]
    assert regenerate.split_turns([one, two, given], "row") == [[one], [two]]
    with pytest.raises(DataError, match="role 'tool'"):
        regenerate.split_turns([one, {"role": "tool", "content": "x"}], "row")
    with pytest.raises(DataError, match="no message is a user's"):
        regenerate.split_turns([system, given], "row")


def test_every_turn_is_answered_with_the_generated_history(target, shared, tmp_path):
    chat = dataclasses.replace(target, tokenizer=BytesTokenizer())
    messages = [{"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "OLD"}]
    messages += [{"role": "user", "content": "return x"}]
    path = tmp_path / "rows.jsonl"
    prompts = [{"id": "two", "messages": messages}, {"id": "one", "messages": messages[:1]}]
    regenerate.regenerate_rows(chat, prompts, path, **SETTINGS)
    two, one = (rows_of(path)[name] for name in ("two", "one"))
    assert [message["role"] for message in two["messages"]] == ["user", "assistant", "user", "assistant"]
    assert two["messages"][1] == one["messages"][1]
    assert two["messages"][1]["content"] != "OLD"
    before = "U(def f(x):|)A("
    assert one["token_ids"][: len(before)] == list(before.encode())
    assert one["loss_mask"] == [0] * len(before) + [1] * 12
    history = f"{before}{two['messages'][1]['content']}|)U(return x|)A("
    assert two["token_ids"][: len(history)] == list(history.encode())
    assert two["loss_mask"][-12:] == [1] * 12
    # The first answer is supervised only if the history repeats it token for token.
    supervised = [token for token, bit in zip(two["token_ids"], two["loss_mask"], strict=True) if bit]
    assert supervised in (one["token_ids"][-12:] + two["token_ids"][-12:], two["token_ids"][-12:])


def test_an_earlier_answer_is_found_behind_its_prompt_or_not_at_all():
    assert regenerate.find_answer([1, 2, 8, 9, 3], [1, 2], [8, 9]) == 2
    assert regenerate.find_answer([1, 2, 8, 9, 3], [1, 2, 7, 7], [8, 9]) == 2  # the think block went
    assert regenerate.find_answer([1, 2, 8, 5, 3], [1, 2], [8, 9]) is None
    assert regenerate.find_answer([8, 9, 2, 5, 3], [8, 9], [8, 9]) is None


def test_an_earlier_answer_is_supervised_where_it_stands():
    done = Generation([5, 6], [], "stop")
    one = regenerate.Conversation({"id": "a"}, 0, [[]], [], [1, 8, 9, 2], done, [([1], [8, 9])])
    row = regenerate.output_row(one, None)
    assert (row["token_ids"], row["loss_mask"]) == ([1, 8, 9, 2, 5, 6], [0, 1, 1, 0, 1, 1])


def test_a_conversation_that_no_longer_fits_ends_with_the_answers_it_has(target):
    class Answerer:
        def fits(self, prompt):
            return len(prompt) < 20

        def answer(self, conversations):
            return [Generation([ord("y")], [], "stop") for _ in conversations]

    row = {"id": "a", "messages": [{"role": "user", "content": text} for text in ("hi", "a far longer text")]}
    one = regenerate.start_conversation(row, 0, BytesTokenizer(), False)
    assert regenerate.converse([one], Answerer(), BytesTokenizer(), False) == 1
    assert [message["content"] for message in one.messages] == ["hi", "y"]
    assert one.answer.token_ids == [ord("y")]


def test_a_prompt_beyond_the_targets_positions_is_named_before_anything_is_answered(target, tmp_path):
    limit = target.model.config.max_position_embeddings
    prompts = [PROMPTS[0], {"id": "far", "token_ids": [1] * limit}]
    with pytest.raises(DataError, match=f"prompt far has {limit} tokens"):
        regenerate.regenerate_rows(target, prompts, tmp_path / "rows.jsonl", **SETTINGS)
    assert not (tmp_path / "rows.jsonl").read_bytes()


def test_the_command_reads_the_recipe(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"token_ids": CASES[2]["prompt"]}) + "\n")
    output = tmp_path / "new" / "rows.jsonl"
    argv = ["regenerate", f"--config={ROOT / 'configs' / 'tiny.py'}", f"--config.target.path={GOLDEN / 'target'}"]
    argv += ["--config.regenerate.max_new_tokens=5", f"--prompts={prompts}", f"--output={output}"]
    argv += ["--config.regenerate.batch_size=1"]
    with pytest.raises(SystemExit) as left:
        cli.run(regenerate.main, ("config", "prompts", "output"), (), argv)
    assert left.value.code == 0
    assert rows_of(output)["0"]["token_ids"] == CASES[2]["prompt"] + CASES[2]["output"][:5]
    with pytest.raises(SystemExit) as left:
        cli.run(regenerate.main, ("config", "prompts", "output"), (), [*argv, "--config.regenerate.seed=1"])
    assert left.value.code == 2 and "seed: 0 there, 1 now" in capsys.readouterr().err
