"""Load testers and clients of the field, run against the server as their documentation says.

Each has a separate environment, whose Python an environment variable names (CONTRIBUTING.md). OpenAI's client is in
test_server.py, and the bodies of others are in test_client_bodies.py.
"""

import json
import os
import pathlib
import subprocess

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.serving import MODEL, QUESTION, asked, post

pytest.importorskip("starlette", reason="requirements-serve.txt is not installed")
pytestmark = pytest.mark.tools

TARGET = ROOT / "assets" / "tiny_qwen3"


def python_of(variable: str) -> pathlib.Path:
    if variable not in os.environ:
        pytest.skip(f"{variable} names no Python")
    return pathlib.Path(os.environ[variable])


def run(*command: object) -> str:
    # AIPerf takes the path of a tokenizer for a hub id where HF_HUB_OFFLINE is 1.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_guidellm_measures_answers_of_the_length_that_it_asks_for(port, tmp_path):
    report = tmp_path / "report.json"
    run(
        python_of("GUIDELLM_PYTHON").with_name("guidellm"),
        *("run", "--disable-console", "--tokenizer", f"kind=huggingface_auto,model={TARGET}"),
        *("--backend", f"kind=openai_http,target=http://127.0.0.1:{port},model={MODEL}"),
        *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=16", "--profile", "kind=concurrent,streams=2"),
        *("--constraint", "kind=max_requests,count=6", "--output", f"kind=json,path={report}"),
    )
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"], requests["incomplete"]) == (6, [], [])
    assert [one["output_metrics"]["text_tokens"] for one in requests["successful"]] == [16] * 6


VLLM = """
import asyncio, importlib.util, json, pathlib, sys
import aiohttp
folder = pathlib.Path(importlib.util.find_spec("vllm").submodule_search_locations[0])  # the package needs torch
spec = importlib.util.spec_from_file_location("functions", folder / "benchmarks" / "lib" / "endpoint_request_func.py")
functions = importlib.util.module_from_spec(spec)
sys.modules["functions"] = functions
spec.loader.exec_module(functions)
url, model, prompt = sys.argv[1:]
extra = {"temperature": 0.0, "repetition_penalty": 1.0}

async def main():
    outputs = {}
    async with aiohttp.ClientSession() as session:
        for name, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
            choices = {"api_url": url + path, "model": model, "extra_body": extra, "ignore_eos": True}
            asked = functions.RequestFuncInput(prompt=prompt, prompt_len=9, output_len=24, **choices)
            outputs[name] = vars(await functions.ASYNC_REQUEST_FUNCS[name](asked, session))
    print(json.dumps(outputs))

asyncio.run(main())
"""


def test_vllms_request_functions_get_their_tokens_and_the_time_of_the_first_one(port):
    outputs = json.loads(run(python_of("VLLM_PYTHON"), "-c", VLLM, f"http://127.0.0.1:{port}", MODEL, QUESTION))
    for name, output in outputs.items():
        assert output["success"], (name, output["error"])
        assert output["output_tokens"] == 24 and output["prompt_len"] > 20
        assert 0 < output["ttft"] <= output["latency"] and output["generated_text"]
    text = post(port, asked(max_tokens=24, ignore_eos=True))[2]["choices"][0]["message"]["content"]
    assert outputs["openai-chat"]["generated_text"] == text


def test_aiperf_keeps_the_acceptance_of_every_answer(port, tmp_path):
    run(
        python_of("AIPERF_PYTHON").with_name("aiperf"),
        *("profile", "--model", MODEL, "--url", f"http://127.0.0.1:{port}", "--tokenizer", TARGET),
        *("--endpoint-type", "chat", "--streaming", "--concurrency", 2, "--request-count", 6),
        *("--synthetic-input-tokens-mean", 24, "--output-tokens-mean", 16, "--ui", "none"),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "min_tokens:16", "--artifact-dir", tmp_path),
        *("--use-server-token-count", "--per-chunk-usage"),
    )
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    counts = [report[name]["avg"] for name in ("request_count", "output_sequence_length", "total_spec_decode_steps")]
    assert counts == [6, 16, sum(report["pooled_spec_decode_acceptance_histogram"].values())]


LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI, OpenAI
url, model, prompt = sys.argv[1:]
choices = {"base_url": url + "/v1", "api_key": "none", "model": model, "temperature": 0}
print(repr([OpenAI(**choices).batch([prompt, "a b"]), ChatOpenAI(**choices).invoke(prompt).content]))
print(repr("".join(chunk.content for chunk in ChatOpenAI(**choices).stream(prompt))))
"""


def test_langchain_is_answered_with_its_defaults(port):
    lines = run(
        python_of("LANGCHAIN_PYTHON"), "-c", LANGCHAIN, f"http://127.0.0.1:{port}", MODEL, QUESTION
    ).splitlines()
    text = post(port, asked(temperature=0))[2]["choices"][0]["message"]["content"]
    assert repr(text) in lines[0] and lines[1] == repr(text)
