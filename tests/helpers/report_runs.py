"""Hand-made runs of two modes, and the report of them."""

import dataclasses

from domino_jax.decoding.generate import Clock, Generation
from domino_jax.evals.lanes import ModeRun
from domino_jax.evals.report import build_report
from domino_jax.evals.run_info import PromptSource, RunInfo
from tests.helpers.decoding_models import decode_settings_of, random_models

SETTINGS = decode_settings_of(("autoregressive", "backbone", "domino"), max_new_tokens=16, cache_length=64)
INFO = RunInfo(
    SETTINGS,
    {"path": "TARGET", "quantize": "int8"},
    {"path": "DRAFTER"},
    PromptSource("PROMPTS"),
    settings=SETTINGS,
    drafter_config=random_models(3).drafter.config,
    prompts=2,
)


def answer(tokens, accepts=(), reason="length") -> Generation:
    return Generation(list(range(tokens)), list(accepts), reason)


PLAIN = [answer(9), answer(6, reason="stop")]
FAST = [answer(9, [4, 1, 1, 2]), answer(6, [4, 1], "stop")]


def run_of(answers, clock, found=None) -> ModeRun:
    """One group an answer, with equal shares of the time."""
    run = ModeRun()
    for one in answers:
        run.add([one])
        share = {name: value / len(answers) for name, value in vars(clock).items() if name != "widths"}
        run.add_group(Clock(**{**share, "decode_tokens": len(one.token_ids) - 1}))
    if found is not None:
        run.add_comparison(len(answers), found)
    return run


def two_runs(found=()) -> dict[str, ModeRun]:
    """13 tokens after the first ones. Plain: 26 s, 2 s a token. Domino: rounds of 4, 1, 1, 2 and of 4, 1; 6.5 s.

    Three of its rounds verified three drafts and three of them two.
    """
    plain = run_of(PLAIN, Clock(0.5, 26.0, 3.0, 13))
    fast = run_of(FAST, Clock(0.75, 6.5, 4.0, 13, drafts=15), found=list(found))
    return {"autoregressive": plain, "domino": fast}


SPLIT = {
    "autoregressive": {"round": 0.005},
    "domino": {
        **{"draft": 0.001, "head": 0.002, "verify": 0.003, "other": 0.0005, "round": 0.0065, "commit": 0.0004},
    },
}


def report_of(runs=None, info=INFO, **changes) -> dict:
    return build_report(runs or two_runs(), info, **{"split": SPLIT, **changes})


def info_with(**settings) -> RunInfo:
    changed = SETTINGS.change(**settings)
    return dataclasses.replace(INFO, requested=changed, settings=changed)


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
