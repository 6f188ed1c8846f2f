"""template_guard.py: a chat template can neither escape nor exhaust time or memory, on any thread."""

import concurrent.futures
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest

from domino_jax.data import template_guard
from domino_jax.data.chat import encode_prompt, encode_training_row
from domino_jax.data.template_guard import render
from domino_jax.data.template_process import ADDED_CHARACTERS
from domino_jax.runtime.errors import DataError, DominoError
from tests.data.test_chat import TEMPLATE, make_tokenizer

ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


def children():
    """Processor seconds of ended child processes, and the largest memory of one of them in bytes."""
    template_guard._RENDERER.close()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def refusal(template):
    """The message that refuses the template, and the processor seconds until then."""
    begin, here = children()[0], time.thread_time()
    with pytest.raises(DataError) as refused:
        encode_training_row(make_tokenizer(template), ROW, thinking=False, where="rows.jsonl:4")
    message = str(refused.value)
    assert message.startswith("rows.jsonl:4: the chat template refuses the messages")
    assert len(message.splitlines()) == 1 and len(message) < 400
    assert time.thread_time() - here < 1
    return message, children()[0] - begin


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ messages.append(messages[0]) }}",
        "{{ namespace(__class__=cycler) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ range(10000000) }}",
    ],
)
def test_an_escape_is_refused_with_the_row(template):
    refusal(template)


def smaller(folder, before, after):
    """The program that renders, with one of its limits lowered: the kernel holds any limit alike."""
    text = template_guard.PROGRAM.read_text()
    assert text.count(before) == 1
    program = folder / "template_process.py"
    program.write_text(text.replace(before, after))
    return program


def test_an_endless_computation_ends_in_two_seconds():
    message, seconds = refusal(LOOP)
    assert "(it computes without coming to an end)" in message
    assert 0.9 < seconds < 3  # one second for the template, the rest for the start of the process


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 9 ** (9 ** (9 ** 9)) }}",  # one operation that never returns to the interpreter
        "{% if false %}{{ 7 ** 99999999 }}{% endif %}",  # computed when the template is compiled
    ],
)
def test_no_computation_escapes_the_time_limit(template, tmp_path, monkeypatch):
    children()
    monkeypatch.setattr(template_guard, "PROGRAM", smaller(tmp_path, "SECONDS = 1.0", "SECONDS = 0.2"))
    message, seconds = refusal(template)
    assert "without coming to an end" in message and 0.2 < seconds < 2


MEMORY = {
    "a repeated text": "{{ ('abcdefghij' * 300000000)|length }}",
    "doubling": "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling by a block": "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set x %}{{ n.s }}{{ n.s }}"
    "{% endset %}{% set n.s = x %}{% endfor %}",
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "a wide filter": "{{ 'a'|center(10**10) }}",
    "a filled batch": "{{ [1]|batch(10**10, 0)|list|length }}",
    "bytes of a number": "{{ (1).to_bytes(10**10, 'big')|length }}",
}


