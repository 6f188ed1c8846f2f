"""weights_and_biases.py against a stand-in for the package: asked for, and given every row."""

import io
import sys
import types

import pytest
import rich.console

from domino_jax.training.metrics import MetricsWriter


class Service(types.ModuleType):
    """A module `wandb` that keeps what it is told."""

    class Error(Exception):
        pass

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace(name="wandb")
        self.settings, self.rows, self.finished = [], [], 0
        self.fails = None

    def init(self, **settings):
        if self.fails:
            raise self.Error(self.fails)
        self.settings.append(settings)
        return self

    def define_metric(self, *names, **settings):
        pass

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished += 1


@pytest.fixture
def service(monkeypatch):
    module = Service()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def writer(workdir, **changes):
    console = rich.console.Console(file=io.StringIO(), width=200)
    return MetricsWriter(workdir, 10, wandb="domino", recipe={"seed": 42}, console=console, **changes), console


def test_rows_recipe_and_project_arrive(service, tmp_path):
    metrics, _ = writer(tmp_path)
    with metrics:
        metrics.write(1, {"loss": 0.5})
        metrics.write(2, {"loss": 0.25})
    assert [(row["step"], row["loss"]) for row in service.rows] == [(1, 0.5), (2, 0.25)]
    assert service.settings[0]["project"] == "domino" and service.settings[0]["config"] == {"seed": 42}
    assert service.finished == 1


def test_a_later_start_continues_the_same_run(service, tmp_path):
    for start in (0, 2):
        with writer(tmp_path, start_step=start)[0] as metrics:
            metrics.write(start + 2, {"loss": 1.0})
    one, two = service.settings
    assert one["id"] == two["id"] and two["resume"] == "allow"


def test_a_service_that_fails_is_one_line_and_the_run_goes_on(service, tmp_path):
    service.fails = "no network"
    metrics, console = writer(tmp_path)
    with metrics:
        metrics.write(1, {"loss": 1.0})
    message = [line for line in console.file.getvalue().splitlines() if "Weights" in line]
    assert message == ["Weights & Biases: no network; the run goes on without it."]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
