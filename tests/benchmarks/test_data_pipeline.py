"""benchmarks/device/data_pipeline.py: its rows, one small file indexed and read, and its report."""

import argparse

import numpy as np

from benchmarks.device import data_pipeline
from domino_jax.weights import hf

ROWS, TOKENS = 300, 60


def test_a_file_is_indexed_and_read_and_its_rows_have_the_length_that_was_asked_for(tmp_path):
    file = tmp_path / "rows.jsonl"
    data_pipeline.write_rows(file, hf.load_tokenizer(data_pipeline.TARGET), ROWS, TOKENS)
    lines = file.read_text().splitlines()
    assert len(set(lines)) == len(lines) == ROWS
    found = data_pipeline.index_file(file, tmp_path, 1)
    lengths = found["index"]["lengths"]
    assert TOKENS < lengths.mean() < 2 * TOKENS  # a turn's template adds to its text
    assert np.percentile(lengths, 90) > 2 * np.percentile(lengths, 10)
    assert found["peak_bytes"] >= found["before_bytes"] > 1e7
    read = data_pipeline.read_file(file, tmp_path, 2, 0)
    assert read["rows_per_second"] > 0 and read["tokens"] == lengths.mean()


def test_the_report_states_rates_and_memory():
    figures = {"fingerprint_seconds": 2.0, "before_bytes": 9e7, "peak_bytes": 2.4e8, "worker_bytes": 1.1e8}
    indexed = {1: figures | {"index_seconds": 500.0}, 4: figures | {"index_seconds": 125.0}}
    read = [{"tokens": 150.4, "rows_per_second": 900.0, "wait": 0.0004, "peak_bytes": 3e8}]
    choices = argparse.Namespace(rows=1_000_000, tokens=150)
    lines = data_pipeline.report(choices, indexed, read, "A machine.").splitlines()
    assert lines[0] == "`python -m benchmarks.device.data_pipeline --rows=1000000 --tokens=150 --processes 1 4`"
    assert "| 1 | 500 s | 2,000 | 90 | 240 | – |" in lines
    assert "| 4 | 125 s | 8,000 | 90 | 240 | 110 |" in lines
    assert "| 150 | 900 | 0.4 ms | 300 |" in lines
