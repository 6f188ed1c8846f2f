"""Recipes: reading one, and the plain copy of it that a workdir keeps.

A recipe is a Python file with get_config(); a value from the command line arrives through cli.py. ml_collections checks
the types of the values where they are set, rules.py checks the rest.
"""

import contextlib
import importlib.machinery
import importlib.util
import math
import pathlib
import sys
import traceback
import types
from collections.abc import Iterator

from domino_jax.recipe.open_keys import modes_of, shifts_labels
from domino_jax.runtime.errors import DominoError, first_line
from domino_jax.runtime.keys import Section, walk

# What may change between a checkpoint and the run that continues it without touching the training: everything else is
# refused (training/checkpoints.py) unless --allow_config_change names it.
FREE_TO_CHANGE = (
    *("decode", "checkpoint", "mesh", "serve", "drafter.path"),
    "target.path",  # the identity of what is there is compared instead (weights/identity.py)
    *("eval.every", "eval.final", "eval.num_prompts"),  # without eval.prompts rows are held out
    *("train.log_every", "train.hang_seconds", "regenerate.batch_size", "regenerate.use_drafter", "data.skip_bad_rows"),
)

PACKAGE = pathlib.Path(__file__).parents[1]
INSTALLED = PACKAGE / "configs"  # of a wheel, beside which another project may have a folder of this name
RECIPES = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent / "configs"


def fixed_keys(config) -> tuple[str, ...]:
    """Keys that decide the shapes of a checkpoint's arrays: a run with other values cannot continue it."""
    return tuple(name for name, key, _ in walk(config) if key.shape)


def load_recipe(path: str) -> Section:
    """The locked config of one recipe file; whatever is wrong with the file is a DominoError that names its line.

    path: a file, or the name of a recipe of this project, as qwen3_8b.
    """
    file = pathlib.Path(path).expanduser()
    if path.isidentifier() and path != "qwen3":  # that one is what the others share
        ours = RECIPES / f"{path}.py"
        file = ours if ours.is_file() else file
    if not file.is_file():
        known = sorted({recipe.stem for recipe in RECIPES.glob("*.py")} - {"qwen3"})
        raise DominoError(
            f"--config={path}: there is no such file. Recipes are in configs/, for example configs/tiny.py; a name "
            f"alone is one of {', '.join(known)}."
        )
    spec = importlib.util.spec_from_loader("recipe", importlib.machinery.SourceFileLoader("recipe", str(file)))
    module = importlib.util.module_from_spec(spec)
    try:
        with _neighbours(file.resolve().parent):
            spec.loader.exec_module(module)
            config = module.get_config()
    except Exception as error:  # a recipe is the user's program, which may raise anything
        raise DominoError(
            f"--config={path}: the recipe does not load.\n{_line_of(error, file)}: {first_line(error)}"
        ) from error
    if not isinstance(config, Section):
        raise DominoError(
            f"--config={path}: get_config() returned {type(config).__name__}; start from configs.qwen3.get_config."
        )
    return config.lock()


@contextlib.contextmanager
def _neighbours(folder: pathlib.Path) -> Iterator[None]:
    """Within it `configs` is the recipe's folder, if it has that name, and then ours, wherever the command starts.

    Many projects have a package of this name. The current folder's, or an installed one, is never meant.
    """

    def take_out() -> dict[str, types.ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "configs"}

    before, path = take_out(), list(sys.path)
    package = sys.modules["configs"] = types.ModuleType("configs")
    package.__path__ = [str(folder)] * (folder.name == "configs") + [str(RECIPES)]
    sys.path.append(str(folder.parent))  # other packages beside the recipe's folder
    try:
        yield
    finally:
        take_out()
        sys.modules.update(before)
        sys.path[:] = path


def _line_of(error: Exception, file: pathlib.Path) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename == str(file)]
    return f"{file}:{inside[-1].lineno}" if inside else str(file)


def resolved(config: Section) -> dict:
    """The recipe as JSON values (tuples become lists, infinities strings): what config.json and checkpoints hold."""
    plain = _plain(config.to_dict())
    plain["drafter"]["shift_label"] = shifts_labels(config.drafter)
    plain["decode"]["modes"] = list(modes_of(config.decode, config.drafter.head))
    return plain


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    return value
