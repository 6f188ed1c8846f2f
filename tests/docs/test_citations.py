"""Whatever the repository's files cite, a reader of the repository can open."""

import re
import subprocess
from collections.abc import Sequence

from tests.helpers.paths import ROOT

SUFFIXES = (".py", ".md", ".ipynb", ".yaml", ".sbatch", ".sh", ".toml", ".txt", ".cff")
# Output of launchers, a licence that is quoted as it is, and this file's own examples.
LEFT_OUT = ("tests/launch/golden/", "assets/tiny_qwen3/LICENSE", "tests/docs/test_citations.py")
# Documents that no reader of the repository has.
# TREE and HEADS are names in the code as well.
FOREIGN = re.compile(r"\b(CONTRACT|DESIGN|PITFALLS|RELIABILITY|STYLE)\b|\b(TREE|HEADS)(\.md\b| §| section)")
# A section number is a citation only beside the paper it belongs to.
SECTION = re.compile(r"§")
PAPER = re.compile(r"arXiv|[Pp]aper")
OURS = r"(?:docs|tests|domino_jax|configs|benchmarks|assets|launch|integrations)"
PATH = re.compile(rf"(?<![\w/.-])({OURS}/[\w./-]*\w\.(?:py|md|ipynb|sh|sbatch|yaml|svg|png))\b")
MODULE = re.compile(r"(?<![\w/.*{}'\"-])((?:[a-z_]\w*/)*[a-z_]\w*\.py)\b(?!['\"])")
FOREIGN_MODULES = ("qwen3_dspark.py",)  # of vLLM
HEADING = re.compile(r'README,? "([^"]+)"')
HEADINGS = re.findall(r"^#+ (.+)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    return [name for name in listed if name.endswith(SUFFIXES) and not name.startswith(LEFT_OUT)]


def is_module(name: str, files: Sequence[str]) -> bool:
    """Whether the repository has the file: a bare name, or the end of a path."""
    return name in FOREIGN_MODULES or (ROOT / name).exists() or any(file.endswith(f"/{name}") for file in files)


def bad_modules(text: str, files: Sequence[str]) -> list[str]:
    """The modules that comments and docstrings name without the repository having them, as 'line: name'."""
    lines = enumerate(text.split("\n"), start=1)
    return [
        f"{number}: {name}" for number, line in lines for name in MODULE.findall(line) if not is_module(name, files)
    ]


def bad_citations(text: str) -> list[str]:
    """The citations in `text` that cannot be followed, as 'line: what'."""
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        found += [f"{number}: {match.group()}" for match in FOREIGN.finditer(line)]
        found += [f"{number}: §" for _ in SECTION.finditer(line) if not PAPER.search(line)]
        found += [f"{number}: {path}" for path in PATH.findall(line) if not (ROOT / path).exists()]
        found += [f"{number}: README, {name}" for name in HEADING.findall(line) if name not in HEADINGS]
    return found


def test_every_citation_can_be_followed():
    found = {name: bad_citations((ROOT / name).read_text(encoding="utf-8")) for name in tracked_files()}
    assert {name: bad for name, bad in found.items() if bad} == {}


def test_every_module_that_is_named_is_there():
    files = tracked_files()
    ours = [name for name in files if name.startswith(("domino_jax/", "benchmarks/", "configs/", "docs/", "README"))]
    missing = {name: bad_modules((ROOT / name).read_text(encoding="utf-8"), files) for name in ours}
    assert {name: bad for name, bad in missing.items() if bad} == {}
    assert bad_modules("see checkpoint.py and training/checkpoints.py", files) == ["1: checkpoint.py"]
