"""The latency benchmark: its choices, its table, and (slow) one whole run at the tiny shape."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.device import decode_latency
from domino_jax.forecast import topologies


def found() -> dict:
    part = {"milliseconds": 4.0, "must_bytes": 16e9, "limit_milliseconds": 3.33, "copy_limit_milliseconds": 4.0}
    bare = {"milliseconds": 0.5, "must_bytes": None, "limit_milliseconds": None, "copy_limit_milliseconds": None}
    return {
        "device": "NVIDIA H200",
        "jax": "0.10.2",
        "date": "2026-11-21",
        "choices": {"size": "8b", "dtype": "bfloat16", "slots": 4096, "tau": 7.17},
        "copy_bytes_per_second": 4.0e12,
        "parts": {"step": part, "commit": bare},
        "round_per_step": 1.4,
        "speedup_at_tau": 5.12,
    }


def test_the_table_says_that_it_is_a_simulation():
    text = decode_latency.markdown(found())
    assert "**Random weights, acceptance set to 7.17: a simulation.**" in text
    assert "5.12 × at τ = 7.17 (simulated)" in text


def test_a_part_without_a_byte_count_has_empty_cells():
    lines = decode_latency.markdown(found()).splitlines()
    assert "| step | 4.000 | 16.000 | 3.330 | 4.000 |" in lines
    assert "| commit | 0.500 | – | – | – |" in lines


def test_cpu_tiny_sets_a_shape_that_runs_on_any_cpu():
    choices = decode_latency.parsed(["--cpu-tiny", "--size=8b"])
    assert (choices.size, choices.dtype, choices.slots, choices.widths) == ("tiny", "float32", 512, [16])
    assert decode_latency.parsed([]).widths == [16, 32, 64, 128]


def test_known_devices_have_a_bandwidth():
    assert set(decode_latency.KINDS.values()) == set(topologies.CHIPS)


@pytest.mark.slow(minutes=2)
def test_one_run_at_the_tiny_shape_times_every_part(tmp_path):
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.device.decode_latency", "--cpu-tiny", f"--output={file}"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    kept = json.loads(file.read_text())
    assert kept["simulated"] and set(kept["parts"]) >= {"step", "draft", "head", "verify(17)", "commit", "round"}
    assert kept["parts"]["verify(17)"]["must_bytes"] > kept["parts"]["step"]["must_bytes"]
