"""Word lists of assets/make_smollm2_prompts.py, read from packages: nouns, sentences, countries, elements, Python.

WordNet's index and data files are read as it publishes them (wndb(5WN)). A noun belongs to a class when its most
frequent sense does; word frequencies keep the everyday ones.
"""

import builtins
import functools
import importlib
import inspect
import pathlib
import re
from collections.abc import Iterator, Sequence

from assets import tiny_tasks

# Class of nouns: the synset above it (lemma and number of the sense), and the least Zipf frequency of a word.
NOUN_CLASSES = {
    "animal": [("animal", 1, 3.2)],
    "food": [("food", 1, 3.3), ("food", 2, 3.1)],
    "plant": [("plant", 2, 3.2)],
    "sport": [("sport", 1, 3.3)],
    "clothing": [("clothing", 1, 3.5)],
    "science": [("science", 1, 3.3)],
    "feeling": [("feeling", 1, 3.6)],
    "music": [("musical instrument", 1, 3.0)],
    "landform": [("geological formation", 1, 3.4)],
}
STARTS = "he she they we I my his her their our the".split()
VERB = re.compile(r"is|are|was|were|has|have|had|can|will|would|could|must|should|gave|took|made|went|came|\w{2,}ed")
# Example sentences with these words are left out.
UNWANTED = re.compile(
    r"\b(kill\w*|murder\w*|rap(e|ed|ist)|sex\w*|naked|nude|drunk\w*|dead|death\w*|die[ds]?|dying|shot|gun\w*|blood\w*|"
    r"suicid\w*|hell|damn\w*|god|christ\w*|jesus|jew\w*|muslim\w*|negro\w*|indian\w*|whore|bitch|ass|breasts?|slave\w*|"
    r"drugs?|cocaine|nazi\w*|hitler|war|bomb\w*|terror\w*|prison\w*|stupid|idiot|fat|ugly|hate[ds]?|tortur\w*|corpse|"
    r"executed|hanged|victim\w*|weapon\w*|enem\w+|queer|gay|virgin\w*|divorc\w*|pregnan\w*|vomit\w*|urin\w*|whip\w*|"
    r"arrest\w*|lover|mistress|wicked|buried|battle|troops|army|attack\w*|abort\w*|beat|devil|demon|church)\b",
    re.IGNORECASE,
)
METHODS = ("str", "list", "dict", "set")
MODULES = (
    "builtins math random statistics itertools functools collections datetime shutil re json textwrap calendar bisect"
    " heapq copy glob operator secrets html urllib.parse contextlib difflib"
).split()
# Names that an everyday question does not ask about.
RARE = re.compile(
    r"variate|_ns|bytes|unregister|register|get_(un|ar)|erfc?|gamma|ulp|frexp|ldexp|a(iter|next)|pr(cal|m)"
)


class WordNet:
    """The nouns, adjectives and example sentences of a WordNet folder (index.noun, data.noun, …)."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.senses: dict[str, list[str]] = {}  # lemma → synsets, the most frequent sense first
        for fields in map(str.split, self._lines("index.noun")):
            self.senses[fields[0].replace("_", " ")] = fields[6 + int(fields[3]) :]
        self.parents: dict[str, list[str]] = {}
        self.lemmas: dict[str, list[str]] = {}  # synset → its words as they are written
        self.glosses: dict[str, str] = {}
        for line in self._lines("data.noun"):
            data, _, gloss = line.partition(" | ")
            fields = data.split()
            count = int(fields[3], 16)
            pointers = fields[5 + 2 * count :]
            self.lemmas[fields[0]] = [fields[4 + 2 * i].replace("_", " ") for i in range(count)]
            self.parents[fields[0]] = [pointers[i + 1] for i in range(len(pointers)) if pointers[i] == "@"]
            self.glosses[fields[0]] = re.split(r"[;:]", gloss)[0].strip()
        self.counts: dict[str, dict[str, int]] = {}  # lemma → part of speech → uses in the tagged corpus
        for fields in map(str.split, self._lines("index.sense")):
            lemma, _, key = fields[0].partition("%")
            parts = self.counts.setdefault(lemma, {})
            part = "nvara"[int(key[0]) - 1]
            parts[part] = parts.get(part, 0) + int(fields[3])

    def _lines(self, name: str) -> Iterator[str]:
        with (self.folder / name).open(encoding="latin-1") as file:
            yield from (line for line in file if not line.startswith("  "))  # the licence is indented

    def is_below(self, synset: str, root: str) -> bool:
        return synset == root or any(self.is_below(parent, root) for parent in self.parents[synset])

    def class_of(self, name: str, dropped: Sequence[str]) -> list[str]:
        """Plain nouns of a class of NOUN_CLASSES, in alphabetical order."""
        found = set()
        for lemma, sense, least in NOUN_CLASSES[name]:
            root = self.senses[lemma][sense - 1]
            for word, synsets in self.senses.items():
                plain = re.fullmatch(r"[a-z]{3,}", word) and word in self.lemmas[synsets[0]] and word != lemma
                if plain and frequency(word) >= least and self.is_below(synsets[0], root):
                    found.add(word)
        return sorted(found - set(dropped))

    def common(self, part: str) -> list[str]:
        """Words that are mostly nouns ("n") or adjectives ("a") and that most people know."""
        return [
            word
            for word, uses in sorted(self.counts.items())
            if re.fullmatch(r"[a-z]{4,10}", word)
            and sum(uses.values()) >= 5
            and uses.get(part, 0) >= 0.9 * sum(uses.values())  # absent: never used as one
            and 3.8 <= frequency(word) <= 5.3
            and not UNWANTED.search(word)
            and not (part == "n" and (word.endswith(("s", "ness")) or word not in self.lemmas[self.senses[word][0]]))
        ]

    def gloss(self, noun: str) -> str:
        """The definition of a noun's most frequent sense, without the examples."""
        return self.glosses[self.senses[noun][0]]

    def sentences(self) -> list[str]:
        """Example sentences: whole, plain and everyday."""
        found = set()
        for name in ("data.verb", "data.noun", "data.adj"):
            for line in self._lines(name):
                found.update(filter(is_everyday, re.findall(r'"([^"]+)"', line.partition(" | ")[2])))
        return sorted(text[0].upper() + text[1:].rstrip(" ,") + "." for text in found)


