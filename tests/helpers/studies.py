"""Stand-ins for the commands that the studies of benchmarks/ run."""

from collections.abc import Callable

import pytest

from benchmarks.studies.study import Study


def stand_in(monkeypatch: pytest.MonkeyPatch, execute: Callable) -> Callable:
    """Puts `execute(study, command, name)` in the place of a study's commands."""
    monkeypatch.setattr(Study, "execute", lambda study, *stage: execute(study, *stage))
    return execute
