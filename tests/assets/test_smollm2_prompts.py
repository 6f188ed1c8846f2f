"""assets/smollm2_prompts: what the shipped files hold, and what is kept apart."""

from collections import Counter

import pytest

from assets import make_smollm2_prompts as maker
from assets.near_duplicates import neighbours
from assets.smollm2_grammar import is_held_out
from domino_jax.data.prompts import read_prompts
from tests.helpers.paths import ASSETS

FOLDER = ASSETS / "smollm2_prompts"


@pytest.fixture(scope="module")
def files() -> dict[str, list[dict]]:
    return {name: read_prompts(FOLDER / f"prompts_{name}.jsonl") for name in ("train", "heldout")}


def test_every_kind_has_its_share_and_four_kinds_are_only_held_out(files):
    train, held_out = (Counter(row["task"] for row in files[name]) for name in ("train", "heldout"))
    assert (sum(train.values()), sum(held_out.values())) == (6_200, 300)
    assert set(train.values()) == {310}
    assert {kind: held_out[kind] for kind in train} == dict.fromkeys(train, 12)
    assert held_out - Counter(dict.fromkeys(train, 12)) == Counter(dialogue=15, quiz=15, slogan=15, fill_in=15)


def test_no_subject_is_on_both_sides(files):
    train, held_out = ({word for row in files[name] for word in row["subjects"]} for name in ("train", "heldout"))
    assert not train & held_out
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, train))
    bare = Counter(row["task"] for row in files["heldout"] if not row["subjects"])
    assert bare == Counter(arithmetic=5, letter=1)  # of numbers and weekdays alone


def test_no_prompt_is_a_near_duplicate_of_one_on_the_other_side(files):
    texts = {name: maker.texts_of(rows) for name, rows in files.items()}
    assert max(neighbours(texts["heldout"], texts["train"])) <= maker.ACROSS
    assert max(neighbours(texts["heldout"])) <= maker.WITHIN
    within = neighbours(texts["train"])
    assert max(within) <= maker.WITHIN
    assert sum(value > 0.5 for value in within) < 0.06 * len(within)


def test_another_count_never_overwrites_the_shipped_files(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["make_smollm2_prompts", "--count=5"])
    with pytest.raises(SystemExit) as stopped:
        maker.main()
    assert stopped.value.code == 2
    assert "--output" in capsys.readouterr().err
