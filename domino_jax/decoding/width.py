"""How many drafts the next dispatch verifies: the number with the most expected tokens per second.

Both are learned from the dispatches. The seconds of a round are the median of the last dispatches with the same rows
and width or, for a width that has not run yet, on a line through the others. The tokens of a round follow from failure
rates by position: the drafter's over all requests, scaled by how the last tokens of the current text compare.

Now and then a dispatch explores another width, because the text or the machine may have changed. After one that lost L
seconds against the width in use, none explores for L / SHARE seconds.
"""

import dataclasses
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SHARE = 0.015  # of the time is lost to exploring, at most
FIRST = 0.1  # seconds of a width's first dispatch, within the rounds below: each return to the host costs time
LONGEST, PROBE = 32, 4  # the most and the fewest rounds of a dispatch; one that explores has the fewest
MARGIN = 1.02  # by how much another width must be faster to replace the one in use
# A width that has not run, and may have to be compiled, is explored from this share of the best rate on; plain steps
# earlier, because they are the way out where drafts cost more than any estimate says.
UNTRIED, UNTRIED_PLAIN = 0.9, 0.5
SLOPE = 1 / 8  # cost of a draft in plain steps, until two widths are timed
TEXT_MEMORY, DRAFTER_MEMORY = 64, 1_000  # tokens of a row, and rounds, after which 1/e of the evidence is left
CARRIED = 0.5  # of the evidence about a text is left for the next one
PRIOR_FAILURE, PRIOR_TRIALS = 0.3, 4.0  # of each position, before any draft was verified
TEXT_TRIALS, PLACE_TRIALS = 4.0, 16.0  # weights: of an average text, and of the scaled average at a position


class Choice(NamedTuple):
    """The next dispatch. baseline_seconds: where it explores, seconds per token of the width in use; else None."""

    drafts: int
    rounds: int
    baseline_seconds: float | None = None


class Dispatch(NamedTuple):
    """A choice that has run. timed: False for the first run of a program, which takes longer."""

    choice: Choice
    rows: int
    seconds: float
    timed: bool = True


@dataclasses.dataclass
class TextHistory:
    """The evidence about the text of one request, or of one batch of several rows.

    counts: float [2, M], drafts by position that were reached, and those of them that were not accepted; old ones fade.
    tokens: of a row since the last drafts.  used: the last dispatch that did not explore.
    """

    counts: np.ndarray
    tokens: float = 0.0
    used: Choice | None = None

    def new_text(self) -> None:
        """Begins a request, which is assumed to be like the last one until its own rounds weigh more.

        After a request that ended with plain steps it is assumed to be average: plain steps are no evidence, so a wrong
        choice of them would never be corrected.
        """
        self.counts = self.counts * (CARRIED if self.used and self.used.drafts else 0.0)
        self.used = None


