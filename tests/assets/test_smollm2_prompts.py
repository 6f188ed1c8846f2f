"""assets/smollm2_prompts: what the shipped files hold, what is kept apart, and the generator that wrote them."""

import importlib.util
import random
import re
import sys
from collections import Counter

import pytest

from assets import make_smollm2_prompts as maker
from assets.near_duplicates import Index, neighbours, shingles
from assets.smollm2_grammar import COMPUTED, SLOT, Prompt, article, is_held_out, plural
from assets.smollm2_words import NOUN_CLASSES
from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import read_jsonl, read_prompts
from domino_jax.recipe.decoding import read_file_rows
from domino_jax.weights import hf
from tests.helpers.paths import ASSETS

FOLDER = ASSETS / "smollm2_prompts"
END = 2  # <|im_end|>
PACKAGES = ("wordfreq", "countryinfo", "periodictable")
FROM_PACKAGES = {*NOUN_CLASSES, "noun", "adjective", "sentence", "country", "element", "python", "docs", "function"}
FROM_PACKAGES |= {"docs_sentence", "noun_g", "gloss", "gloss_g", "gloss_sentence", "symbol"}


@pytest.fixture(scope="module")
def files() -> dict[str, list[dict]]:
    return {name: read_prompts(FOLDER / f"prompts_{name}.jsonl") for name in ("train", "heldout")}


@pytest.fixture(scope="module")
def own() -> dict:
    return maker.read_lists(FOLDER)


# ---------------------------------------------------------------------------------------------- the files


def test_every_kind_has_its_share_and_four_kinds_are_only_held_out(files):
    train, held_out = (Counter(row["task"] for row in files[name]) for name in ("train", "heldout"))
    assert (sum(train.values()), sum(held_out.values())) == (6_200, 300)
    assert set(train.values()) == {310}
    assert {kind: held_out[kind] for kind in train} == dict.fromkeys(train, 12)
    assert held_out - Counter(dict.fromkeys(train, 12)) == Counter(dialogue=15, quiz=15, slogan=15, fill_in=15)


def test_the_answers_belong_to_the_training_prompts_one_turn_each(files):
    answers = [row for _, row in read_jsonl(FOLDER / "answers_train.jsonl.gz")]
    assert [row["id"] for row in answers] == [row["id"] for row in files["train"]]
    assert sum(sum(row["loss_mask"]) for row in answers) == 743_393
    for row in answers:
        tokens, mask = row["token_ids"], row["loss_mask"]
        asked, answered = mask.index(1), sum(mask)
        assert len(tokens) == len(mask) and mask[asked:] == [1] * answered
        assert answered == 256 or tokens[-1] == END
        assert answered <= 256 and tokens[asked:].count(END) <= 1


def test_the_first_rows_hold_every_kind(files):
    assert len({row["task"] for row in files["heldout"][:24]}) == 24
    assert len({row["task"] for row in files["train"][:96]}) == 20


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


def test_prompts_are_short_plain_text_without_a_slot_left_open(files):
    for row in (*files["train"], *files["heldout"]):
        [message] = row["messages"]
        text = message["content"]
        assert message["role"] == "user" and text == text.strip() and 10 < len(text) <= 900
        assert "  " not in text or "```" in text, row["id"]
        assert not SLOT.search(text) and not re.search(r"(?<!\.)\.\.(?!\.)", text.partition("```")[0]), row["id"]
    assert sum((FOLDER / f"prompts_{name}.jsonl").stat().st_size for name in files) < 3_000_000


def test_decode_and_the_chat_template_read_every_row(files):
    assert [row["task"] for row in read_file_rows(FOLDER / "prompts_heldout.jsonl", 26)][:3] == [
        "fact",
        "fact",
        "why_how",
    ]
    tokenizer = hf.load_tokenizer(ASSETS / "tiny_qwen3")
    for row in (*files["heldout"], *files["train"][::50]):
        ids = encode_prompt(tokenizer, row, False)
        assert row["messages"][0]["content"] in tokenizer.decode(ids)


# ------------------------------------------------------------------------------------------- the generator


def test_the_generator_writes_the_shipped_files():
    if (
        sys.version_info[:3] != (3, 11, 7)
        or not maker.WORDNET.is_dir()
        or not all(map(importlib.util.find_spec, PACKAGES))
    ):
        pytest.skip("the packages of assets/make_smollm2_prompts.py are not installed")
    for name, rows in maker.shipped_rows(maker.WORDNET).items():
        assert maker.jsonl(rows) == (FOLDER / f"prompts_{name}.jsonl").read_text(encoding="utf-8")


def test_every_slot_has_a_list(own):
    templates = maker.read_templates(FOLDER)
    known = {*own["subjects"], *own["pieces"], *COMPUTED, *FROM_PACKAGES, *maker.country_slots({})}
    texts = [line for kinds in templates.values() for lines in kinds.values() for line in lines]
    texts += [entry for entries in own["pieces"].values() for entry in entries]
    slots = {match[4] for text in texts for match in SLOT.finditer(text) if match[4]}
    assert slots - known == set()
    assert not any("{" in SLOT.sub("", text) or "}" in SLOT.sub("", text) for text in texts)


def small_side(seed: int) -> list[str]:
    words = {"animal": ("owl", "fox", "wolf"), "thing": ("coins", "keys")}
    pieces = {"brief": ("", "Be {tone}."), "tone": ("kind", "open")}
    template = "{a:animal} meets {s:animal2}. {thing} lie there: {2..9}, as {a:animal} sees.{brief}"
    random_ = random.Random(seed)
    return [Prompt(words, pieces, COMPUTED, random_).fill(template) for _ in range(20)]


def test_a_slot_keeps_its_value_takes_its_form_and_depends_on_the_seed_alone():
    texts = small_side(1)
    assert texts == small_side(1) != small_side(2)
    for text in texts:
        first, second, rest = text.split(" ", 3)[:2], text.split()[3], text.split(". ", 1)[1]
        assert first[0] == ("an" if first[1] == "owl" else "a")
        assert second in ("owls.", "foxes.", "wolves.") and second.rstrip(".") != plural(first[1])
        assert rest.startswith(("Coins lie", "Keys lie")) and f"as {' '.join(first)} sees." in rest
        assert text.endswith((" sees.", " Be kind.", " Be open."))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("hour", "an hour"),
        ("unicorn", "a unicorn"),
        ("umbrella", "an umbrella"),
        ("frog", "a frog"),
        ("SMS", "an SMS"),
    ],
)
def test_articles_follow_the_sound(word, expected):
    assert article(word) == expected


def test_similarity_is_the_jaccard_index_of_five_word_runs():
    assert shingles("Is it so?") == {("is", "it", "so", "?")}
    assert len(shingles("one two three four five six")) == 2
    index = Index(["one two three four five six", "another prompt"])
    assert index.nearest("One two three four five seven") == 1 / 3
    assert index.nearest("one two three four five six", leave_out=0) == 0.0
    assert neighbours(["a b", "a b", "c"]) == [1.0, 1.0, 0.0]
