"""Scalars as the bytes of a TensorBoard event file: TFRecords of Event messages, for files that are appended to."""

import socket
import struct
import time
from collections.abc import Mapping

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar


def file_name() -> str:
    """The name TensorBoard looks for; later starts of a run are read after earlier ones."""
    return f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}"


def first_records(step: int) -> bytes:
    """What an event file begins with: its version, and that points of `step` and later are to be forgotten."""
    started = Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))
    return _framed(Event(wall_time=time.time(), step=step, file_version="brain.Event:2")) + _framed(started)


def record(step: int, points: Mapping[str, float]) -> bytes:
    """One Event with a scalar for each name."""
    values = [value for name, point in points.items() for value in scalar(name, point).value]
    event = Event(wall_time=time.time(), step=step)
    event.summary.value.extend(values)
    return _framed(event)


def _framed(event: Event) -> bytes:
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
