"""Benchmark scripts at --small, and the tables that they write."""

import csv
import importlib
import pathlib


def run(module: str, *flags: str) -> None:
    importlib.import_module(f"benchmarks.{module}").main(["--small", *flags])


def rows(tmp_path: pathlib.Path, name: str, page: str = "page.md") -> list[dict[str, str]]:
    """The data file of a section, whose marks the page has."""
    assert f"<!-- {name}: begin -->" in (tmp_path / page).read_text()
    with (tmp_path / "data" / f"{name.replace(' ', '_')}.csv").open() as file:
        return list(csv.DictReader(file))


def places(tmp_path: pathlib.Path) -> list[str]:
    return [f"--workdir={tmp_path / 'work'}", f"--page={tmp_path / 'page.md'}"]
