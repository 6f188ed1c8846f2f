"""vLLM's server on a CPU, in the Python of another environment."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator

from tests.helpers.paths import ROOT
from tests.helpers.serving import wait_for

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENGINE_READY_TIMEOUT_S": "1200",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


def write_entry_point(folder, name: str, target: str) -> None:
    """An entry point by which each process of vLLM calls `target`."""
    facts = folder / f"{name}-0.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0\n")
    (facts / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {target}\n")


@contextlib.contextmanager
def vllm_server(python: str, folder, plugins, port: int, target, drafter, drafts: int, *flags: str) -> Iterator[str]:
    """The URL of a server of `target` in float32.  folder: for its log.  plugins: a folder of installed ones."""
    write_entry_point(folder / "norm", "vllm_norm", "vllm_norm:register")
    shutil.copy(ROOT / "tests" / "helpers" / "vllm_norm.py", folder / "norm")
    options = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": drafts}
    # The build for CPUs has no working `vllm` command, which needs the metadata of the package vllm.
    words = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--port", port, *flags]
    words += ["--host=127.0.0.1", "--dtype=float32", "--max-model-len=512", "--max-num-seqs=8", "--enforce-eager"]
    words += [f"--speculative-config={json.dumps(options)}"]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": f"{plugins}{os.pathsep}{folder / 'norm'}"}
    log = folder / "log"
    with log.open("w") as output:
        words = list(map(str, words))
        process = subprocess.Popen(words, env=environment, stdout=output, stderr=output, start_new_session=True)
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
        except OSError:
            return False

    try:
        wait_for(ready, 1200.0)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
