"""Recipes: reading one, checking its values, and the plain copy of it that a workdir keeps.

The types of the fields are checked where they are set (ml_collections); here it is ranges. What must fit together is
checked in drafter_checks.py and decode_checks.py. A recipe is a Python file with get_config(); a value from the command
line arrives through cli.py.
"""

import importlib.machinery
import importlib.util
import math
import pathlib
import sys
import traceback
from collections.abc import Collection

from ml_collections import config_dict

from domino_jax.method.config import LARGEST_BLOCK
from domino_jax.method.kinds import HEADS, KINDS, ROW_DRAFTERS
from domino_jax.method.settings import DTYPES, LARGEST
from domino_jax.models.decoder_config import LIMITS
from domino_jax.recipe.decode_checks import check_decode, check_final_decoding, check_mesh, check_sampling, modes_of
from domino_jax.recipe.drafter_checks import check_drafter, check_training
from domino_jax.recipe.values import convolution_taps, require, shifts_labels
from domino_jax.runtime.errors import DominoError, first_line

ROOT = pathlib.Path(__file__).resolve().parents[2]

MESH_AXES = ("data", "fsdp", "tensor")

# What may change between a checkpoint and the run that continues it without touching the training: everything else is
# refused (training/checkpoints.py) unless --allow_config_change names it.
FREE_TO_CHANGE = (
    *("decode", "eval", "checkpoint", "mesh", "preflight", "drafter.path"),
    *("train.log_every", "train.hang_seconds", "train.abort_on_hang", "train.profile_steps", "train.wandb"),
    *("regenerate.batch_size", "regenerate.use_drafter", "data.skip_bad_rows"),
)


# What decides the shapes of a checkpoint's arrays: a run with other values cannot continue it, allowed or not.
FIXED = (
    *("drafter.head", "drafter.num_layers", "drafter.intermediate_size"),
    *("drafter.conv_kernel_size", "drafter.conv_group_size", "train.optimizer"),
    *(key for kind in KINDS.values() for key in kind.shape_keys),
    "data.layout",  # the position in the data counts its items
)


def load_recipe(path: str) -> config_dict.ConfigDict:
    """The locked config of one recipe file; whatever is wrong with the file is a DominoError that names its line."""
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise DominoError(
            f"--config={path}: there is no such file. Recipes are in configs/, for example configs/tiny.py."
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
    if not isinstance(config, config_dict.ConfigDict):
        raise DominoError(f"--config={path}: get_config() returned {type(config).__name__}, expected a ConfigDict.")
    return config.lock()


def _line_of(error: Exception, file: pathlib.Path) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(file)]
    return f"{file}:{own[-1].lineno}" if own else str(file)


def resolved(config: config_dict.ConfigDict) -> dict:
    """The recipe as JSON values (tuples become lists, infinities strings): what config.json and checkpoints hold."""
    plain = _plain(config.to_dict())
    plain["drafter"]["shift_label"] = shifts_labels(config.drafter)
    plain["drafter"]["conv_kernel_size"] = convolution_taps(config.drafter)
    plain["drafter"]["enable_confidence_head"] = KINDS[config.drafter.head].has_confidence_in(config)
    plain["decode"]["modes"] = list(modes_of(config.decode, config.drafter.head))
    return plain


def portable(text: str) -> str:
    """Paths inside the checkout as ./…: it may have moved when a run continues or a decoding is shown again."""
    return text.replace(f"{ROOT}/", "./")


def located(path: str) -> str:
    """A path that `portable` wrote, from whatever folder it is read: what ./… does not name here is in the checkout."""
    inside = ROOT / path
    return str(inside) if path.startswith("./") and not pathlib.Path(path).exists() and inside.exists() else path


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    if isinstance(value, str):
        return portable(value)
    return value


def check(config: config_dict.ConfigDict, command: str, given: Collection[str] = ()) -> None:
    """Refuse a recipe whose values are out of range or do not fit together, before anything is loaded.

    Args:
      config: the recipe with the command line's values in it.
      command: train, dry_run (train without data), decode or regenerate; what only one of them reads is required by
        that one alone.
      given: keys that the command line sets; such a key is refused where the drafter does not read it.
    """
    _check_integers(config)
    _check_values(config)
    check_drafter(config, given)
    _check_training(config)
    if command in ("train", "dry_run"):  # the others take a drafter as it is
        check_training(config)
    check_decode(config)
    check_sampling("regenerate", config.regenerate)
    check_mesh("mesh", config.mesh, MESH_AXES)
    if command == "train":
        _check_train_needs(config)


def _check_integers(config, above: str = "") -> None:
    """Every integer, seeds included, fits the int32 of arrays on a device."""
    for name, value in config.items():
        key = f"{above}{name}"
        if isinstance(value, config_dict.ConfigDict):
            _check_integers(value, f"{key}.")
        elif isinstance(value, int):
            require(abs(value) <= LARGEST, key, value, f"integers must fit int32; give {LARGEST} or less")


