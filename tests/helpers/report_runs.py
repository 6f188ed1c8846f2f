"""Hand-made runs of two modes, and the report of them."""

from domino_jax.decoding.generate import Clock
from domino_jax.decoding.prompts import Prompt
from domino_jax.evals.mode_run import ModeRun
from domino_jax.evals.report import build_report
from domino_jax.evals.run_info import PromptSource, RunInfo
from domino_jax.weights.loading import LoadedTarget
from tests.helpers.decoding_models import decode_settings_of, random_models

SETTINGS = decode_settings_of(("autoregressive", "backbone", "domino"), max_new_tokens=16, cache_length=64)
TARGET = {"path": "TARGET", "quantize": "int8"}


def sections_of(target=TARGET, **settings) -> dict:
    """The sections without figures of two prompts decoded with these settings."""
    models, changed = random_models(3), SETTINGS.change(**settings)
    loaded = LoadedTarget("TARGET", models.target, models.target_params, None, ())
    info = RunInfo(changed, target, {"path": "DRAFTER"}, PromptSource("PROMPTS"))
    return info.as_json(loaded, models, changed, [Prompt(name, (1,), noise) for noise, name in enumerate("ab")])


def answer(tokens, accepts=(), reason="length") -> dict:
    """A row of generations.jsonl."""
    return {"token_ids": list(range(tokens)), "accept_lengths": list(accepts), "finish_reason": reason}


PLAIN = [answer(9), answer(6, reason="stop")]
FAST = [answer(9, [4, 1, 1, 2]), answer(6, [4, 1], "stop")]


def run_of(answers, clock, found=None) -> ModeRun:
    """One group an answer, with equal shares of the time."""
    run = ModeRun()
    for index, one in enumerate(answers):
        share = {name: value / len(answers) for name, value in vars(clock).items() if name != "widths"}
        differing = None if found is None else [entry for entry in found if entry["prompt"] == index]
        run.add([one], Clock(**{**share, "decode_tokens": len(one["token_ids"]) - 1}), differing)
    return run


def two_runs(found=()) -> dict[str, ModeRun]:
    """13 tokens after the first ones. Plain: 26 s, 2 s a token. Domino: rounds of 4, 1, 1, 2 and of 4, 1; 6.5 s.

    Three of its rounds verified three drafts and three of them two.
    """
    plain = run_of(PLAIN, Clock(0.5, 26.0, 3.0, 13))
    fast = run_of(FAST, Clock(0.75, 6.5, 4.0, 13, drafts=15), found=list(found))
    return {"autoregressive": plain, "domino": fast}


PARTS = {"draft": 1.0, "head": 2.0, "verify": 3.0, "other": 0.5, "round": 6.5, "commit": 0.4}
SPLIT = {"unit": "milliseconds per round", **PARTS, "step": 5.0, "drafts": 3}
TIMES = {"domino": {"time_split": SPLIT, "break_even_tau": 1.3}}


def report_of(runs=None, sections=None, tasks=(), concurrency=(), times=TIMES) -> dict:
    return build_report(sections or sections_of(), runs or two_runs(), dict(tasks), dict(concurrency), times)


# The recipe of a training run, as its config.json holds it.
RECIPE = {
    "seed": 42,
    "target": {"path": "some/target", "dtype": "bfloat16"},
    "data": {"train": "rows.jsonl", "regenerate": True, "max_length": 320, "layout": "pad"},
    "train": {
        **{"steps": 600, "batch_size": 8, "num_anchors": 32, "optimizer": "adamw", "learning_rate": 6e-4},
        **{"lambda_start": 1.0, "lambda_decay_ratio": 0.5, "gamma": 7.0, "dpace_alpha": 0.1},
        **{"ema_decay": 0.0, "loss": "own"},
    },
    "drafter": {"markov": {"rank": 256}},
}
