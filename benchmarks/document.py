"""Tables in Markdown, and the marked sections of a page that a script writes."""

import pathlib
import statistics
from collections.abc import Iterable, Sequence

from domino_jax.runtime.files import write_whole


def put_section(path: pathlib.Path, name: str, text: str) -> None:
    """Writes `text` between the marks `name` of a Markdown file; where there are none, at its end with new ones."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    if begin not in page:
        page += f"\n{begin}\n{end}\n"
    before, rest = page.split(begin)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{before}{begin}\n{text.strip()}\n{end}{rest.split(end)[1]}")


def say_seeds(values: Sequence[float], form: str = ".2f") -> str:
    """The mean of the seeds ± half their range; one seed is a number alone."""
    spread = f" ± {(max(values) - min(values)) / 2:{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{spread}"


def changes_of(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """By how many per cent ours is above theirs, seed by seed: the runs of one seed share rows and their order, so a
    quotient varies much less than its parts."""
    return [100 * (one / other - 1) for one, other in zip(ours, theirs, strict=True)]


def say_changes(changes: Sequence[float]) -> str:
    """Their mean, with the single ones where there are several."""
    each = f" (by seed {', '.join(f'{change:+.1f}' for change in changes)})" if len(changes) > 1 else ""
    if not any(changes):
        return f"equal to{each}"
    mean = statistics.fmean(changes)
    return f"{abs(mean):.1f} % {'above' if mean > 0 else 'below'}{each}"


def table_lines(heading: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> list[str]:
    """A Markdown table, the first `texts` columns to the left and the others to the right."""
    marks = ["---"] * texts + ["---:"] * (len(heading) - texts)
    return [f"| {' | '.join(row)} |" for row in (heading, marks, *rows)]
