"""assets/make_hub_prompts.py: conversations of a data set become prompt rows that regenerate reads."""

import collections
import json
import sys
import types

import pytest

from assets import make_hub_prompts
from domino_jax.data.prompts import read_prompts
from domino_jax.decoding.conversations import split_turns


def asked(*turns):
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


def made(tmp_path, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["make_hub_prompts", f"--output={tmp_path / 'prompts.jsonl'}", *flags])
    make_hub_prompts.main()


def test_the_turns_of_system_and_user_are_kept_and_the_answers_left_out():
    row = asked(("system", "Be brief."), ("human", "Hi"), ("gpt", "Hello."), ("human", "Bye"), ("gpt", "Bye."))
    messages = make_hub_prompts.user_turns(row)
    expected = [("system", "Be brief."), ("user", "Hi"), ("user", "Bye")]
    assert messages == [{"role": role, "content": text} for role, text in expected]
    assert [len(turn) for turn in split_turns(messages, "row")] == [2, 1]
    plain = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    assert make_hub_prompts.user_turns(plain) == plain["messages"][:1]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (asked(("human", "Hi"), ("tool", "{}")), "a turn of 'tool'"),
        (asked(("gpt", "Hello.")), "no user's turn"),
        (asked(("human", "")), "an empty one"),
        (asked(("human", "x" * 11)), "more than 10 characters"),
    ],
)
def test_a_row_that_cannot_be_answered_is_left_out_and_counted(row, reason):
    left_out = collections.Counter()
    assert list(make_hub_prompts.prompt_rows([row], 10, left_out)) == []
    [(found, count)] = left_out.items()
    assert reason in found and count == 1


def test_the_hub_is_asked_for_the_split_train_and_parts_take_turns(tmp_path, monkeypatch, capsys):
    calls = []

    def load(name, **arguments):
        calls.append((name, arguments))
        return [asked(("human", f"Question {number}?")) for number in range(5)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    made(tmp_path, monkeypatch, "--dataset=someone/prompts", "--parts=2")
    assert calls == [("someone/prompts", {"split": "train", "streaming": True})]
    parts = [read_prompts(tmp_path / f"prompts-{part}-of-2.jsonl") for part in range(2)]
    assert [[row["id"] for row in rows] for rows in parts] == [["0", "2", "4"], ["1", "3"]]
    assert capsys.readouterr().out.startswith("5 prompts in ")


def test_a_file_is_read_where_there_is_one(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text(json.dumps(asked(("human", "Größe?"))) + "\n", encoding="utf-8")
    made(tmp_path, monkeypatch, f"--dataset={tmp_path / 'rows.jsonl'}")
    [row] = read_prompts(tmp_path / "prompts.jsonl")
    assert row == {"id": "0", "messages": [{"role": "user", "content": "Größe?"}]}
