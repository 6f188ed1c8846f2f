"""assets/smollm2_prompts: what the shipped files hold, and what is kept apart."""

from collections import Counter

import pytest

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
    bare = Counter(row["task"] for row in files["heldout"] if not row["subjects"])
    assert bare == Counter(arithmetic=5, letter=1)  # of numbers and weekdays alone
