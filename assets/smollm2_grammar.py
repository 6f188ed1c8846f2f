"""Fills the templates of assets/smollm2_prompts with words: articles, plurals, and slots that are computed from others.

A slot of [subjects] keeps its value within a prompt, and its values are split into those of training and those held
out. A slot of [pieces] is drawn again each time.
"""

import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence

HELD_OUT_SHARE = 6  # one subject in six is held out
SLOT = re.compile(r"\{(?:(\d+)\.\.(\d+)|(?:([asc]):)?([A-Za-z_]+?)(\d*))\}")
BEFORE = ("aside", "asks", "greeting")  # pieces that end with a space
AFTER = (  # pieces that begin with one
    "brief listing only letter_limit code_limit working writing_limit brief_code story_limit short planning"
).split()
AS_IS = ("function", "no_punctuation", "jumbled", "misspelt_low", "series_items", "python")  # never capitalised
SORTS = ("animal", "food", "sport", "music", "clothing", "science", "job", "plant", "country")  # words to be sorted
KEPT = ("day", "relation", "colour")  # pieces that keep their value within a prompt
IRREGULAR = {"mouse": "mice", "goose": "geese", "wolf": "wolves", "deer": "deer", "sheep": "sheep", "salmon": "salmon"}
IRREGULAR |= {"buffalo": "buffaloes", "bison": "bison", "shark": "sharks", "octopus": "octopuses", "calf": "calves"}
IRREGULAR |= {
    "moose": "moose",
    "valley": "valleys",
    "cactus": "cacti",
    "reindeer": "reindeer",
    "jellyfish": "jellyfish",
}
SPELLING = {
    "definitely": "definately", "receive": "recieve", "separate": "seperate", "until": "untill", "because": "becuase",
    "friend": "freind", "their": "thier", "which": "wich", "really": "realy", "beginning": "begining",
    "weather": "wether", "tomorrow": "tommorow", "business": "buisness", "people": "peple", "children": "childrens",
    "different": "diffrent", "should": "shoud", "would": "woud", "could": "coud", "finished": "finnished",
    "garden": "gardern", "library": "libary", "meeting": "meating", "company": "compagny", "expected": "exspected",
    "school": "scool", "teacher": "techer", "window": "windoe", "morning": "morining", "again": "agian",
    "were": "where", "decided": "desided", "yesterday": "yesturday", "money": "mony", "house": "hose", "night": "nite",
    "with": "whit", "that": "taht", "after": "aftre", "before": "befor", "very": "verry", "always": "allways",
    "have": "hav", "from": "form", "little": "litle",
    "water": "watter", "building": "bilding", "quickly": "quikly", "the": "teh",
}  # fmt: skip
GRAMMAR = (
    (r"^(He|She) has\b", r"\1 have"), (r"^(They|We) were\b", r"\1 was"), (r"^(He|She) was\b", r"\1 were"),
    (r"^(He|She) is\b", r"\1 are"), (r"^(They|We) are\b", r"\1 is"), (r"^(They|We|I) have\b", r"\1 has"),
    (r"^I was\b", "I were"), (r"\bwere\b", "was"), (r"\bwas\b", "were"), (r"\bdid not (\w+)", r"did not \1ed"),
    (r"\ban\b", "a"), (r"\bhad (\w+[^aeiouvsgc])ed\b", r"had \1"), (r"^(He|She) (\w+[kmnpth])ed\b", r"\1 have \2"),
    (r" (the|his|her|a) (\w+)\.$", r" \2 \1."), (r" the (\w+)", r" a the \1"), (r"\bto (\w+)", r"to \1ing"),
    (r"\bhad\b", "haved"), (r"\b(\w+[^aeiouvsgcl])ed\b", r"\1ing"), (r"\b(in|on|at|of|for) ", ""),
)  # fmt: skip


def is_held_out(value: str) -> bool:
    """Which side a subject belongs to, by a hash of its text, so that it is the same in every list."""
    return zlib.crc32(value.lower().rstrip("s.").encode()) % HELD_OUT_SHARE == 0


