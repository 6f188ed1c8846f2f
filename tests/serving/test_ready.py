"""`ready` is true: no usual request waits for a compilation, and a new program stops nobody but who asks for it.

Nothing here depends on speed: compilations on other threads wait until a test lets them go.
"""

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import os
import queue as queues
import signal
import subprocess
import sys
import threading

import jax
import pytest

from benchmarks.compilers import programs
from domino_jax import serve
from domino_jax.decoding.background import BackgroundGenerator
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.prefixes import Prefixes
from domino_jax.decoding.requests import Request
from domino_jax.method.settings import SamplingParams
from domino_jax.models import sharding
from domino_jax.recipe import cli
from tests.helpers.decoding_models import make_generator, random_models, random_prompts
from tests.helpers.paths import ROOT
from tests.helpers.serving import SETTINGS, asked, get, post, wait_for

pytest.importorskip("prometheus_client", reason="requirements-serve.txt is not installed")
from domino_jax.serving import engine as engines
from domino_jax.serving.engine import Engine
from domino_jax.serving.readiness import chat_programs, usual_programs
from domino_jax.serving.requests import ServedModel, ServedRequest

pytestmark = pytest.mark.long

MODES = ("autoregressive", "draft")
USUAL = (
    SamplingParams(),
    SamplingParams(1.0),
    SamplingParams(0.7, top_k=20),
    SamplingParams(1.2, top_p=0.9, min_p=0.01),
)
PROMPTS = [[7, 8, 9], *random_prompts(11, 1, 100, seed=3)]  # of all lengths


class Gate:
    """Holds compilations on other threads while it is closed, except on threads whose name begins with `passing`."""

    def __init__(self, monkeypatch):
        self.open, self.failing, self.passing = threading.Event(), False, ""
        self.open.set()
        compile_on = BackgroundGenerator._compile_on

        def held(generator, mesh, program):
            passes = self.passing and threading.current_thread().name.startswith(self.passing)
            assert passes or self.open.wait(300)
            if self.failing:
                raise ValueError("a fault of the compiler")
            compile_on(generator, mesh, program)

        monkeypatch.setattr(BackgroundGenerator, "_compile_on", held)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


@pytest.fixture(scope="module")
def made():
    """Caches of 32, 64 and 128 slots, batches of one and four rows."""
    sizes = {"cache_length": 128, "smallest_cache": 32, "batch_size": 4, "max_new_tokens": 24}
    return make_generator(random_models(), **sizes, width="adaptive", widths=(0, 2))


USUAL_PROGRAMS = {}  # those of a ready engine, compiled once


@pytest.fixture
def engine(made, gate, monkeypatch):
    """A ready engine. The gate closed when it had compiled what it compiles before that, and nothing else."""
    made.compiled.clear()
    made.compiled.update(USUAL_PROGRAMS)

    def closing(*arguments):
        USUAL_PROGRAMS.update(made.compiled)
        gate.open.clear()
        return chat_programs(*arguments)

    monkeypatch.setattr(engines, "chat_programs", closing)
    served = ServedModel("small", made.models, made.generator, None, MODES, Prefixes(4, 10**9))
    engine = Engine(lambda: contextlib.nullcontext(served))
    engine.start()
    wait_for(lambda: engine.status != "loading")
    assert engine.status == "ready", engine.failure
    wait_for(lambda: not gate.open.is_set())
    yield engine
    gate.open.set()
    engine.drain()
    engine.join(120)
    assert engine.failure is None
    for pool in (engine._generator.pool, engine._generator.urgent):
        pool.shutdown()  # a compilation that runs writes into the next test's programs


