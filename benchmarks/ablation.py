"""What the Domino head and its curriculum gain on the tiny model, from three trainings that differ in nothing else.

    python -m benchmarks.ablation --workdir=/tmp/ablation --steps=400 --seeds=0

Plain DFlash (no head), Domino trained on its final loss alone (λ = 0 throughout) and Domino with the curriculum. The
target answers the training prompts once; then each is a real run of domino_jax.train on those rows, and its τ is by
decoding held-out prompts. Writes docs/results.md and docs/results.png. After an interruption start it again: finished
runs are reused, and an unfinished one continues from its checkpoint. Any further --config.KEY=VALUE goes to
every run.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from domino_jax.evals.plots import curve, label_ends, points
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.figures import figure_of, save, tidy
from domino_jax.training.metrics import read_rows

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECIPE = ROOT / "configs" / "tiny.py"
EVALUATIONS = 5  # of each run, spread evenly, the last at its end
LOGGED = 100  # steps of each run, about


class Variant:
    """One of the trainings compared: its name in the tables, what it changes in the recipe, its colour."""

    def __init__(self, title: str, colour: str, **changes: Any):
        self.title, self.colour = title, colour
        self.changes = {key.replace("__", "."): value for key, value in changes.items()}


# All three predict the same tokens of the same anchors, so that their base losses can be compared: the plain drafter is
# shifted too, where the public DFlash ones are not.
VARIANTS = {
    "dflash": Variant("plain DFlash", "#009E73", drafter__head="none", drafter__shift_label=True),
    "no_curriculum": Variant("Domino, λ = 0", "#D55E00", train__lambda_start=0.0),
    "curriculum": Variant("Domino, curriculum", "#0072B2", train__lambda_start=1.0),
}


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = parse(arguments)
    workdir = pathlib.Path(options.workdir).expanduser().resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    rows = regenerate(workdir, overrides)
    runs = {}
    for seed in options.seeds:
        for name, variant in VARIANTS.items():
            runs[name, seed] = train(workdir, name, variant, seed, options.steps, rows, overrides)
    figures = {name: [figures_of(runs[name, seed]) for seed in options.seeds] for name in VARIANTS}
    output = pathlib.Path(options.output)
    save(output, {"results.png": picture(runs)})
    command = f"python -m benchmarks.ablation --workdir=WORKDIR --steps={options.steps} --seeds={say_seeds(options)}"
    text = markdown(figures, facts_of(runs["curriculum", options.seeds[-1]]), " ".join([command, *overrides]))
    (output / "results.md").write_text(text, encoding="utf-8")
    print(text)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--workdir", required=True, help="folder of the rows and of all runs")
    parser.add_argument("--steps", type=int, default=400, help="steps of each run")
    parser.add_argument("--seeds", type=seeds_of, default=[0], help="joined by commas; a run of each kind for each")
    parser.add_argument("--output", default=str(ROOT / "docs"), help="folder of results.md and results.png")
    options, overrides = parser.parse_known_args(arguments)
    wrong = [override for override in overrides if not override.startswith("--config.")]
    if wrong:
        parser.error(f"{wrong[0]} is no flag; besides those above only --config.KEY=VALUE is passed on")
    return options, overrides


def seeds_of(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]


def say_seeds(options: argparse.Namespace) -> str:
    return ",".join(map(str, options.seeds))


# ----------------------------------------------------------------------------------------------------- the runs


def regenerate(workdir: pathlib.Path, overrides: Sequence[str]) -> pathlib.Path:
    """The target's answers to the recipe's training prompts; existing rows are kept."""
    rows = workdir / "rows.jsonl"
    prompts = next(
        (text.split("=", 1)[1] for text in overrides if text.startswith("--config.data.train=")),
        str(ROOT / "assets" / "tiny_qwen3" / "prompts_train.jsonl"),
    )
    command = ["domino_jax.regenerate", f"--config={RECIPE}", f"--prompts={prompts}", f"--output={rows}", *overrides]
    run(command, workdir, "regenerate")
    return rows


def train(
    workdir: pathlib.Path,
    name: str,
    variant: Variant,
    seed: int,
    steps: int,
    rows: pathlib.Path,
    overrides: Sequence[str],
) -> pathlib.Path:
    """The workdir of one training, which is run to its end if it is not finished yet."""
    title = f"{name}_seed{seed}_steps{steps}"
    folder = workdir / title
    every = max(1, steps // EVALUATIONS)
    changes = {
        "seed": seed,
        "train.steps": steps,
        "train.log_every": max(1, steps // LOGGED),
        "checkpoint.every": every,
        "eval.every": every,
        "eval.num_prompts": 64,
        "eval.batch_size": 16,  # τ does not depend on it
        "eval.final": False,
        "preflight.rows": 0,  # the rows are the target's own
        **variant.changes,
    }
    given = [text for text in overrides if not text.startswith("--config.data.train=")]
    flags = [f"--config.{key}={value}" for key, value in changes.items()] + given
    flags += [f"--config.data.train={rows}", "--config.data.regenerate=False"]
    done = folder / "ablation.json"
    if done.exists():
        if json.loads(done.read_text()) != flags:
            raise DominoError(f"{folder} was made with other flags ({done}); choose another --workdir.")
        print(f"{title}: already finished", flush=True)
        return folder
    run(["domino_jax.train", f"--config={RECIPE}", f"--workdir={folder}", *flags], workdir, title)
    done.write_text(json.dumps(flags, indent=2) + "\n")
    return folder


def run(command: Sequence[str], workdir: pathlib.Path, title: str) -> None:
    """Runs a module in a separate process; its output goes to <workdir>/<title>.log."""
    cache = workdir / ".xla_cache"  # one for all: the runs share most of their programs
    cache.mkdir(mode=0o700, exist_ok=True)
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    log = workdir / f"{title}.log"
    print(f"{title}: running, see {log}", flush=True)
    with log.open("a", encoding="utf-8") as file:
        code = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        ).returncode
    if code:
        last = log.read_text(encoding="utf-8").strip().splitlines()[-5:]
        raise DominoError(f"{title} left with exit code {code}; {log} ends:\n" + "\n".join(last))


# -------------------------------------------------------------------------------------------------- the results


def figures_of(folder: pathlib.Path) -> dict[str, float]:
    """What the table shows of one run: τ of its last evaluation, losses as means over the last tenth of its steps."""
    rows = read_rows(folder / "metrics.jsonl")
    evaluated = [row for row in rows if row.get("eval_tau") is not None][-1]
    trained = [row for row in rows if "base_loss" in row]
    late = [row for row in trained if row["step"] > 0.9 * trained[-1]["step"]]
    return {
        "tau": evaluated["eval_tau"],
        "tau_per_prompt": evaluated["eval_tau_per_prompt"],
        "tau_backbone": evaluated["eval_tau_backbone"],
        "base_loss": statistics.fmean(row["base_loss"] for row in late),
        "final_loss": statistics.fmean(row["final_loss"] for row in late),
        "identical": evaluated["eval_identical"],
    }


def facts_of(folder: pathlib.Path) -> dict[str, Any]:
    """Recipe and environment of a run, and the count of its rows."""
    recipe = json.loads((folder / "config.json").read_text())
    environment = json.loads((folder / "env.json").read_text())
    with open(recipe["data"]["train"], encoding="utf-8") as file:
        count = sum(1 for _ in file)
    return {"recipe": recipe, "environment": environment, "rows": count}


COLUMNS = {
    "tau": "τ, pooled",
    "tau_per_prompt": "τ, mean of prompts",
    "tau_backbone": "τ of its backbone alone",
    "base_loss": "base loss",
    "final_loss": "final loss",
    "identical": "outputs identical",
}


def markdown(figures: Mapping[str, Sequence[Mapping[str, float]]], facts: Mapping[str, Any], command: str) -> str:
    """docs/results.md.

    Args:
        figures: by variant, figures_of each seed.
        facts: facts_of one run.
    """
    recipe, environment = facts["recipe"], facts["environment"]
    train, block = recipe["train"], recipe["drafter"]["block_size"]
    heading = ["training", *COLUMNS.values()]
    body = [
        [variant.title, *(say([run[key] for run in figures[name]], key) for key in COLUMNS)]
        for name, variant in VARIANTS.items()
    ]
    table = [f"| {' | '.join(row)} |" for row in (heading, ["---", *["---:"] * len(COLUMNS)], *body)]
    seeds = len(figures["curriculum"])
    kinds = ", ".join(f"{count} × {kind}" for kind, count in environment["device_kinds"].items())
    versions = ", ".join(f"{name} {environment['packages'][name]}" for name in ("jax", "flax", "optax"))
    return f"""# Ablation: the head and the curriculum

