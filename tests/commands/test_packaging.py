"""The files around the package: requirements, and imports that the source must not have."""

import ast
import importlib.metadata
import sys

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.helpers.paths import ROOT

SOURCES = sorted((ROOT / "domino_jax").rglob("*.py"))


def requirements(name):
    lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


# Commands look for these before they import them, and name the line that installs them.
OPTIONAL = {"datasets"}
RUN = [Requirement(line) for line in requirements("requirements.txt")]
GCS = [Requirement(line) for line in requirements("requirements-gcs.txt")]
SERVE = [Requirement(line) for line in requirements("requirements-serve.txt")]
TEST = [Requirement(line) for line in requirements("requirements-test.txt") if not line.startswith("-r")]


def imports(file):
    """Top-level names of every module that a source file imports, wherever it does so."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("requirement", [*RUN, *GCS, *SERVE, *TEST], ids=lambda requirement: requirement.name)
def test_a_requirement_has_both_bounds_and_what_is_installed_fits(requirement):
    operators = {specifier.operator for specifier in requirement.specifier}
    assert operators == {">=", "<"}
    assert Version(importlib.metadata.version(requirement.name)) in requirement.specifier


def test_every_import_of_the_package_is_required():
    # Names under which a distribution is imported, where they differ from its own.
    names = {"absl-py": "absl", "orbax-checkpoint": "orbax", "google-auth": "google"}
    known = {names.get(requirement.name, requirement.name) for requirement in [*RUN, *GCS, *SERVE]} | {"domino_jax"}
    for file in SOURCES:
        unknown = set(imports(file)) - known - sys.stdlib_module_names
        unknown -= OPTIONAL
        assert not unknown, (
            f"{file.name} imports {unknown}, which none of requirements.txt, -gcs.txt and -serve.txt names"
        )


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_source_has_no_torch_no_pickle_and_no_remote_code(file):
    forbidden = {"torch", "pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    assert not forbidden & set(imports(file))
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
            assert isinstance(node.value, ast.Constant) and node.value.value is False
