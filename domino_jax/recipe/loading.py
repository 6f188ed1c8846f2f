"""Recipes: reading one, and the plain copy of it that a workdir keeps.

A recipe is a Python file with get_config(); a value from the command line arrives through cli.py. ml_collections checks
the types of the values where they are set, rules.py checks the rest.
"""

import importlib.machinery
import importlib.util
import math
import pathlib
import sys
import traceback

from domino_jax.recipe.open_keys import convolution_taps, modes_of, shifts_labels
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
RECIPES = (PACKAGE / "configs", PACKAGE.parent / "configs")  # in an installed wheel, in a checkout


def fixed_keys(config) -> tuple[str, ...]:
    """What decides the shapes of a checkpoint's arrays: a run with other values cannot continue it, allowed or not."""
    return tuple(name for name, key, _ in walk(config) if key.shape)


def load_recipe(path: str) -> Section:
    """The locked config of one recipe file; whatever is wrong with the file is a DominoError that names its line.

    path: a file, or the name of a recipe of this project, as qwen3_8b.
    """
    file = pathlib.Path(path).expanduser()
    if path.isidentifier() and path != "qwen3":  # that one is what the others share
        file = next((folder / f"{path}.py" for folder in RECIPES if (folder / f"{path}.py").is_file()), file)
    if not file.is_file():
        known = sorted({recipe.stem for folder in RECIPES for recipe in folder.glob("*.py")} - {"qwen3"})
        raise DominoError(
            f"--config={path}: there is no such file. Recipes are in configs/, for example configs/tiny.py; a name "
            f"alone is one of {', '.join(known)}."
        )
    # A recipe imports its neighbours as `from configs import ...`, also when it is started from another folder.
    folder = str(file.resolve().parent.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_loader("recipe", importlib.machinery.SourceFileLoader("recipe", str(file)))
    module = importlib.util.module_from_spec(spec)
    try:
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
    plain["drafter"]["conv_kernel_size"] = convolution_taps(config.drafter)
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
