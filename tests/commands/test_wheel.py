"""A wheel holds everything that the commands read: all modules, the recipes, the page and the card."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.helpers.commands import COMMANDS
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.tools


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package of a wheel alone; this environment has its requirements."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy, as a build leaves its own files beside the source
    for name in ("domino_jax", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", f"--wheel-dir={folder}", source], check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def python(site, *words):
    environment = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=site.parent, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_it_holds_every_file_of_the_package_and_every_recipe(installed):
    kinds = (".py", ".html", ".md")
    package = {path.relative_to(ROOT) for path in (ROOT / "domino_jax").rglob("*") if path.suffix in kinds}
    recipes = {path.relative_to(ROOT) for path in (ROOT / "configs").glob("*.py")}
    files = {path.relative_to(installed) for path in (installed / "domino_jax").rglob("*") if path.suffix in kinds}
    inside = {path.relative_to("domino_jax") for path in files if path.parts[1] == "configs"}
    assert inside == recipes and {path for path in files if path.parts[1] != "configs"} == package


def test_every_command_starts_from_it_and_the_page_and_the_card_are_read(installed):
    script = (
        "import importlib, domino_jax\n"
        f"for command in {sorted(COMMANDS)}:\n"
        "    importlib.import_module(f'domino_jax.{command}')\n"
        "from domino_jax.evals import model_card, page\n"
        "from domino_jax.serving import app\n"
        "assert all(file.read_text() for file in (model_card.TEMPLATE, page.TEMPLATE, app.PAGE))\n"
        "print(domino_jax.__file__)\n"
    )
    code, text = python(installed, "-c", script)
    assert code == 0 and str(installed) in text, text


def test_a_recipe_is_found_by_its_name(installed):
    code, text = python(installed, "-m", "domino_jax.decode", "--config=qwen3_8b", "--config.nothing=1", "--prompt=a")
    assert code == 2 and "qwen3_8b has no such key" in text


def test_a_recipe_is_ours_where_another_package_has_the_name_configs(installed):
    for folder in (installed, installed.parent):  # installed too, and that of the current folder
        (folder / "configs").mkdir()
        (folder / "configs" / "__init__.py").write_text("")
        (folder / "configs" / "resnet.py").write_text("raise RuntimeError")
    script = "from domino_jax.recipe.loading import load_recipe\nprint(load_recipe('qwen3_8b').target.path)"
    code, text = python(installed, "-c", script)
    assert code == 0 and "Qwen/Qwen3-8B" in text, text
    code, text = python(installed, "-c", script.replace("qwen3_8b", "resnet"))
    assert code == 1 and "there is no such file" in text, text
