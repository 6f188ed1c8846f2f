"""A chat template is a program from the target's folder: it may neither escape nor run for ever.

transformers renders it in jinja2's sandbox, which refuses attribute escapes but bounds no loop. Here a render may use
SECONDS of processor time; then a watching thread raises TemplateTimeout inside it, on whatever thread it runs. Time of
the processor and not of the clock, so that a machine that stands still or is busy breaks no honest template.
One thing never comes back to the interpreter to be stopped, a power of huge numbers: templates with ** are refused.
"""

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Iterator

SECONDS = 1.0
WATCH_SECONDS = 0.1


class TemplateTimeout(Exception):
    """A chat template computed for longer than its time limit."""

    def __str__(self) -> str:  # raised from another thread, which can give no arguments
        return "it computes without coming to an end"


class TemplateRefused(Exception):
    """A chat template holds what no chat template needs."""


def check_template(template: str | dict) -> None:
    """Refuse what the time limit cannot stop; the text is parsed once, not once a row."""
    for text in template.values() if isinstance(template, dict) else [template]:
        _check_text(text)


@functools.lru_cache(maxsize=16)
def _check_text(text: str) -> None:
    import jinja2
    import jinja2.nodes
    import jinja2.sandbox

    # transformers' own block tag, so that templates which mark their answers parse here too.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    try:
        tree = environment.parse(text)
    except jinja2.TemplateSyntaxError:
        return  # told by whoever renders it
    if any(tree.find_all(jinja2.nodes.Pow)):
        raise TemplateRefused("it raises to a power (**), which no chat template needs and no time limit stops")


@functools.lru_cache(maxsize=1)
def _generation_tag() -> type:
    import jinja2.ext

    class Generation(jinja2.ext.Extension):
        """{% generation %}…{% endgeneration %} as the plain block it is."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


@contextlib.contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """TemplateTimeout inside the block once this thread computed for `seconds` in it."""
    thread = threading.get_ident()
    clock = _clock_of(thread)
    _WATCH.add(thread, clock, time.clock_gettime(clock) + seconds)
    try:
        yield
    finally:
        _WATCH.remove(thread)


def _clock_of(thread: int) -> int:
    # Not on every Unix; the clock on the wall is the next best.
    if hasattr(time, "pthread_getcpuclockid"):
        return time.pthread_getcpuclockid(thread)
    return time.CLOCK_MONOTONIC


class _Watch:
    """One thread per process that looks at the blocks under way."""

    def __init__(self):
        self._lock = threading.Lock()
        self._deadlines: dict[int, tuple[int, float]] = {}  # thread → its clock, and where that must not get to
        self._thread: threading.Thread | None = None

    def add(self, thread: int, clock: int, deadline: float) -> None:
        with self._lock:
            self._deadlines[thread] = (clock, deadline)
            if self._thread is None or not self._thread.is_alive():  # the first block, or behind a fork
                self._thread = threading.Thread(target=self._watch, name="template-time-limit", daemon=True)
                self._thread.start()

    def remove(self, thread: int) -> None:
        """Behind this no TemplateTimeout can arrive: one that is set and not yet raised is taken back."""
        with self._lock:
            if self._deadlines.pop(thread, None) is None:
                _raise_in(thread, None)

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_SECONDS)
            with self._lock:
                for thread, (clock, deadline) in list(self._deadlines.items()):
                    if time.clock_gettime(clock) > deadline:
                        del self._deadlines[thread]
                        _raise_in(thread, TemplateTimeout)


def _raise_in(thread: int, kind: type | None) -> None:
    exception = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)


_WATCH = _Watch()
