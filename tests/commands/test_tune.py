"""The command tune: what it stores is what decode then uses."""

import json
import shutil

import pytest

from configs import tiny
from domino_jax import tune
from domino_jax.decoding.stored_tuning import file_name, tuned
from domino_jax.evals import tuning
from domino_jax.recipe.values import decode_settings
from domino_jax.runtime.errors import DominoError
from tests.helpers.paths import ASSETS

RECIPE = f"--config={ASSETS.parent / 'configs' / 'tiny.py'}"


@pytest.mark.slow
def test_the_command_stores_what_decode_then_uses(tmp_path, monkeypatch):
    shutil.copytree(ASSETS / "tiny_domino", tmp_path / "drafter")
    for name, value in (("NODES", (16,)), ("REPEATS", 1), ("PROBES", 2)):
        monkeypatch.setattr(tuning, name, value)
    argv = ["tune", RECIPE, f"--config.drafter.path={tmp_path / 'drafter'}", "--config.decode.modes=('domino','tree')"]
    argv += ["--config.decode.temperature=1.0", "--config.decode.num_prompts=4", "--config.decode.max_new_tokens=32"]
    with pytest.raises(SystemExit) as ended:
        tune.cli.run(tune.main, required=("config",), optional=("prompts",), argv=argv)
    assert ended.value.code == 0
    stored = json.loads((tmp_path / "drafter" / file_name()).read_text())
    assert list(stored["drafts"]) == ["1"] and stored["tree"]["nodes"] == 16
    config = tiny.get_config()
    config.decode.modes = ("domino",)
    settings = tuned(decode_settings(config.decode, "domino"), str(tmp_path / "drafter"))
    assert settings.drafting.widths == ((1, stored["drafts"]["1"]),)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.drafter.path=gs://bucket/drafter", "a tuning is stored with local drafters only"),
        ("--config.eval.prompts=", "there are no prompts"),
        ("--config.drafter.head=markov", "drafter.head is 'markov', but the drafter in .* has the head 'domino'"),
    ],
)
def test_what_cannot_be_tuned_is_refused(flag, message):
    argv = ["tune", RECIPE, flag]
    with pytest.raises(DominoError, match=message):
        tune.main(tune.cli.parse(argv, ("config",), ("prompts",)))
