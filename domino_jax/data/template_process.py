"""The process that renders chat templates for template_guard.py: one JSON line in, one JSON line out.

jinja2's sandbox keeps a template from Python's internals, but limits neither time nor memory, and a single operation
('a' * 10**9, a power of large numbers, a backtracking search) can use up either before the interpreter gets control.
The kernel enforces the limits here: RLIMIT_AS for memory, and for each rendering a timer of processor time whose signal
ends the process. Only jinja2 is imported, so the process starts in a tenth of a second.

Templates get the environment that transformers gives them; test_template_guard.py compares the two.
"""

import datetime
import functools
import json
import resource
import signal
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

SECONDS = 1.0  # of processor time, so that an honest template does not fail on a suspended or busy machine
MEMORY = 1 << 30
# A template adds role names, a system prompt and descriptions of tools to its input.
ADDED_CHARACTERS = 100_000
GROWTH = 4
REASON_CHARACTERS = 200
# The keys for the thoughts of a turn. Templates read the first one, and gpt-oss' template the second.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def main() -> None:
    # The parent ends this process by closing its pipe; signals to the whole job are for the parent.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(json.dumps(_answer(line)).encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(line: bytes) -> dict[str, str]:
    """{"text"} or {"refused"} for one request (template_guard.render)."""
    try:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        text = render(**request)
    except MemoryError:
        return {"refused": f"it needs more than {MEMORY >> 20} MiB of memory"}
    except Exception as error:  # a template may raise anything
        return {"refused": f"{type(error).__name__}: {str(error)[:REASON_CHARACTERS]}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    limit = ADDED_CHARACTERS + GROWTH * len(line)
    if len(text) > limit:
        return {"refused": f"it writes {len(text)} characters for a row of {len(line)}; more than {limit} are refused"}
    return {"text": text}


def render(template: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """The template's text. Keys with the value None are left out, because many templates would print it."""
    shown = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None}
        thoughts = [message[name] for name in THOUGHTS if name in message]
        if thoughts:
            message = {"thinking": thoughts[0], **message, "reasoning_content": thoughts[0]}
        shown.append(message)
    return _compile(template).render(messages=shown, tools=None, documents=None, **variables)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["namespace"] = Namespace
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


class Generation(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %}, which marks answers in a template, rendered as a plain block."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class Namespace(jinja2.utils.Namespace):
    """A namespace without names that start with an underscore, as Python's internals do."""

    def __init__(*args, **kwargs):  # no named arguments, so that a template may use any name
        self, *rest = args
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name, value):
        if str(name).startswith("_"):
            raise jinja2.sandbox.SecurityError(f"a namespace may not hold {name!r}")
        super().__setitem__(name, value)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Replaces jinja2's own filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
