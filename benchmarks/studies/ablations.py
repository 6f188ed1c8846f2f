"""The gain of the head, of its training and of its sizes on the tiny model, from trainings that differ in nothing else.

    python -m benchmarks.studies.ablations --workdir=/tmp/ablation --table=head --seeds=0,1,2

A table (ablation_tables.py) is a list of trainings. The default table has plain DFlash, Domino trained on its final
loss alone (λ = 0 throughout) and Domino with the curriculum. The target answers the training prompts once. Each
training is then a real run of domino_jax.train on those rows, and its τ is measured by decoding held-out prompts. The
script writes a section of docs/ablations.md and a picture. After an interruption start it again: finished runs are
reused, also by other tables in the same workdir, and an unfinished one continues from its checkpoint. --minutes=N saves
and stops after that time with exit code 42. --only=NAME runs one training of the table. Any further --config.KEY=VALUE
goes to every run.
"""

import argparse
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.document import changes_of, put_section, say_changes, say_seeds, table_lines
from benchmarks.studies.ablation_tables import RECIPE_ROW, TABLES, VARIANTS, Table
from benchmarks.studies.study import Study, parse, parser_of, run_main, say_command
from domino_jax.evals.plots import curve, label_ends, points
from domino_jax.runtime.figures import figure_of, save, tidy
from domino_jax.training.metrics import read_rows

PAGE = "ablations.md"
DEFAULT = "head"


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = parsed(arguments)
    table = TABLES[options.table]
    study = Study(options.workdir, overrides, options.minutes)
    study.answers()
    runs = {}
    for seed in options.seeds:
        for name in options.only or table.variants:
            runs[name, seed] = study.train(name, VARIANTS[name].changes, seed, options.steps)
    if options.only:
        print("--only: no table is written", flush=True)
        return
    figures = {name: [figures_of(runs[name, seed]) for seed in options.seeds] for name in table.variants}
    add_relative(figures)
    output = pathlib.Path(options.output)
    image = f"ablation_{options.table}.png"
    save(output, {image: picture(table, runs)})
    command = say_command("benchmarks.studies.ablations", options, ["table", "steps", "seeds"], overrides)
    text = markdown(table, figures, facts_of(runs[RECIPE_ROW, options.seeds[-1]]), command, image)
    put_section(output / PAGE, f"ablation {options.table}", text)
    print(text)


def parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of(__doc__, steps=400)
    parser.add_argument("--table", choices=list(TABLES), default=DEFAULT, help="which comparison")
    return parse(parser, arguments, lambda options: TABLES[options.table].variants)


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


def add_relative(figures: Mapping[str, Sequence[dict[str, float]]]) -> None:
    """Adds to the figures of each run its τ ÷ that of the recipe's run of the same seed.

    A seed gives every row the same order and anchors, so much of the spread between seeds is common to all rows and
    says nothing about their differences.
    """
    for runs in figures.values():
        for run, recipe in zip(runs, figures[RECIPE_ROW], strict=True):
            run["relative"] = run["tau"] / recipe["tau"]


def facts_of(folder: pathlib.Path) -> dict[str, Any]:
    """Recipe and environment of a run, and the count of its rows."""
    recipe = json.loads((folder / "config.json").read_text())
    environment = json.loads((folder / "env.json").read_text())
    with open(recipe["data"]["train"], encoding="utf-8") as file:
        count = sum(1 for _ in file)
    return {"recipe": recipe, "environment": environment, "rows": count}


COLUMNS = {
    "tau": "τ, pooled",
    "relative": "τ ÷ τ of the recipe",
    "tau_per_prompt": "τ, mean of prompts",
    "tau_backbone": "τ of its backbone alone",
    "base_loss": "base loss",
    "final_loss": "final loss",
}


def markdown(
    table: Table,
    figures: Mapping[str, Sequence[Mapping[str, float]]],
    facts: Mapping[str, Any],
    command: str,
    image: str,
) -> str:
    """One section of the page, whose introduction explains the columns.

    Args:
        figures: by variant, figures_of each seed.
        facts: facts_of one run.  image: the file of the picture.
    """
    body = [
        [table.row_title(name), *(say_seeds([run[key] for run in figures[name]], ".3f") for key in COLUMNS)]
        for name in table.variants
    ]
    lines = table_lines(["training", *COLUMNS.values()], body)
    return f"""## {table.title}

```
{command}
```

{chr(10).join(lines)}

![base loss and τ over the steps]({image})

{chr(10).join(f"- {sentence}" for sentence in findings(table, figures))}

{conditions_of(facts, len(figures[RECIPE_ROW]))}
"""


