"""The README and the pages of docs/ name what is there, and their commands parse and pass the recipe's checks."""

import pathlib
import re
import shlex

import pytest

from configs import qwen3
from domino_jax.recipe import cli, rules
from tests.helpers.commands import COMMANDS
from tests.helpers.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FIRST = (
    "python3 -m venv .venv && . .venv/bin/activate && pip install -r requirements.txt"
    " && python -m domino_jax.train --config=configs/tiny.py --workdir=/tmp/domino"
)
TESTS = "python3 -m venv .venv && . .venv/bin/activate && pip install -r requirements-test.txt && pytest"


SECTIONS = "target|drafter|data|preflight|train|checkpoint|eval|mesh|decode|regenerate|serve"
FILES = ("preflight.json",)  # looks like a key


def commands() -> list[str]:
    """Every call of one of the commands on a page, continued lines joined, with a real recipe for RECIPE."""
    found = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ").replace("RECIPE", "configs/tiny.py")
        found |= set(re.findall(r"python -m (domino_jax\.\w+ +--(?:config=configs|workdir=)[^`\n…]*)", text))
    assert len({line.split()[0] for line in found}) == len(COMMANDS)
    return sorted(found)


def test_the_readme_is_short():
    lines = README.splitlines()
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL).splitlines()
    assert len(lines) <= 150
    assert max(len(line) for line in prose if not line.startswith("|")) <= 120


@pytest.mark.parametrize("command", [FIRST, TESTS])
def test_the_readme_has_the_command_that_other_programs_rely_on(command):
    assert command in README.splitlines()


def test_the_layout_names_every_folder_and_command_of_the_package():
    package = ROOT / "domino_jax"
    folders = {path.name for path in package.iterdir() if (path / "__init__.py").exists()}
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    layout = CONTRIBUTING.split("domino_jax/\n")[1].split("```")[0]
    assert set(re.findall(r"^  (\w+)/ ", layout, re.MULTILINE)) == folders
    assert set(re.findall(r"\b\w+\.py\b", layout)) == modules


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL))
    local = [link for link in links if not link.startswith("http") and not link.startswith("api/")]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("line", commands())
def test_every_command_of_the_pages_parses_and_passes_the_checks_of_its_recipe(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line.split(" && ")[0].split("  #")[0])
    command = words[0].split(".")[1]
    module, required, optional = COMMANDS[command]
    source = pathlib.Path(module.__file__).read_text(encoding="utf-8")
    assert all(f'"{flag}"' in source.rsplit("if __name__", 1)[1] for flag in (*required, *optional))
    flags = cli.parse([command, *words[1:]], required, optional)
    if flags.config:
        rules.check(flags.config, "dry_run" if flags.dry_run else command, flags.set_keys)


# The log names keys that are gone.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "log.md"], ids=lambda page: page.name)
def test_the_recipe_keys_on_a_page_exist(page):
    recipe = qwen3.get_config("target")
    keys = re.findall(rf"(?:config\.|`)((?:{SECTIONS})(?:\.[a-z_]+)+)(?=[`=])", page.read_text(encoding="utf-8"))
    keys = [key for key in keys if key not in FILES]
    assert [key for key in keys if not has_key(recipe, key) and not has_key(recipe.decode, key)] == []


def has_key(recipe, key: str) -> bool:
    for name in key.split("."):
        if name not in recipe:
            return False
        recipe = recipe[name]
    return True
