"""template_guard.py (RELIABILITY S7): a chat template neither escapes nor runs for ever, on no thread."""

import concurrent.futures
import threading
import time

import pytest

from domino_jax.data.chat import encode_prompt, encode_training_row
from domino_jax.data.template_guard import TemplateTimeout, check_template, time_limit
from domino_jax.errors import DataError
from tests.test_chat import TEMPLATE, make_tokenizer

ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


def refusal(template):
    """What encoding a row with the template is refused with, and the seconds of the processor that took."""
    begin = time.thread_time()
    with pytest.raises(DataError) as refused:
        encode_training_row(make_tokenizer(template), ROW, thinking=False, where="rows.jsonl:4")
    return str(refused.value), time.thread_time() - begin


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ messages.append(messages[0]) }}",
        "{{ range(10000000) }}",
    ],
)
def test_s7_an_escape_is_refused_with_the_row_that_met_it(template):
    said, _ = refusal(template)
    assert "rows.jsonl:4: the chat template refuses the messages" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "template",
    [
        LOOP,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ lipsum(n=100000000) }}",
    ],
)
def test_s7_an_endless_loop_ends_in_two_seconds(template):
    said, seconds = refusal(template)
    assert "rows.jsonl:4: the chat template refuses the messages (TemplateTimeout: it computes without" in said
    assert 0.9 < seconds < 2


def test_s7_a_power_is_refused_before_it_is_computed():
    said, seconds = refusal("{{ 9 ** 9 ** 9 ** 9 }}")
    assert "raises to a power" in said and seconds < 2
    said, _ = refusal("{% if false %}{{ messages|length ** 99999999 }}{% endif %}")
    assert "raises to a power" in said


def test_s7_the_time_limit_holds_on_other_threads_and_leaves_honest_ones_alone():
    honest = make_tokenizer()
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        stuck = threads.submit(encode_prompt, make_tokenizer(LOOP), {"messages": ROW["messages"][:1]}, False)
        rows = list(threads.map(lambda _: encode_training_row(honest, ROW, False), range(50)))
        with pytest.raises(DataError, match="TemplateTimeout"):
            stuck.result(timeout=60)
    assert len(rows) == 50


def test_a_template_that_loops_only_on_some_rows_is_stopped_there():
    tokenizer = make_tokenizer(TEMPLATE + "{% if messages[0].content == 'trap' %}" + LOOP + "{% endif %}")
    assert encode_training_row(tokenizer, ROW, thinking=False).loss_mask.any()
    with pytest.raises(DataError, match="TemplateTimeout"):
        encode_prompt(tokenizer, {"messages": [{"role": "user", "content": "trap"}]}, thinking=False)


def test_waiting_is_not_computing():
    with time_limit(0.1):
        time.sleep(0.5)


def test_no_time_out_arrives_behind_the_block():
    """The watching thread and the end of the block race: whoever wins, nothing is raised later."""

    def compute(seconds):
        begin = time.thread_time()
        while time.thread_time() - begin < seconds:
            pass

    timeouts = 0
    for _ in range(12):
        try:
            with time_limit(0.05):
                compute(0.1)
        except TemplateTimeout:
            timeouts += 1
        compute(0.01)  # here it would strike
    assert 0 < timeouts  # the race was on


def test_one_thread_watches_all():
    for _ in range(3):
        encode_training_row(make_tokenizer(), ROW, thinking=False)
    assert sum(thread.name == "template-time-limit" for thread in threading.enumerate()) == 1


def test_templates_that_mark_their_answers_or_break_out_of_loops_are_not_refused():
    check_template("{% generation %}{{ messages[0].content }}{% endgeneration %}")
    check_template({"default": "{% for m in messages %}{% break %}{% endfor %}"})
    check_template("{% if %}")  # a mistake in it is told by whoever renders it
