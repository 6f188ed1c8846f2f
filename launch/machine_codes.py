"""Reads the lines that the machines of a queued resource left in storage as one exit code.

Each machine has a file with one line, which its later lines replace: "SECONDS running HOST" or "SECONDS CODE HOST".
"""

import time

from launch import commands, restarts

BEGIN_SECONDS = 1800  # for a machine to boot and to leave its first line
GONE_LOOKS = 3  # in a row without the resource: it was deleted


def codes(text: str) -> list[int]:
    """The exit codes in the order of leaving; machines that still run have none."""
    lines = sorted((int(line.split()[0]), line.split()[1]) for line in text.splitlines() if line.strip())
    return [int(code) for _, code in lines if code.isdigit()]


def final(text: str) -> int | None:
    """The exit code when no new attempt could change it, else None."""
    left = codes(text)
    failure = restarts.verdict(left)
    return failure if left and not restarts.starts_again(failure) else None


class Watch:
    """One attempt, read repeatedly until its machines agree on an exit code."""

    def __init__(self, poll: float) -> None:
        self._began = time.monotonic()
        self._active_at: float | None = None
        self._unchanged, self._last, self._gone = 0, "", 0
        # A machine that is being taken away leaves 42 or 143 some minutes before its resource reports it.
        self._patience = 2 + int(restarts.GRACE // max(poll, 1))

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def verdict(self, state: str | None, text: str) -> int | None:
        """The run's exit code, or None to wait longer; state is the resource's, text all machines' lines."""
        self._unchanged = self._unchanged + 1 if text == self._last else 0
        self._last = text
        self._gone = self._gone + 1 if state is None else 0
        code = final(text)
        left = codes(text)
        running = sum("running" in line for line in text.splitlines())
        # The first failure ends the run; successes arrive together, as the processes leave together.
        if code or (code == 0 and (not running or self._unchanged >= 1)):
            return code
        if self._gone == GONE_LOOKS:
            commands.refuse("the queued resource was deleted; run the same command again to continue.")
        if state == "ACTIVE" and left and self._unchanged >= self._patience:
            return restarts.verdict(left)  # it was stopped, or has started again as often as it may
        if state == "ACTIVE" and not text:
            self._active_at = self._active_at or time.monotonic()
            if time.monotonic() - self._active_at > BEGIN_SECONDS:
                commands.say("the machines have left no line in --storage: may their service account write there?")
                return 2
        return None
