"""metrics.py: one row a step, none lost and none told twice, whatever kills the run."""

import json
import struct

import jax
import jax.numpy as jnp
import pytest
from etils import epath
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from domino_jax.runtime.errors import DataError
from domino_jax.runtime.remote import filesystem
from domino_jax.training.metrics import MetricsWriter, read_rows


def write_steps(workdir, steps, start_step=0):
    """The rows of metrics.jsonl after these steps."""
    with MetricsWriter(workdir, 10, start_step) as metrics:
        for step in steps:
            metrics.write(step, {"loss": jnp.float32(step / 2), "lambda_base": 1.0})
    return read_rows(workdir / "metrics.jsonl")


def events_of(data):
    """The Events of an event file, each with both of its checksums right."""
    events = []
    while data:
        (length,), (of_length,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
        body, (of_body,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
        assert (of_length, of_body) == (masked_crc32c(data[:8]), masked_crc32c(body))
        events.append(Event.FromString(body))
        data = data[16 + length :]
    return events


def test_a_row_is_on_disk_with_every_bit_before_the_run_ends(tmp_path):
    with MetricsWriter(tmp_path, 10) as metrics:
        metrics.write(1, {"loss": 0.1 + 0.2, "grad_norm": float("inf"), "rates": [1, float("nan")]})
        metrics.flush()
        [row] = read_rows(tmp_path / "metrics.jsonl")
    assert row.pop("loss").hex() == (0.1 + 0.2).hex() and row.pop("seconds") >= 0
    assert row == {"step": 1, "grad_norm": None, "rates": [1.0, None]}  # JSON has no NaN


def test_a_resumed_run_drops_the_rows_after_its_step_and_goes_on_counting_time(tmp_path):
    rows = write_steps(tmp_path, [2, 4, 6])
    rows[1]["seconds"] = 100.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = write_steps(tmp_path, [6, 8], start_step=4)
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert rows[2]["seconds"] >= 100.0


def test_a_broken_row_in_the_middle_is_named_by_its_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{broken\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl:2"):
        read_rows(file)


def test_processes_other_than_the_first_write_and_say_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    write_steps(tmp_path / "run", [1])
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


def test_tensorboard_gets_the_values(tmp_path):
    with MetricsWriter(tmp_path, 10) as metrics:
        metrics.write(1, {"loss": 1.0, "rates": [0.5, 0.25]})
    (events,) = (tmp_path / "tensorboard").iterdir()
    written = events_of(events.read_bytes())
    assert [event.step for event in written if event.session_log.status == 1] == [1]  # what TensorBoard forgets
    points = {value.tag: value.simple_value for event in written for value in event.summary.value}
    assert points == {"loss": 1.0, "rates/1": 0.5, "rates/2": 0.25}


def test_a_bucket_holds_the_same_rows_and_a_tensorboard(bucket):
    for start, steps in ((0, [2, 4, 6]), (4, [6, 8])):
        with MetricsWriter(f"{bucket}/run", 10, start) as metrics:
            for step in steps:
                metrics.write(step, {"loss": step / 2})
    assert [row["step"] for row in read_rows(f"{bucket}/run/metrics.jsonl")] == [2, 4, 6, 8]
    files = [epath.Path(f"gs://{name}") for name in filesystem(bucket).find(f"{bucket}/run")]
    assert sorted(path.name.split(".")[0] for path in files) == ["events", "events", "metrics"]
    events = b"".join(path.read_bytes() for path in sorted(files) if path.name.startswith("events"))
    assert [(event.step, value.tag) for event in events_of(events) for value in event.summary.value] == [
        (step, "loss") for step in (2, 4, 6, 6, 8)
    ]
