"""The server's process: its memory over many requests, and its port after it was killed."""

import concurrent.futures
import errno
import gc
import os
import socket

import psutil
import pytest

from tests.helpers.serving import asked, post

pytest.importorskip("starlette", reason="requirements-serve.txt is not installed")
pytest.importorskip("uvicorn", reason="requirements-serve.txt is not installed")
from domino_jax.runtime.errors import DataError
from domino_jax.serve import bind, leave


@pytest.mark.slow(minutes=4)
def test_memory_stays_flat_over_many_short_requests(port):
    process, sizes = psutil.Process(), []

    def ask(number: int):
        return post(port, asked(f"What is {number} + 1?", max_tokens=2, seed=number))[0]

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for part in range(4):
            assert set(pool.map(ask, range(500 * part, 500 * part + 500))) <= {200}
            gc.collect()
            sizes.append(process.memory_info().rss)
    assert sizes[-1] - sizes[1] < 20e6


def test_a_port_can_be_used_again_at_once_after_a_server_was_killed_with_open_connections():
    listener = bind("127.0.0.1", 0)
    address = listener.getsockname()
    with socket.create_connection(address) as client, listener.accept()[0] as served:
        listener.close()
        served.close()  # the side that closes first keeps the port in TIME_WAIT
        assert client.recv(1) == b""
    bind(*address).close()


ENDS = [(DataError("no."), 3, "error: no."), (ValueError("a fault"), 1, "ValueError: a fault"), (None, 0, "")]
ENDS += [
    (OSError(errno.EACCES, "Permission denied", "/c"), 2, "error: /c cannot be opened or written: Permission denied.")
]


@pytest.mark.parametrize(("failure", "code", "shown"), ENDS)
def test_a_server_that_ends_reports_its_mistake_or_fault(monkeypatch, capsys, failure, code, shown):
    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    with pytest.raises(SystemExit) as left:
        leave(failure)
    assert (left.value.code, capsys.readouterr().err.partition("\nName")[0].strip()) == (code, shown)
