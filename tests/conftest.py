"""Tests run on the CPU in true float32."""

import os
import signal
import tempfile
import uuid

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile the same programs again and again: they share one cache, gone when the session ends.
COMPILED = tempfile.TemporaryDirectory(prefix="domino-tests-")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", COMPILED.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

# Under nohup, or in the background of a script, signals are ignored, and the commands that tests start would inherit
# that. A handler of this process is not inherited.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else lambda *_: None)

import jax
import pytest

from tests.helpers.bucket_server import bucket_server, make_bucket, variables
from tests.helpers.models import GOLDEN_SETS, Golden, load_golden

pytest_plugins = ["tests.helpers.slow_runs"]

jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="session", params=GOLDEN_SETS)
def golden(request) -> Golden:
    """Each golden set in turn."""
    return load_golden(request.param)


@pytest.fixture(scope="session")
def storage_url():
    """The URL of a Google Cloud Storage server, to which gcsfs and tensorstore are led."""
    with bucket_server() as url, pytest.MonkeyPatch.context() as environment:
        for name, value in variables(url).items():
            environment.setenv(name, value)
        yield url


@pytest.fixture
def bucket(storage_url) -> str:
    """gs:// and a new, empty bucket of that server."""
    return make_bucket(storage_url, f"domino-{uuid.uuid4().hex[:12]}")