class Asking:
    """A request with its updates as they come."""

    def __init__(self, engine, number: int, sampling: SamplingParams, mode: str = "draft", tokens: int = 24, prompt=()):
        self.prompt, self.mode, self.tokens = prompt or PROMPTS[number % len(PROMPTS)], mode, []
        self.request = engine.served.generator.request(Request(number, 5, tokens, sampling))
        self._updates = queues.Queue()
        engine.submit(ServedRequest(self.prompt, self.request, mode=mode, deliver=self._updates.put))

    def answered(self) -> bool:
        return not self._updates.empty()

    def answer(self) -> list[int]:
        while True:
            update = self._updates.get(timeout=300)
            if update.refusal:
                raise update.refusal
            self.tokens += update.token_ids
            self.cached = update.cached
            if update.finish_reason:
                return self.tokens


@functools.lru_cache
def alone():
    """Programs that the engine does not get."""
    return make_generator(random_models(), cache_length=128, max_new_tokens=24)


def plain(asked: list[Asking]) -> list[list[int]]:
    """The texts of plain decoding, each request alone."""
    return [alone().generate([one.prompt], "autoregressive", [one.request])[0].token_ids for one in asked]


def waited(engine) -> float:
    """Seconds that the engine's thread has compiled since it was ready."""
    return sum(queue.clock.compile_seconds for queue in engine._queues.values())


def test_after_ready_usual_requests_of_all_lengths_wait_for_no_compilation(made, engine, gate):
    """Alone and together, while nothing else gets compiled. As soon as it is, the batch is as small as the load."""
    asked = []
    for number in range(len(PROMPTS)):  # one after another
        asked.append(Asking(engine, number, USUAL[number % 4]))
        asked[-1].answer()
    asked += [Asking(engine, number, USUAL[number % 4]) for number in range(12, 32)]  # five times the rows
    texts = [one.tokens or one.answer() for one in asked]
    assert waited(engine) == 0 and engine.compiling() > 0
    assert texts == plain(asked)

    gate.open.set()

    def follows() -> bool:
        asked.append(Asking(engine, 0, SamplingParams()))
        asked[-1].answer()
        return any(key[0] == "draft" and key[1] == 1 and key[3].greedy for key in made.compiled)

    wait_for(follows)
    assert waited(engine) == 0
    assert asked[-1].tokens == asked[0].tokens


@pytest.mark.parametrize(
    ("mode", "sampling"), [("autoregressive", SamplingParams()), ("draft", SamplingParams(1.0, top_k=65))]
)
def test_a_new_mode_or_a_new_top_k_stops_only_its_own_request(engine, gate, mode, sampling):
    new = Asking(engine, 1, sampling, mode)
    others = [Asking(engine, number, USUAL[number % 2]) for number in range(6)]
    for other in others:
        other.answer()
    assert not new.answered() and engine.compiling() > 0
    gate.open.set()
    new.answer()
    assert [one.tokens for one in (new, *others)] == plain([new, *others])
    assert waited(engine) == 0


def test_a_request_does_not_wait_behind_programs_that_no_request_needs(engine, gate):
    gate.passing = "urgent"
    usual = Asking(engine, 2, SamplingParams())  # demands programs of a smaller batch
    new = Asking(engine, 1, SamplingParams(), "autoregressive")
    assert [new.answer(), usual.answer()] == plain([new, usual])
    assert engine.compiling() > 0


def test_a_program_that_cannot_be_compiled_fails_the_requests_that_need_it_and_later_ones_try_again(engine, gate):
    gate.failing = True
    gate.open.set()
    failed = [Asking(engine, 1, SamplingParams(), "autoregressive") for _ in range(2)]
    for one in failed:
        with pytest.raises(Exception, match="a fault of the compiler"):
            one.answer()
    other = Asking(engine, 2, SamplingParams(1.0))
    assert other.answer() == plain([other])[0]
    gate.failing = False  # as memory that is free again
    again = Asking(engine, 1, SamplingParams(), "autoregressive")
    assert again.answer() == plain([again])[0]