class WidthController:
    """Chooses among `widths`, numbers of drafts, of which the largest is the first to run; 0 is a plain step."""

    def __init__(self, widths: Sequence[int]):
        self.widths = sorted(widths)
        self.seconds = 0.0  # of all dispatches
        self._times: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=5))
        self._last_run: dict[tuple[int, int], float] = {}
        self._next_probe = 0.0
        self._drafter = PRIOR_TRIALS * np.array([[1.0], [PRIOR_FAILURE]]) * np.ones(self.widths[-1])
        self._last = TextHistory(np.zeros((2, self.widths[-1])))

    def new_history(self) -> TextHistory:
        """For a request, or a batch, with the evidence of the last one; new_text begins it."""
        self._last = dataclasses.replace(self._last, counts=self._last.counts.copy())
        return self._last

    def choose(self, history: TextHistory, rows: int) -> Choice:
        """The next dispatch of a batch of `rows` rows."""
        times = self._round_seconds(rows)
        if not times:
            return Choice(self.widths[-1], PROBE)
        tokens = self._tokens(history.counts)
        rates = {drafts: tokens[drafts] / times[drafts] for drafts in self.widths}
        best, used = max(rates, key=rates.get), history.used
        if used and rates[best] < MARGIN * rates[used.drafts]:
            best = used.drafts
        # The faster and the longer ago its last run, the more another width is worth exploring.
        worth = {
            drafts: rate * (self.seconds - self._last_run.get((rows, drafts), 0.0))
            for drafts, rate in rates.items()
            if drafts != best
            and ((rows, drafts) in self._last_run or rate >= (UNTRIED if drafts else UNTRIED_PLAIN) * rates[best])
        }
        if worth and self.seconds >= self._next_probe:
            return Choice(max(worth, key=worth.get), PROBE, 1 / rates[best])
        rounds = 2 * used.rounds if used and used.drafts == best else int(FIRST / times[best])
        return Choice(best, min(max(rounds, PROBE), LONGEST))

    def observe(self, history: TextHistory, dispatch: Dispatch, rounds: int, emitted: Sequence[int]) -> float:
        """Learns from a dispatch; returns the seconds lost if it explored.

        Args:
            rounds: that the batch ran, at least 1.
            emitted: tokens of each round of each row, without rounds that the end of an answer has cut.
        """
        choice, rows, seconds, timed = dispatch
        emitted, lost = np.asarray(emitted, int), 0.0
        mean = emitted.mean() if emitted.size else 1.0
        self.seconds += seconds
        if timed:
            self._times[rows, choice.drafts].append(seconds / rounds)
            self._last_run[rows, choice.drafts] = self.seconds
        if choice.baseline_seconds is None:
            history.used = choice
        elif timed:  # a width that has only just been compiled is explored again at once
            lost = max(0.0, seconds - rounds * mean * choice.baseline_seconds)
            # A probe that lost nothing is not repeated at once either: its dispatch is short.
            self._next_probe = max(self._next_probe, self.seconds) + max(lost, 0.1 * seconds) / SHARE
        history.tokens += rounds * mean
        if choice.drafts and emitted.size:
            reached = np.array([(emitted > place).sum() for place in range(choice.drafts + 1)], float)
            history.counts *= np.exp(-history.tokens / TEXT_MEMORY)
            self._drafter[:, : choice.drafts] *= np.exp(-reached[0] / DRAFTER_MEMORY)
            for counts in (history.counts, self._drafter):
                counts[:, : choice.drafts] += reached[:-1], reached[:-1] - reached[1:]
            history.tokens = 0.0
        return lost

    def _tokens(self, text: np.ndarray) -> np.ndarray:
        """Expected tokens of a round, float [M+1], by its drafts."""
        (trials, failures), average = text, self._drafter[1] / self._drafter[0]
        prior = TEXT_TRIALS * average[0]
        ratio = (failures.sum() + prior) / (trials @ average + prior)
        pooled = (failures.sum() + prior) / (trials.sum() + TEXT_TRIALS)
        # Deep positions are reached by easy texts above all, so their average flatters a hard one.
        scaled = np.clip(ratio * average, pooled, 1.0)
        failure = (failures + PLACE_TRIALS * scaled) / (trials + PLACE_TRIALS)
        return 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(1 - failure))])

    def _round_seconds(self, rows: int) -> dict[int, float]:
        """Seconds of a round by width; {} before any was timed."""
        # What disturbs a machine only adds time, so the lower one of two middle values.
        medians = {key: statistics.median_low(times) for key, times in self._times.items()}
        timed = {drafts: medians[rows, drafts] for drafts in self.widths if (rows, drafts) in medians}
        if not timed:
            return {}
        (drafts, seconds), *others = timed.items()
        plain = seconds / (1 + SLOPE * drafts)
        slope, plain = np.polyfit(list(timed), list(timed.values()), 1) if others else (SLOPE * plain, plain)
        least = min(timed.values()) / 4
        return {drafts: timed.get(drafts, max(plain + slope * drafts, least)) for drafts in self.widths}