@pytest.fixture(scope="module")
def fresh_process():
    """A process without other ended children: the system reports only the largest memory of all of them."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def refusal_and_memory(template, program):
    template_guard.PROGRAM = program
    message, _ = refusal(template)
    return message, children()[1]


def check_memory(fresh_process, template, program, limit):
    message, memory = fresh_process.submit(refusal_and_memory, template, program).result()
    assert any(reason in message for reason in ("memory", "MemoryError", "OverflowError", "without coming to an end"))
    assert memory < 1.1 * limit


@pytest.mark.parametrize("template", MEMORY.values(), ids=MEMORY.keys())
def test_no_template_escapes_the_memory_limit(template, fresh_process, tmp_path):
    limit = 1 << 28
    check_memory(fresh_process, template, smaller(tmp_path, "MEMORY = 1 << 30", f"MEMORY = {limit}"), limit)


def test_a_template_gets_no_more_memory_than_a_gibibyte(fresh_process):
    """The last one in that process, which remembers the largest."""
    check_memory(fresh_process, MEMORY["doubling"], template_guard.PROGRAM, 1 << 30)


def test_the_length_of_a_templates_text_is_limited_and_the_limit_grows_with_the_row():
    assert "characters for a row of" in refusal("{% for i in range(99999) %}hello {% endfor %}")[0]
    long = [{"role": "user", "content": "a" * 10 * ADDED_CHARACTERS}]
    assert len(render("{{ messages[0].content * 2 }}", long, {})) == 20 * ADDED_CHARACTERS


def test_a_template_with_an_error_is_refused_and_cannot_add_lines_to_the_message():
    assert "TemplateSyntaxError" in refusal("{% if %}")[0]
    message, _ = refusal("{{ raise_exception('no\n\x1b[2Jerror: ' ~ 'x' * 100000) }}")
    assert "TemplateError: no  [2Jerror: xxx" in message


def test_the_time_limit_holds_on_every_thread_and_spares_honest_templates():
    honest = make_tokenizer()
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        stuck = threads.submit(encode_prompt, make_tokenizer(LOOP), {"messages": ROW["messages"][:1]}, False)
        rows = list(threads.map(lambda _: encode_training_row(honest, ROW, False), range(50)))
        with pytest.raises(DataError, match="without coming to an end"):
            stuck.result(timeout=60)
    assert len(rows) == 50


def test_waiting_is_not_computing():
    """A machine may be suspended in the middle of a row."""
    render("", [], {})
    pid = template_guard._RENDERER._process.pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.5, os.kill, (pid, signal.SIGCONT)).start()
    assert render("{% for i in range(9999) %}{% endfor %}done", [], {}) == "done"
    assert template_guard._RENDERER._process.pid == pid


def test_one_process_renders_for_all_rows_and_ends_with_this_one():
    code = "from domino_jax.data import template_guard as g; g.render('', [], {}); print(g._RENDERER._process.pid)"
    code += "; g.render('', [], {}); print(g._RENDERER._process.pid, flush=True); import os; os.kill(os.getpid(), 9)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    first, second = ended.stdout.split()
    assert first == second and not ended.stderr
    for _ in range(100):  # its pipe closes with the parent, and it leaves
        if not os.path.exists(f"/proc/{first}"):
            return
        time.sleep(0.1)
    pytest.fail("the process outlives its parent")


def test_a_signal_to_the_whole_job_leaves_the_renderer_to_its_parent():
    render("", [], {})
    pid = template_guard._RENDERER._process.pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    assert render("still here", [], {}) == "still here"
    assert template_guard._RENDERER._process.pid == pid and os.getsid(pid) != os.getsid(0)


def test_an_installation_without_jinja_is_a_usage_error(tmp_path, monkeypatch):
    children()
    (tmp_path / "program.py").write_text("import no_such_package")
    monkeypatch.setattr(template_guard, "PROGRAM", tmp_path / "program.py")
    with pytest.raises(DominoError, match="No module named 'no_such_package'") as refused:
        encode_training_row(make_tokenizer(), ROW, thinking=False)
    assert refused.value.exit_code == 2


MESSAGES = [
    {"role": "system", "content": 'Be <brief> & "exact".'},
    {"role": "user", "content": "ä 你 \u2028 \ud800?", "name": None},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"b": 1, "a": [1.5, True]}}]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "Seven.", "reasoning": "Because."},
]
FEATURES = """\
{%- for m in messages %}
    {%- if loop.index0 > 90 %}{% break %}{% endif %}
    {{ m.role }}|{{ m.content }}|{{ 'name' in m }}|{{ m.reasoning_content }}|{{ m.thinking }}|{{ tools is none }}
  {% for call in m.tool_calls or [] %}
    {{ call | tojson }} {{ call | tojson(indent=2) }} {{ call.arguments | items | list }}
  {% endfor %}
{% generation %}{{ m.role }}{% set inner = 1 %}{% endgeneration %}{{ inner is defined }}
{% endfor %}
{{ eos_token }} {{ add_generation_prompt }} {{ enable_thinking }} {{ dict(a=1) }} {{ strftime_now('%Y') }}
"""


@pytest.mark.parametrize("template", [TEMPLATE, FEATURES], ids=["like Qwen3's", "all features"])
def test_templates_are_rendered_as_transformers_renders_them(template):
    tokenizer = make_tokenizer(template)
    messages = MESSAGES if template is FEATURES else [MESSAGES[1], MESSAGES[4]]
    options = {"add_generation_prompt": True, "enable_thinking": False}
    expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert render(template, messages, {**tokenizer.special_tokens_map, **options}) == expected