def test_a_server_of_8b_compiles_eight_programs_before_it_is_ready_and_then_those_of_a_second_turn():
    """Three prefills, which any prompt is padded to, their admissions, the empty batch and its rounds."""
    models = programs.models_on(sharding.make_mesh(1, 1, 1, jax.devices()[:1]), "8b", layers=3)
    settings = serve.settings_of(cli.parse(["serve", "--config=configs/qwen3_8b.py"], ("config",)))
    generator = new_generator(models, settings)
    usual = [program.key for program in usual_programs(generator, models, "draft")]
    assert collections.Counter(key[0] for key in usual) == {"prefill": 3, "admit": 3, "empty": 1, "draft": 1}
    assert [key[0] for key in usual[4:]] == ["empty", "admit", "admit", "admit"]  # the large ones begin first
    later = (program.key for program in chat_programs(generator, models, "draft") if program.key not in usual)
    assert list(itertools.islice(later, 2)) == [
        ("keep", 16, 4096, True, 256),
        ("prefill", 1, 64, 256, False, usual[0][-1], 256),  # 64 tokens after the rows of the earlier text
    ]


def test_a_turn_that_is_read_whole_because_of_a_compilation_is_counted(engine, gate):
    first = Asking(engine, 3, SamplingParams(), tokens=3, prompt=[5, 6] * 20)
    prompt = [*first.prompt, *first.answer(), *[5] * 9]

    def cached() -> int:
        turn = Asking(engine, 0, SamplingParams(), tokens=3, prompt=prompt)
        assert turn.answer()
        return turn.cached

    assert cached() == 0 and engine.metrics.prefix_waits._value.get() > 0
    gate.open.set()
    assert wait_for(cached) >= 16 and waited(engine) == 0


def test_a_request_that_waits_for_a_program_can_be_given_up(engine, gate):
    new = Asking(engine, 1, SamplingParams(), "autoregressive")
    [request] = engine._requests
    wait_for(lambda: request.awaited)
    engine.cancel(request)
    wait_for(lambda: not engine._requests)
    assert not new.answered()


COMMAND = """
import sys, threading
from domino_jax import serve
from domino_jax.decoding.programs import Programs
from domino_jax.recipe import cli
from domino_jax.serving.engine import Engine

jitted, take_messages = Programs.jitted, Engine._take_messages
stuck = threading.Event()

def jit_or_wait(programs, program):
    if stuck.is_set():
        print("compiles", flush=True)
        threading.Event().wait()
    return jitted(programs, program)

def ready(engine):
    stuck.set()
    return take_messages(engine)

if sys.argv.pop(1) == "loading":
    stuck.set()
Programs.jitted, Engine._take_messages = jit_or_wait, ready
cli.run(serve.main, required=("config",), optional=("host", "port"))
"""


@pytest.mark.parametrize("when", ["loading", "ready"])
def test_sigterm_answers_what_has_arrived_and_exits_with_0_without_waiting_for_a_compilation(tmp_path, when):
    """While the server loads, or while a program is compiled that no request waits for."""
    log = tmp_path / "log"
    argv = [sys.executable, "-c", COMMAND, when, "--config=configs/tiny.py", "--port=0", *SETTINGS]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=log.open("w"), stderr=subprocess.STDOUT, env=os.environ)
    try:
        wait_for(lambda: process.poll() is not None or "http://" in log.read_text())
        port, answers = int(log.read_text().split("http://127.0.0.1:")[1].split("/")[0]), []
        assert get(port, "/health")[0] == 503 and post(port, asked())[0] == 503  # it loads
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            if when == "ready":
                wait_for(lambda: get(port, "/health")[0] == 200, 600)
                answers = [pool.submit(post, port, asked(seed=seed, temperature=1.0)) for seed in range(8)]
            wait_for(lambda: process.poll() is not None or "compiles" in log.read_text())
            process.send_signal(signal.SIGTERM)
            assert {answer.result()[0] for answer in answers} <= {200, 503}
        assert process.wait(60) == 0 and "Traceback" not in log.read_text(), log.read_text()
        assert when == "loading" or 200 in {answer.result()[0] for answer in answers}
    finally:
        process.kill()