```
{command}
```

{chr(10).join(table)}

![base loss and τ over the steps](results.png)

{chr(10).join(f"- {sentence}" for sentence in findings(figures))}

What was run: the recipe `configs/tiny.py` with {train["steps"]} steps of {train["batch_size"]} rows (layout
{recipe["data"]["layout"]}) with {train["num_anchors"]} anchors each, blocks of {block};
seeds: {seeds} (mean ± half the range where there are several).
All trainings saw the same {facts["rows"]:,} rows, the target's own answers, in the same order with the same anchors.
All predict the token after each slot (`shift_label`), so that a round can emit at most {block + 1} tokens.

- τ: tokens emitted per round when {recipe["eval"]["num_prompts"]} held-out prompts are decoded greedily by the real
  loop, with the head where there is one; "its backbone alone" is the same drafter decoded without its head.
- outputs identical: share of these prompts whose text is the target's own, token for token.
- losses: means over the last tenth of the steps, on training rows.

{environment["date"][:10]}, {kinds} ({environment["cores"]} cores), {recipe["target"]["dtype"]}, domino_jax
{environment["domino_jax"]}, {versions}, Python {environment["python"]}.
"""


def say(values: Sequence[float], key: str) -> str:
    form = ".1%" if key == "identical" else ".3f"
    spread = (max(values) - min(values)) / 2
    return f"{statistics.fmean(values):{form}}" + (f" ± {spread:{form}}" if len(values) > 1 else "")


def findings(figures: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """One sentence per comparison, with the expected outcome beside the measured one."""

    def mean(name: str, key: str) -> float:
        return statistics.fmean(run[key] for run in figures[name])

    seeds = len(figures["dflash"])

    def against(key: str, one: str, other: str = "dflash") -> str:
        change = 100 * (mean(one, key) / mean(other, key) - 1)
        return f"{abs(change):.1f} % {'above' if change > 0 else 'below'}"

    return [
        f"τ of the head with the curriculum is {against('tau', 'curriculum')} that of plain DFlash and "
        f"{against('tau', 'curriculum', 'no_curriculum')} that of the head without the curriculum "
        "(expected: above both).",
        f"The base loss at the end is {against('base_loss', 'no_curriculum')} that of plain DFlash with λ = 0, and "
        f"{against('base_loss', 'curriculum')} with the curriculum, which is there to keep the backbone from leaving "
        "to the head what it could predict itself (expected: the first above, the second near).",
        f"The backbone alone reaches a τ {against('tau_backbone', 'no_curriculum')} plain DFlash with λ = 0, and "
        f"{against('tau_backbone', 'curriculum')} with the curriculum.",
        *(["One seed was run, so a difference of a few per cent decides nothing."] if seeds == 1 else []),
    ]


def picture(runs: Mapping[tuple[str, int], pathlib.Path]):
    """Base loss over the steps, and τ by decoding over the steps; one line a run."""
    figure = figure_of(11, 4)
    loss, taus = figure.subplots(1, 2)
    first = {name: seed for name, seed in reversed(runs)}
    for (name, seed), folder in runs.items():
        variant, rows = VARIANTS[name], read_rows(folder / "metrics.jsonl")
        title = variant.title if first[name] == seed else "_"  # lines of the other seeds have no label
        curve(loss, points(rows, "base_loss"), variant.colour, title)
        evaluated = points(rows, "eval_tau")
        taus.plot(*zip(*evaluated, strict=True), color=variant.colour, marker="o", markersize=4, label=title)
    loss.set(title="Base loss on training rows", xlabel="step", ylabel="cross-entropy, nats per token")
    taus.set(title="τ by decoding held-out prompts", xlabel="step", ylabel="tokens per round", xlim=(0, None))
    taus.set_ylim(bottom=1)
    # The lines differ at their end; the first steps would take most of the height.
    losses = [
        value for folder in runs.values() for _, value in points(read_rows(folder / "metrics.jsonl"), "base_loss")
    ]
    if len(losses) > 20:
        loss.set_ylim(0.9 * min(losses), sorted(losses)[int(0.95 * len(losses))])
    for axes in (loss, taus):
        tidy(axes, legend=False)
        label_ends(axes)
    return figure


if __name__ == "__main__":
    try:
        main()
    except DominoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