def conditions_of(facts: Mapping[str, Any], seeds: int) -> str:
    """What was run, with which versions."""
    recipe, environment = facts["recipe"], facts["environment"]
    train, block = recipe["train"], recipe["drafter"]["block_size"]
    kinds = ", ".join(f"{count} × {kind}" for kind, count in environment["device_kinds"].items())
    versions = ", ".join(f"{name} {environment['packages'][name]}" for name in ("jax", "flax", "optax"))
    return (
        f"`configs/tiny.py` with {train['steps']} steps of {train['batch_size']} rows (layout "
        f"{recipe['data']['layout']}), {train['num_anchors']} anchors a row, blocks of {block} "
        f"where the row names no others;\n{facts['rows']:,} training rows, {recipe['eval']['num_prompts']} held-out "
        f"prompts, {seeds} seed{'s' if seeds > 1 else ''}. {environment['date'][:10]}, {kinds} "
        f"({environment['cores']} cores), {recipe['target']['dtype']},\n"
        f"domino_jax {environment['domino_jax']}, {versions}, Python {environment['python']}."
    )


def findings(table: Table, figures: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """One sentence per comparison, with what the paper reports beside it."""

    def changes(key: str, one: str, other: str) -> list[float]:
        return changes_of(*([run[key] for run in figures[name]] for name in (one, other)))

    def against(key: str, one: str, other: str = "dflash") -> str:
        return say_changes(changes(key, one, other))

    def comparison(name: str) -> str:
        """One row against the recipe's; where there are several seeds, whether they agree on which is better."""
        sentence = f"τ of {VARIANTS[name].title} is {against('tau', name, RECIPE_ROW)} that of the recipe"
        found = changes("tau", name, RECIPE_ROW)
        if len(found) == 1 or not any(found):
            return sentence + "."
        agreed = all(change > 0 for change in found) or all(change < 0 for change in found)
        return f"{sentence}; the seeds {'agree' if agreed else 'do not agree'} on the sign."

    sentences = of_the_head(against) if table is TABLES[DEFAULT] else []
    if not sentences:
        sentences = [comparison(name) for name in table.variants if name != RECIPE_ROW]
    if table.paper:
        sentences.append(f"The paper, with other models and much longer training, reports {table.paper}.")
    worst = min(run["identical"] for runs in figures.values() for run in runs)
    sentences.append(
        f"At least {worst:.1%} of the texts of each run are the target's own, token for token."
        if worst < 1
        else "All texts are the target's own, token for token."
    )
    if len(figures[RECIPE_ROW]) == 1:
        sentences.append("One seed was run, so a difference of a few per cent decides nothing.")
    return sentences


def of_the_head(against) -> list[str]:
    return [
        f"τ of the head with the curriculum is {against('tau', 'curriculum')} that of plain DFlash and "
        f"{against('tau', 'curriculum', 'no_curriculum')} that of the head without the curriculum "
        "(expected: above both).",
        f"The base loss at the end is {against('base_loss', 'no_curriculum')} that of plain DFlash with λ = 0, and "
        f"{against('base_loss', 'curriculum')} with the curriculum, which is there to keep the backbone from leaving "
        "to the head what it could predict itself (expected: the first above, the second near).",
        f"The backbone alone reaches a τ {against('tau_backbone', 'no_curriculum')} plain DFlash with λ = 0, and "
        f"{against('tau_backbone', 'curriculum')} with the curriculum.",
    ]


def picture(table: Table, runs: Mapping[tuple[str, int], pathlib.Path]):
    """Base loss over the steps, and τ by decoding over the steps; one line a run."""
    figure = figure_of(11, 4)
    loss, taus = figure.subplots(1, 2)
    first = {name: seed for name, seed in reversed(runs)}
    for (name, seed), folder in runs.items():
        variant, rows = VARIANTS[name], read_rows(folder / "metrics.jsonl")
        title = table.row_title(name) if first[name] == seed else "_"  # lines of the other seeds have no label
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
    run_main(main)
