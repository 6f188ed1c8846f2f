"""decode.simulate_tau from the command line: a folder of shapes, a forced τ, and "simulated" wherever it is shown."""

import json
import pathlib

import pytest

from assets.target_folder import target_config_dict
from domino_jax.evals import measure
from tests.helpers.commands import run
from tests.helpers.decoding_models import random_target
from tests.helpers.paths import ROOT

DRAFTER = {"num_layers": 1, "target_layer_ids": "(0,)", "block_size": 4}
DRAFTER |= {"domino.emb_dim": 8, "domino.gru_hidden_dim": 16}
TAU = 2.5


def arguments(folder: pathlib.Path, **changes) -> list[str]:
    """A run with the shapes of the random target and of a drafter for it, and no weights of either."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(target_config_dict(random_target()[0].config, "float32")))
    values = {
        "config": ROOT / "configs" / "tiny.py",
        "config.target.path": folder,
        "config.drafter.path": "",
        **{f"config.drafter.{name}": value for name, value in DRAFTER.items()},
        "config.eval.prompts": "",
        "config.decode.num_prompts": 3,
        "config.decode.max_new_tokens": 64,
        "config.decode.cache_length": 208,
        "config.decode.modes": "('autoregressive','domino')",
        "config.decode.simulate_tau": TAU,
        "output": folder / "out",
        **changes,
    }
    return [f"--{key}={value}" for key, value in values.items()]


def test_a_simulated_run_is_marked_everywhere_and_measures_the_requested_tau(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "time_rounds", lambda *_: {})
    assert run("decode", *arguments(tmp_path)) == 0
    message, page = capsys.readouterr().out, (tmp_path / "out" / "report.html").read_text()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["simulated"] == TAU and report["prompts"]["source"] == "made up"
    assert report["modes"]["domino"]["tau_pooled"] == pytest.approx(TAU, rel=0.04)  # the last round is cut
    assert report["modes"]["autoregressive"]["tau_pooled"] is None and report["identical_outputs"] == {}
    assert all("SIMULATED" in shown for shown in (message, page))


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"config.decode.simulate_tau": 5.5}, 2, "decode.simulate_tau is 5.5, but a round of 4 drafts emits 5"),
        ({"config.decode.simulate_tau": 0.0, "config.eval.prompts": "none.jsonl"}, 3, "it is not a complete"),
    ],
)
def test_what_cannot_be_simulated_is_one_short_message(tmp_path, capsys, changes, code, message):
    assert run("decode", *arguments(tmp_path, **changes)) == code
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and len(error.strip().splitlines()) <= 2
