"""Tests run on the CPU in true float32."""

import gc
import importlib.metadata
import importlib.util
import os
import signal
import tempfile
import uuid

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile large programs and run them for a moment: with these flags that takes a third of the time.
FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # a newer one stops at a flag that it does not know
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
# Tests compile the same programs again and again: they share one cache, gone when the session ends.
COMPILED = tempfile.TemporaryDirectory(prefix="domino-tests-")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", COMPILED.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
os.environ.setdefault("DOMINO_CACHE", f"{COMPILED.name}/domino")  # digests of weights; not in the user's cache

# Under nohup, or in the background of a script, signals are ignored, and the commands that tests start would inherit
# that. A handler of this process is not inherited.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else lambda *_: None)

import jax
import pytest

from domino_jax.decoding.programs import Programs
from domino_jax.runtime.environment import mappings_in_use
from tests.helpers import train_runs
from tests.helpers.bucket_server import bucket_server, make_bucket, variables
from tests.helpers.paths import ROOT

SNAPSHOTS = ROOT / "tests" / "snapshots"
pytest_plugins = ["tests.helpers.slow_runs"]

jax.config.update("jax_default_matmul_precision", "highest")

TOOLS = {"benchmarks", "docs", "integrations", "launch"}  # folders whose tests carry the mark `tools`


def pytest_addoption(parser):
    parser.addoption("--update", action="store_true", help="rewrite the files of tests/snapshots")


@pytest.hookimpl(tryfirst=True)  # before -m
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name in TOOLS:
            item.add_marker(pytest.mark.tools)


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Drops compiled programs after a module where many are loaded, as a process cannot hold those of all tests."""
    yield
    if mappings_in_use() > 0.5:
        for programs in [each for each in gc.get_objects() if issubclass(type(each), Programs)]:
            programs.compiled.clear()
        jax.clear_caches()


@pytest.fixture
def snapshot(request):
    """A function that holds a text against a file of tests/snapshots; with --update it writes the file first."""

    def check(name: str, text: str) -> None:
        file = SNAPSHOTS / name
        if request.config.getoption("--update"):
            file.write_text(text, encoding="utf-8")
        # By lines: to compare long texts as a whole can take pytest minutes.
        assert text.splitlines() == file.read_text(encoding="utf-8").splitlines()

    return check


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


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> train_runs.FinishedRun:
    """The one run of the train command that all tests share, whichever process they run in; tests change copies."""
    return train_runs.finished_run(train_runs.shared_folder(tmp_path_factory))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """The folder of SmolLM2-135M-Instruct in float32, where requirements-smollm2.txt is installed."""
    pytest.importorskip("gguf")
    from assets import make_smollm2  # here: no other test pays for its imports

    if importlib.util.find_spec(make_smollm2.PACKAGE) is None:
        pytest.skip(f"{make_smollm2.PACKAGE} is not installed")
    folder = tmp_path_factory.mktemp("smollm2")
    make_smollm2.write(folder, *make_smollm2.read_gguf(make_smollm2.shipped_file()), "float32")
    return folder
