"""The server on loopback: its engine in this process with the tiny pair, or the command as a process."""

import contextlib
import functools
import http.client
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

from domino_jax import serve
from domino_jax.recipe import cli
from tests.helpers.paths import ROOT

QUESTION = "Laura has 46 plums. She breaks 5. She buys 9 more. How many plums does Laura have now?"
MODEL = "tiny_qwen3"
# One size of caches and of batches, so that few programs are compiled.
SETTINGS = (
    "--config.decode.cache_length=256",
    "--config.decode.max_new_tokens=96",
    "--config.decode.modes=('autoregressive','draft')",
    "--config.serve.batch_size=3",
)


def tiny_engine(*flags: str):
    """An engine of the tiny pair, ready; flags: more of the command's.

    Its width is fixed, because tests count its rounds and an adaptive width follows the clock.
    """
    from domino_jax.serving.engine import Engine

    argv = ["serve", f"--config={ROOT / 'configs' / 'tiny.py'}", *SETTINGS, "--config.decode.width=fixed", *flags]
    flags = cli.parse(argv, ("config",), ("host", "port"))
    engine = Engine(functools.partial(serve.loaded, flags, serve.settings_of(flags)), 8)
    engine.start()
    wait_for(lambda: engine.status != "loading")
    assert engine.failure is None, engine.failure
    return engine


@contextlib.contextmanager
def listening(engine, key: str | None = None, hosts: tuple[str, ...] = ("*",), origin: str | None = None):
    """The port of a server around the engine."""
    import uvicorn

    from domino_jax.serving.app import new_app, uvicorn_config

    app = new_app(engine, key, hosts, origin)
    listener = serve.bind("127.0.0.1", 0)
    config = uvicorn_config(app)
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)


def wait_for(fine, seconds: float = 300.0):
    end = time.monotonic() + seconds
    while not (result := fine()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return result


def post(port: int, body: bytes | dict, path: str = "/v1/chat/completions", **headers) -> tuple[int, dict, dict]:
    """(status, headers, object) of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps(body).encode() if isinstance(body, dict) else body
    connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    with contextlib.closing(connection):
        return answer.status, dict(answer.getheaders()), json.loads(answer.read())


def get(port: int, path: str, **headers) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def asked(content: str = QUESTION, **fields) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def raw_stream(port: int, body: dict, sent: bytes | None = None, path: str = "/v1/chat/completions") -> socket.socket:
    """A socket that has sent a request, or other bytes, and reads nothing yet."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}"
    connection = socket.create_connection(("127.0.0.1", port), timeout=120)
    connection.sendall(head.encode() + b"\r\n\r\n" + data if sent is None else sent)
    return connection


def stream_of(port: int, body: dict, path: str = "/v1/chat/completions") -> list[dict]:
    """The objects of a whole stream."""
    received = b""
    with contextlib.closing(raw_stream(port, {"stream": True} | body, path=path)) as connection:
        while b"[DONE]" not in received:
            part = connection.recv(65536)
            assert part, received
            received += part
    return [json.loads(line[6:]) for line in received.decode().splitlines() if line.startswith("data: {")]


def start_command(log: pathlib.Path, *flags: str) -> tuple[subprocess.Popen, int]:
    """The command as a process, and its port."""
    argv = [sys.executable, "-m", "domino_jax.serve", "--config=configs/tiny.py", "--port=0", *SETTINGS, *flags]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=log.open("w"), stderr=subprocess.STDOUT, env=os.environ)
    line = wait_for(lambda: process.poll() is not None or "http://" in log.read_text())
    assert line and process.poll() is None, log.read_text()
    return process, int(log.read_text().split("http://127.0.0.1:")[1].split("/")[0])