def entries(text: str) -> list[str]:
    return [" ".join(entry.split()) for entry in text.strip().split(";")]


def article(noun: str) -> str:
    """The noun with "a" or "an"."""
    sound = re.match(r"[aeio]|u(?!ni|s[aeiu]|ku|til)|h(our|onest|eir)", noun[:1].lower() + noun[1:])
    vowel = sound and not re.match(r"eu|ewe|one\b", noun.lower()) or re.match(r"[FLMNRSX][A-Z]", noun)
    return f"{'an' if vowel else 'a'} {noun}"


def plural(noun: str) -> str:
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if re.search(r"[^aeiou]y$", noun):
        return noun[:-1] + "ies"
    if noun.endswith("man"):
        return noun[:-3] + "men"
    return noun + ("es" if re.search(r"(s|x|ch|sh|mato|tato|mango)$", noun) else "s")


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def lower(text: str) -> str:
    return text if re.match(r"I\b|[A-Z][a-z]+ [A-Z]", text) else text[:1].lower() + text[1:]


class Prompt:
    """One prompt in the making. subjects: the values drawn from the split lists.

    Args:
        words: [subjects] of one side, each list a tuple.  pieces: [pieces].
        computed: {slot: function of (prompt, suffix)}, which returns the slot's text.
    """

    def __init__(
        self,
        words: Mapping[str, Sequence[str]],
        pieces: Mapping[str, Sequence[str]],
        computed: Mapping[str, Callable[["Prompt", str], str]],
        random_: random.Random,
    ):
        self.words, self.pieces, self.computed, self.random = words, pieces, computed, random_
        self.values: dict[str, str] = {}
        self.subjects: list[str] = []
        self.used: set[tuple[str, str]] = set()  # pieces, which are not drawn twice while others are left

    def fill(self, text: str, suffix: str = "") -> str:
        """The text with all slots filled; a value at the start of a sentence gets a capital."""
        out, end = "", 0
        for match in SLOT.finditer(text):
            out += text[end : match.start()]
            end = match.end()
            low, high, form, name, digit = match.groups()
            if low:
                out += str(self.random.randint(int(low), int(high)))
                continue
            value = self.value(name, digit + suffix)
            value = {"a": article, "s": plural, "c": capital, None: str}[form](value)
            if name not in AS_IS and re.search(r"([.!?]\"? |\n)$", out):
                value = capital(value)
            out += value
        return out + text[end:]

    def value(self, name: str, suffix: str) -> str:
        key = name + suffix
        if key in self.values:
            return self.values[key]
        if name in self.computed:
            self.values[key] = self.computed[name](self, suffix)
            return self.values[key]
        if name in self.words:
            return self.subject(name, key)
        unused = [piece for piece in self.pieces[name] if (name, piece) not in self.used] or self.pieces[name]
        piece = self.random.choice(unused)
        self.used.add((name, piece))
        value = self.fill(piece, suffix)
        if name in KEPT:
            self.values[key] = value
        if value and name in (*BEFORE, *AFTER):
            value = value + " " if name in BEFORE else " " + value
        return value

    def subject(self, name: str, key: str) -> str:
        """A value of a split list that the prompt does not have yet."""
        others = [value for value in self.words[name] if value not in self.subjects]
        self.values[key] = self.random.choice(others)
        self.subjects.append(self.values[key])
        return self.values[key]

    def draw(self, name: str, count: int) -> list[str]:
        return [self.value(name, f"_{place}") for place in range(count)]

    def shuffled(self, values: Sequence[str]) -> list[str]:
        return self.random.sample(list(values), len(values))


def misspelt(prompt: Prompt, suffix: str) -> str:
    """A sentence with two or three misspelt words."""
    text = prompt.value("statement", suffix)
    known = [word for word in SPELLING if re.search(rf"\b{word}\b", text)]
    for word in prompt.shuffled(known)[:3]:
        text = re.sub(rf"\b{word}\b", SPELLING[word], text, count=1)
    if len(known) < 2:  # two letters of a long word change places
        word = max(re.findall(r"[a-z]+", text), key=len)
        text = text.replace(word, word[:2] + word[3] + word[2] + word[4:], 1)
    return capital(text) + "."


