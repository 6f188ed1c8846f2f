#!/usr/bin/env bash
# starlette 1.10.0 under uvicorn 0.54.0, StreamingResponse of a plain (not async) generator.
# Guess: when a client leaves, the response's generator is closed, so its finally block ends a span, closes a file or
#   logs what was sent. An async generator's does, within a moment.
# What happens: a plain generator is dropped, not closed. A reference cycle holds it, so its finally block waits for
#   Python's cyclic garbage collector, also after the response's background task has run and the request is over.
# Why it matters: a token streamer of a model is a plain iterator, and what its finally block does comes at any later
#   time. Close it in the background task, or write the generator as async.
# Output seen: after the client left: async closed True; plain closed False, its background task ran True; after
#   gc.collect(): plain closed True.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "starlette==1.10.0" "uvicorn==0.54.0" \
    "h11==0.16.0" "anyio==4.16.0"
cat >"$folder/run.py" <<'PY'
import asyncio
import gc
import socket
import threading
import time

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse
from starlette.routing import Route

seen = set()


def plain():
    try:
        while True:
            time.sleep(0.05)
            yield b"token\n"
    finally:
        seen.add("plain closed")


async def coroutine():
    try:
        while True:
            await asyncio.sleep(0.05)
            yield b"token\n"
    finally:
        seen.add("async closed")


def route(kind, generator):
    def answer(request):
        return StreamingResponse(generator(), background=BackgroundTask(seen.add, f"{kind} background"))

    return Route(f"/{kind}", answer)


app = Starlette(routes=[route("plain", plain), route("async", coroutine)])
listener = socket.create_server(("127.0.0.1", 0))
server = uvicorn.Server(uvicorn.Config(app, log_level="error", http="h11"))
threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
for _ in range(400):
    if server.started:
        break
    time.sleep(0.05)
assert server.started


def leave_early(kind):
    client = socket.create_connection(listener.getsockname(), timeout=10)
    client.sendall(f"GET /{kind} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    received = b""
    while b"token" not in received:
        part = client.recv(4096)
        assert part, received
        received += part
    client.close()
    end = time.monotonic() + 20
    while f"{kind} background" not in seen and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(2)


gc.collect()
gc.disable()  # as on an idle server, where nothing allocates enough to start a collection
for kind in ("async", "plain"):
    leave_early(kind)
    print(kind, sorted(item for item in seen if item.startswith(kind)))
assert {"async closed", "async background"} <= seen, "the control: an async generator is closed when its client leaves"
assert "plain background" in seen, "the control: the plain generator's request is over too"
assert "plain closed" not in seen, "starlette now closes a plain generator when its client leaves"
gc.collect()
time.sleep(0.5)
print("after a collection", "plain closed" in seen)
assert "plain closed" in seen
PY
"$folder/v/bin/python" "$folder/run.py"
