"""assets/make_hub_prompts.py: conversations of a data set become prompt rows that regenerate reads."""

import json
import sys
import types

from assets import make_hub_prompts
from domino_jax.data.prompts import read_prompts


def asked(*turns):
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


def made(tmp_path, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["make_hub_prompts", f"--output={tmp_path / 'prompts.jsonl'}", *flags])
    make_hub_prompts.main()


def test_the_messages_of_system_and_user_stay_and_the_answers_are_left_out():
    row = asked(("human", "Hi"), ("gpt", "Hello."), ("human", "Bye"), ("gpt", "Bye."))
    row |= {"system": "Be brief.", "tools": '[{"name": "add"}]', "source": "x"}
    expected = [("system", "Be brief."), ("user", "Hi"), ("user", "Bye")]
    assert make_hub_prompts.prompt_of(row, 3, 100) == {
        "id": "3",
        "messages": [{"role": role, "content": text} for role, text in expected],
        "tools": [{"name": "add"}],
    }
    plain = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}], "tools": None}
    assert make_hub_prompts.prompt_of(plain, 0, 100) == {"id": "0", "messages": plain["messages"][:1]}


BAD_ROWS = [
    (asked(("human", "Hi"), ("tool", "{}")), "role"),
    (asked(("gpt", "Hello.")), "user"),
    (asked(("human", "")), "no text"),
    (asked(("human", "x" * 11)), "--max-characters"),
    ({"messages": None}, "messages or conversations"),
    ({"text": "a"}, "messages or conversations"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "message"),
    ({"messages": [{"from": "human", "value": "Hi"}]}, "message"),
    (asked(("human", "\ud800")), "surrogate"),
]


def test_rows_that_cannot_be_answered_are_left_out_and_counted(tmp_path, monkeypatch, capsys):
    good = {"conversations": [{"role": "user", "content": "Q"}]}
    lines = [json.dumps(row) for row, _ in BAD_ROWS] + ["{", json.dumps(good)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    made(tmp_path, monkeypatch, f"--dataset={tmp_path / 'rows.jsonl'}", "--max-characters=10")
    [row] = read_prompts(tmp_path / "prompts.jsonl")
    assert row == {"id": "10", "messages": [{"role": "user", "content": "Q"}]}
    shown = capsys.readouterr().out
    assert "1 prompts" in shown and sum(int(line.split()[2]) for line in shown.splitlines()[1:]) == 10


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
