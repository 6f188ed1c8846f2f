"""The part of an exception that a one-line message shows."""

import socket

import pytest

from domino_jax.runtime.errors import first_line


class LookUpFailed(OSError):
    """As of a network library: a number of the system, and its own text."""

    def __str__(self):
        return "Cannot connect to host storage:443"


@pytest.mark.parametrize(
    ("error", "line", "text"),
    [
        (ValueError("no\nsecond line"), "ValueError: no", "no"),
        (ValueError("x" * 300), "ValueError: " + "x" * 200, "x" * 200),
        (KeyError(), "KeyError", "KeyError"),
        (OSError(28, "No space left on device", "/a/file"), *["No space left on device"] * 2),
        (ValueError("INTERNAL [os_error_code='28']"), *["No space left on device"] * 2),
        (socket.gaierror(-2, "Name or service not known"), *["Name or service not known"] * 2),
        (LookUpFailed(111, "refused"), "LookUpFailed: Cannot connect to host storage:443", LookUpFailed.__str__(None)),
    ],
)
def test_an_exception_is_its_class_and_first_line_and_an_error_of_the_system_its_text(error, line, text):
    assert (first_line(error), first_line(error, with_class=False)) == (line, text)