# The rules of single values; a value that is absent (None) has none.
LEAST = {
    0: (
        *("seed", "drafter.mask_token_id", "drafter.conv_kernel_size"),
        *("data.held_out", "preflight.rows"),
        *("eval.every", "regenerate.num_prompts", "decode.num_prompts"),
        *("train.lambda_decay_ratio", "train.hang_seconds"),
    ),
    1: (
        *("drafter.num_layers", "drafter.intermediate_size"),
        *("drafter.conv_group_size", "train.steps", "train.batch_size", "train.log_every", "train.num_anchors"),
        *("checkpoint.every", "checkpoint.keep"),
        *("eval.batch_size", "eval.num_prompts"),
        *("regenerate.batch_size", "regenerate.max_new_tokens"),
    ),
    2: ("drafter.block_size", "data.max_length"),  # an anchor and a draft
}
MOST = (
    (LIMITS["num_hidden_layers"], ("drafter.num_layers",)),
    (LIMITS["intermediate_size"], ("drafter.intermediate_size",)),
    (LARGEST_BLOCK, ("drafter.block_size",)),
)
CHOICES = (
    ("target.dtype", DTYPES),
    ("drafter.head", HEADS),
    ("data.layout", ("pad", "pack", "buckets")),
    ("train.loss", ("own", "cross_entropy")),
    ("train.head_tokens", ("text", "drafts")),
    ("train.optimizer", ("adamw", "muon")),
    ("train.non_finite", ("stop", "skip")),
)
SHARES = ("train.lambda_start", "train.dpace_alpha", "train.distill")  # 0 to 1
SHARES_BELOW_ONE = ("train.warmup_ratio", "train.ema_decay")


def value_at(config, key: str):
    """The value of a dotted key."""
    for name in key.split("."):
        config = config[name]
    return config


def _check_values(config) -> None:
    of_heads = [pair for kind in KINDS.values() for pair in kind.choices.items()]
    for key, allowed in (*CHOICES, *of_heads):
        value = value_at(config, key)
        require(value in allowed, key, value, f"set --config.{key} to one of {', '.join(allowed)}")
    for least, keys in LEAST.items():
        for key in keys:
            value = value_at(config, key)
            require(value is None or value >= least, key, value, f"set --config.{key} to {least} or more")
    for most, keys in MOST:
        for key in keys:
            value = value_at(config, key)
            require(value is None or value <= most, key, value, f"set --config.{key} to {most} or less")
    for key, (least, most) in (pair for kind in KINDS.values() for pair in kind.ranges.items()):
        value, limit = value_at(config, key), "or more" if most is None else f"to {most}"
        fine = value is None or (value >= least and (most is None or value <= most))
        require(fine, key, value, f"set --config.{key} to {least} {limit}")
    rate = config.train.learning_rate
    require(0 < rate < math.inf, "train.learning_rate", rate, "set it to a finite number above 0")
    for key in (*SHARES, *SHARES_BELOW_ONE):
        value, below = value_at(config, key), "below" if key in SHARES_BELOW_ONE else "at most"
        fine = value is None or 0 <= value < 1 or (value == 1 and key in SHARES)
        require(fine, key, value, f"set --config.{key} to 0 or more and {below} 1")


def _check_training(config) -> None:
    data, train = config.data, config.train
    change = f"a row of data.max_length {data.max_length} has one anchor less than tokens; change one of the two"
    fine = train.num_anchors < data.max_length or config.drafter.head in ROW_DRAFTERS  # which draw no anchors
    require(fine, "train.num_anchors", train.num_anchors, change)
    fine = train.accumulate >= 1 and train.batch_size % train.accumulate == 0
    require(fine, "train.accumulate", train.accumulate, f"it has to divide train.batch_size {train.batch_size}")
    require(train.gamma > 0, "train.gamma", train.gamma, "set --config.train.gamma above 0, or to inf for no decay")
    steps = train.profile_steps
    change = 'give the first and the last step, as --config.train.profile_steps="(10,15)"'
    require(not steps or (len(steps) == 2 and 0 < steps[0] <= steps[1]), "train.profile_steps", steps, change)


def _check_train_needs(config) -> None:
    rows = config.data.train
    require(bool(rows), "data.train", rows, "name the training rows, as --config.data.train=ROWS.jsonl")
    judged = config.eval.every > 0 and not config.data.held_out
    require(
        bool(config.eval.prompts) or not (judged or config.eval.final),
        "eval.prompts",
        config.eval.prompts,
        f"eval.every {config.eval.every} and eval.final {config.eval.final} need held-out prompts; give them with "
        "--config.eval.prompts=PROMPTS.jsonl, or turn both off (data.held_out is enough for eval.every alone)",
    )
    if config.eval.final:
        check_final_decoding(config)