def mistake(prompt: Prompt, suffix: str) -> str:
    """A sentence with one mistake of grammar."""
    text = prompt.value("sentence", suffix)
    wrong = [re.sub(pattern, new, text, count=1) for pattern, new in GRAMMAR if re.search(pattern, text)]
    wrong = [option for option in wrong if option != text] or [text.replace(" ", " of ", 1)]
    return prompt.random.choice(wrong)


def mistake_pair(prompt: Prompt, suffix: str) -> str:
    first, second = prompt.shuffled([mistake(prompt, suffix), prompt.value("sentence", suffix)])
    return f"{first}\nb) {second}"


def no_punctuation(prompt: Prompt, suffix: str) -> str:
    return " ".join(text.lower().replace(",", "") for text in prompt.draw("statement", 2))


def jumbled(prompt: Prompt, suffix: str) -> str:
    return " / ".join(prompt.shuffled(lower(prompt.value("sentence", suffix)).rstrip(".").split()))


def gap(prompt: Prompt, suffix: str) -> str:
    """A sentence with a line in place of a longer word."""
    text = prompt.value("sentence", suffix)
    words = [word for word in re.findall(r"\b[a-z]+\b", text) if len(word) >= 5] or re.findall(r"\b[a-z]+\b", text)
    return re.sub(rf"\b{prompt.random.choice(words)}\b", "____", text, count=1)


def proverb_half(prompt: Prompt, suffix: str) -> str:
    words = prompt.value("proverb", suffix).split()
    return " ".join(words[: (len(words) + 1) // 2]) + ' …"'


def sentence_common(prompt: Prompt, suffix: str) -> str:
    """A sentence; its longest word becomes the value of {common}."""
    return prompt.value("sentence", suffix)


def common(prompt: Prompt, suffix: str) -> str:
    return max(re.findall(r"\b[a-z]+\b", prompt.value("sentence", suffix)), key=len)


def odd_one(prompt: Prompt, suffix: str) -> str:
    many, one = prompt.random.sample(SORTS, 2)
    return ", ".join(prompt.shuffled(prompt.draw(many, 4) + prompt.draw(one, 1)))


def mixed(*names: str) -> Callable[[Prompt, str], str]:
    """A slot that lists three words of each of some lists in disorder."""
    return lambda prompt, suffix: ", ".join(prompt.shuffled([word for name in names for word in prompt.draw(name, 3)]))


def mixed_words(prompt: Prompt, suffix: str) -> str:
    return mixed(*prompt.random.sample(SORTS, 2))(prompt, suffix)


def choice_or(prompt: Prompt, suffix: str) -> str:
    """A choice of two that is joined by "or"; those with two of "and" are not taken."""
    fits = [choice for choice in prompt.words["choice"] if choice.count(" and ") == 1]
    prompt.subjects.append(prompt.random.choice(fits))
    return prompt.subjects[-1].replace(" and ", " or ")


def code_task_function(prompt: Prompt, suffix: str) -> str:
    """A task that one function can do."""
    tasks = [task for task in prompt.words["code_task"] if not task.startswith(("is ", "keeps", "stores", "simulates"))]
    prompt.subjects.append(prompt.random.choice(tasks))
    return prompt.subjects[-1]


COMPUTED: dict[str, Callable[[Prompt, str], str]] = {
    "misspelt": misspelt,
    "misspelt_low": lambda prompt, suffix: lower(misspelt(prompt, suffix)),
    "mistake": mistake,
    "mistake_pair": mistake_pair,
    "no_punctuation": no_punctuation,
    "jumbled": jumbled,
    "gap": gap,
    "proverb_half": proverb_half,
    "common": common,
    "sentence_common": sentence_common,
    "odd_one": odd_one,
    "mixed_words": mixed_words,
    "mixed_three": mixed("animal", "food", "plant"),
    "word_kinds": mixed("noun", "adjective"),
    "choice_or": choice_or,
    "code_task_function": code_task_function,
    "statement_low": lambda prompt, suffix: lower(prompt.value("statement", suffix + "9")),
}
