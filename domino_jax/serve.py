"""Serve a target with its drafter over OpenAI's HTTP API, with a page that shows how it drafts.

    python -m domino_jax.serve --config=configs/tiny.py
    python -m domino_jax.serve --config=configs/qwen3_8b.py --config.drafter.path=DIR --host=0.0.0.0 --port=8000

The page is at http://127.0.0.1:8000/, the API under /v1 (docs/serving.md). With DOMINO_API_KEY in the environment,
requests under /v1 need this key. Values that a request leaves out are those of config.decode.

SIGTERM and SIGHUP refuse new requests, answer those that have arrived and end with exit code 0; while it loads they end
it at once.

It needs requirements-serve.txt besides requirements.txt.
"""

import contextlib
import functools
import ipaddress
import os
import pathlib
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Iterator

from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.prefixes import Prefixes
from domino_jax.decoding.settings import BASELINE, DecodeSettings
from domino_jax.recipe import cli, rules
from domino_jax.recipe.builders import loader_of
from domino_jax.recipe.models import lower_to_drafter
from domino_jax.recipe.open_keys import decode_settings, width_of
from domino_jax.runtime.errors import FULL, REFUSED, DominoError, unwritable
from domino_jax.weights.drafter import stored_head
from domino_jax.weights.loading import keep_compiled

# Pages of other sites can point a name of theirs at this machine, and then read answers as their own site's.
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
KEY = "DOMINO_API_KEY"


def main(flags: cli.Flags) -> None:
    # 1. The recipe, and the address: what is wrong with them is reported before anything is loaded.
    config = flags.config
    rules.check(config, "serve", flags.set_keys)
    settings = settings_of(flags)
    try:
        import uvicorn

        from domino_jax.serving.app import new_app, uvicorn_config
        from domino_jax.serving.engine import Engine
        from domino_jax.serving.metrics import Metrics
    except ModuleNotFoundError as error:
        raise DominoError(f"{error.name} is not installed: pip install -r requirements-serve.txt.") from error
    host, key = flags.host, os.environ.get(KEY)
    listener = bind(host, flags.port)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # often 1,024 connections otherwise

    # 2. The engine, on its own thread: it loads, compiles and decodes. Until it is ready /health answers 503.
    load = functools.partial(loaded, flags, settings)
    engine = Engine(load, metrics=Metrics(flags.metrics_prefix))
    hosts = (*LOOPBACK, host) if is_loopback(host) else ("*",)
    app = new_app(engine, key, hosts, flags.allow_origin)

    # 3. The server, on the main thread, which gets the signals.
    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: object) -> None:
            if sig == signal.SIGINT:
                self.force_exit = self.should_exit = self.interrupted = True
            else:
                engine.drain()

    server = Server(uvicorn_config(app))
    server.interrupted = False
    engine.ended = lambda: setattr(server, "should_exit", True)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, server.handle_exit)
    print(f"serve: http://{host}:{listener.getsockname()[1]}/ answers when the programs are compiled", flush=True)
    if not is_loopback(host):
        without = "" if key else f" and no {KEY} is set"
        print(f"warning: {host} can be reached from other machines{without}.", flush=True)
    engine.start()
    server.run(sockets=[listener])
    leave(KeyboardInterrupt() if server.interrupted else engine.failure)


def leave(failure: BaseException | None) -> None:
    """Ends the command at once: at its own end Python would wait for a compilation, which nothing can end."""
    if isinstance(failure, OSError) and failure.errno in FULL + REFUSED:
        failure = unwritable(failure.filename or "a file", failure)
    code = 130 if isinstance(failure, KeyboardInterrupt) else 1 if failure else 0
    if isinstance(failure, DominoError):
        code = cli.report(failure)
    elif code == 1:
        traceback.print_exception(failure)
    sys.stdout.flush()
    os._exit(code)


def settings_of(flags: cli.Flags) -> DecodeSettings:
    config, path = flags.config, flags.config.drafter.path
    head = stored_head(path) if path else config.drafter.head
    changes = {"batch_size": config.serve.batch_size, "width": width_of(config.decode, flags.set_keys)}
    return decode_settings(config.decode, head, config.data.train).change(**changes)


@contextlib.contextmanager
def loaded(flags: cli.Flags, settings: DecodeSettings) -> Iterator:
    """The models of the recipe, on its mesh, as the engine serves them."""
    from domino_jax.serving.requests import ServedModel

    keep_compiled()
    config, loader = flags.config, loader_of(flags, settings, "serve.batch_size")
    with loader.on_mesh():
        target = loader.target()
        models = loader.models(target, config.drafter.path, settings.modes)
        if models.drafter:
            settings = lower_to_drafter(settings, models.drafter.config)
        generator = new_generator(models, settings, target.stop_ids)
        modes = tuple(dict.fromkeys((BASELINE, *settings.modes)))
        prefixes = Prefixes(4 * settings.batch_size, int(config.serve.prefix_gib * 2**30))
        name = pathlib.PurePath(config.target.path).name
        yield ServedModel(name, models, generator, target.tokenizer, modes, prefixes)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2_048)
    except (OSError, OverflowError) as error:
        raise DominoError(f"--host={host} --port={port} cannot be listened on: {error}; name another.") from error
    return listener


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


if __name__ == "__main__":
    cli.run(main, required=("config",), optional=("host", "port", "allow_origin", "metrics_prefix"))
