"""How far a long command is: lines with the time left in a log, a bar on a terminal, and nothing of what is quick."""

import io

import pytest
import rich.console

from domino_jax.runtime.progress import Progress


def shown(monkeypatch, seconds, terminal=False, after=0.0, counts=(1, 3)):
    """What is printed of pieces of work of `counts` parts, each part of which takes `seconds`; a look takes as long."""
    now, console = [0.0], rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=120)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Progress("work", 4, console=console, after=after) as progress:
        for count in counts:
            now[0] += max(count, 1) * seconds
            progress.advance(count, "a note")
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "after", "lines"),
    [
        (12, 0.0, ["work 1/4  a note  left 0:00:36", "work 4/4  a note  left 0:00:00"]),
        (1, 0.0, ["work 4/4  a note  left 0:00:00"]),
        (12, 5.0, ["work 1/4  a note  left 0:00:36", "work 4/4  a note  left 0:00:00"]),
        (1, 5.0, []),
    ],
)
def test_a_log_gets_a_line_every_ten_seconds_and_at_the_end_but_none_before_the_first_seconds(
    monkeypatch, seconds, after, lines
):
    assert shown(monkeypatch, seconds, after=after).splitlines() == lines


@pytest.mark.parametrize(("after", "seen"), [(0.0, True), (5.0, False)])
def test_a_terminal_gets_a_bar_once_the_work_takes_long(monkeypatch, after, seen):
    assert ("4/4" in shown(monkeypatch, 1, terminal=True, after=after)) == seen


def test_the_time_left_runs_down_while_nothing_is_counted(monkeypatch):
    lines = shown(monkeypatch, 12, counts=(0, 1, 0, 3)).splitlines()
    assert [line.rsplit(maxsplit=1)[1] for line in lines] == ["?", "0:01:12", "0:01:00", "0:00:00"]