@functools.cache
def frequency(word: str) -> float:
    """Zipf frequency of an English word: 3 is once in a million words, 6 once in a thousand."""
    from wordfreq import zipf_frequency

    return zipf_frequency(word, "en")


def is_everyday(text: str) -> bool:
    """Whether an example of WordNet can be taken for a whole sentence of frequent words."""
    words = text.split()
    if not re.fullmatch(r"[A-Za-z' ,]+", text) or not 6 <= len(words) <= 16 or words[0] not in STARTS:
        return False
    if UNWANTED.search(text) or any(word[0].isupper() and word != "I" for word in words):
        return False
    has_verb = any(VERB.fullmatch(word) for word in words[1 : 2 if words[0] in STARTS[:5] else 4])
    return has_verb and all(frequency(word.strip(",'")) >= 4.0 for word in words)


def countries() -> dict[str, dict]:
    """{name: row of countryinfo} of countries with at least three million people, without the disputed ones."""
    from countryinfo import all_countries

    rows = {country.name(): country.info() for country in all_countries()}
    left_out = {"Burma", "Hong Kong", "Palestine", "Puerto Rico", "Scotland", "Taiwan", "Israel", "Georgia", "Jordan"}
    fits = {
        name: row
        for name, row in rows.items()
        if re.fullmatch(r"[A-Z][a-z]+( [A-Z][a-z]+)*", name)
        and name not in left_out
        and all(row.get(key) for key in ("capital", "area", "demonym"))  # some rows are not complete
        and row.get("population", 0) >= 3_000_000
    }
    with_article = re.compile(r"United|Netherlands|Philippines|.*Republic")
    return {f"the {name}" if with_article.match(name) else name: row for name, row in sorted(fits.items())}


def elements() -> dict[str, str]:
    """{name: symbol} of the elements up to radon."""
    import periodictable

    return {element.name: element.symbol for element in periodictable.elements if 1 <= element.number <= 86}


def python_docs() -> dict[str, str]:
    """{name: docstring} of well-known functions, methods and classes, as `str.split` or `math.sqrt`."""
    found = {}
    for module in (*METHODS, *MODULES):
        owner = getattr(builtins, module) if module in METHODS else importlib.import_module(module)
        for name in getattr(owner, "__all__", None) or dir(owner):
            value = getattr(owner, name)
            is_own = module in METHODS or getattr(value, "__module__", module) in (module, "_" + module, None)
            doc = inspect.getdoc(value) if callable(value) else None
            if doc and is_own and name.islower() and not name.startswith("_") and not RARE.search(name):
                found[name if module == "builtins" else f"{module}.{name}"] = doc
    return dict(sorted(found.items()))


def doc_paragraphs() -> list[str]:
    """Paragraphs of plain prose from the docstrings of the standard library's modules."""
    found = set()
    for path in sorted(pathlib.Path(inspect.getfile(inspect)).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        for doc in re.findall(r'"""(.*?)"""', text, re.DOTALL):
            for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
                words = " ".join(paragraph.split())
                plain = (
                    re.fullmatch(r"[A-Z][\w ,.'()-]+\.", words) and "self" not in words and "\n    " not in paragraph
                )
                if plain and 20 <= len(words.split()) <= 70:
                    found.add(words)
    return sorted(found)


def short_functions() -> list[str]:
    """Sources of short functions of the standard library."""
    found = {}
    for function in tiny_tasks.harvest():
        lines = function.code.split("\n")
        name = re.match(r"def ([a-z]\w*)\(", lines[0])
        if name and 3 <= len(lines) <= 8 and "self" not in lines[0]:
            found.setdefault(name[1], function.code)
    return sorted(found.values())
