"""How alike two prompts are: the Jaccard index of their 5-grams of words, and the nearest neighbour of each prompt."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

WORDS = 5


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """All runs of 5 words or signs, in lower case; a shorter text is one run."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    return frozenset(tuple(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1)))


class Index:
    """Prompts by their 5-grams."""

    def __init__(self, texts: Iterable[str] = ()):
        self.sizes: list[int] = []
        self.places: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        runs = shingles(text)
        for run in runs:
            self.places[run].append(len(self.sizes))
        self.sizes.append(len(runs))

    def nearest(self, text: str, leave_out: int | None = None) -> float:
        """The highest Jaccard index of a text with a prompt of the index, 0 to 1; `leave_out` is the text's place."""
        runs = shingles(text)
        common = Counter(place for run in runs for place in self.places.get(run, ()) if place != leave_out)
        return max((n / (len(runs) + self.sizes[place] - n) for place, n in common.items()), default=0.0)


def neighbours(texts: Sequence[str], others: Sequence[str] | None = None) -> list[float]:
    """For each text the similarity of its nearest neighbour among `others`, or among the other texts."""
    if others is not None:
        index = Index(others)
        return [index.nearest(text) for text in texts]
    index = Index(texts)
    return [index.nearest(text, leave_out=place) for place, text in enumerate(texts)]
