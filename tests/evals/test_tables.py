"""tables.py: the paper's form to the letter, in Markdown and LaTeX."""

from domino_jax.evals.tables import (
    PaperTable,
    acceptance_lines,
    concurrency_rows,
    latex_table,
    markdown_table,
    notes_of,
    paper_table,
    width_note,
)

TABLE = PaperTable(
    "64 prompts; target A_B",
    ["gsm8k", "mt-bench"],
    [
        ("Target alone", [(1.0, None), (1.0, None)]),
        ("Backbone alone", [(2.0, 3.111), (2.5, 4.0)]),
        ("Domino", [(2.5, 4.25), (None, 3.5)]),
    ],
)


def report_of(name, speedups, tasks=True, simulated=None):
    modes = {
        mode: {"speedup": speedup, "tau_pooled": None if mode == "autoregressive" else 2 * speedup}
        for mode, speedup in speedups.items()
    }
    return {
        "simulated": simulated,
        "settings": {"temperature": 0.0},
        "prompts": {"count": 4},
        "batch_size": 1,
        "dtype": "float32",
        "device": "1 × cpu",
        "target": {"path": "TARGET"},
        "drafter": {"name": name},
        "modes": modes,
        "tasks": {"gsm8k": modes, "mbpp": modes} if tasks else {},
        "average": modes if tasks else {},
    }


def test_markdown_has_speedup_and_tau_in_a_cell_and_the_best_of_a_column_in_bold():
    assert markdown_table(TABLE) == (
        "64 prompts; target A_B\n"
        "\n"
        "| method | gsm8k | mt-bench |\n"
        "| --- | ---: | ---: |\n"
        "| Target alone | 1.00 × / – | 1.00 × / – |\n"
        "| Backbone alone | 2.00 × / 3.11 | **2.50 ×** / **4.00** |\n"
        "| Domino | **2.50 ×** / **4.25** | – / 3.50 |\n"
    )


def test_latex_has_two_columns_a_task_under_rules_and_escapes_what_it_must():
    assert latex_table(TABLE) == (
        "% needs \\usepackage{booktabs}\n"
        "\\begin{table}[t]\n"
        "\\centering\n"
        "\\caption{64 prompts; target A\\_B}\n"
        "\\begin{tabular}{lrrrr}\n"
        "\\toprule\n"
        " & \\multicolumn{2}{c}{gsm8k} & \\multicolumn{2}{c}{mt-bench} \\\\\n"
        "\\cmidrule(lr){2-3} \\cmidrule(lr){4-5}\n"
        "Method & Speed-up & $\\tau$ & Speed-up & $\\tau$ \\\\\n"
        "\\midrule\n"
        "Target alone & 1.00$\\times$ & -- & 1.00$\\times$ & -- \\\\\n"
        "Backbone alone & 2.00$\\times$ & 3.11 & \\textbf{2.50}$\\times$ & \\textbf{4.00} \\\\\n"
        "Domino & \\textbf{2.50}$\\times$ & \\textbf{4.25} & -- & 3.50 \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}\n"
        "\\end{table}\n"
    )


def test_a_run_over_tasks_has_a_column_each_and_their_average():
    table = paper_table([report_of("A", {"autoregressive": 1.0, "domino": 2.0})])
    assert table.columns == ["gsm8k", "mbpp", "average"]
    assert table.rows == [("Target alone", [(1.0, None)] * 3), ("Domino", [(2.0, 4.0)] * 3)]


def test_a_run_without_tasks_has_one_column():
    table = paper_table([report_of("A", {"autoregressive": 1.0, "domino": 2.0}, tasks=False)])
    assert (table.columns, table.rows[1]) == (["all prompts"], ("Domino", [(2.0, 4.0)]))


def test_several_drafters_share_one_plain_run_and_name_their_methods():
    reports = [
        report_of(name, {"autoregressive": 1.0, "domino": speed}, False) for name, speed in (("A", 2.0), ("B", 3.0))
    ]
    assert [name for name, _ in paper_table(reports).rows] == ["Target alone", "A: Domino", "B: Domino"]


def test_a_simulated_tables_caption_says_so_first():
    table = paper_table([report_of("A", {"domino": 2.0}, simulated=7.17)])
    assert table.caption.startswith("SIMULATED acceptance (τ forced to 7.17")
    assert "\\caption{SIMULATED acceptance ($\\tau$ forced to 7.17" in latex_table(table)


def test_throughput_has_a_row_for_each_number_of_rows():
    def mode(speed, gain):
        return {"tokens_per_second": speed, "speedup": gain}

    identical = {"domino": {"same": 3, "of": 4, "near_ties": 1, "violations": 0}}
    level = {
        "modes": {"autoregressive": mode(1234.6, 1.0), "domino": mode(2469.2, 2.0)},
        "identical_outputs": identical,
    }
    assert concurrency_rows({"8": level}) == [
        ["rows together", "autoregressive, tokens/s", "domino, tokens/s", "speed-up", "identical"],
        ["8", "1,235", "2,469", "2.00 ×", "3 of 4 (1 near ties)"],
    ]


def test_a_chain_beside_a_deeper_tree_has_no_rates_where_it_drafts_nothing():
    def rates(*values):
        return {"accept_rate_by_position": list(values), "conditional_accept_rate_by_position": [0.5] * len(values)}

    table = acceptance_lines("## Acceptance", {"domino": rates(0.5), "tree": rates(0.6, 0.3)}, 3)
    assert table[-3:-1] == ["| domino | 0.50 (0.50) | – |", "| tree | 0.60 (0.50) | 0.30 (0.50) |"]
    report = {"round_widths": {"domino": 2, "tree": 3}, "verify_width": 3, "drafter": {"block_size": 2}}
    said = "τ is measured with block size 2: a round can emit at most "
    assert width_note(report) == said + "2 tokens with domino, 3 tokens with tree."
    assert width_note({**report, "round_widths": {"domino": 3, "tree": 3}}) == said + "3 tokens."


def test_a_round_whose_parts_vanished_in_the_noise_still_has_a_note():
    times = dict.fromkeys(("draft", "head", "verify", "other", "commit", "round", "without_head"), 0.0)
    split = {**times, "head_share": None, "loop_overhead": None}
    report = report_of("A", {"domino": 2.0})
    report["modes"]["domino"]["time_split"] = split
    more = {"autoregressive_step_ms": None, "interval_of": {}, "sittings": 1, "verify_width": 5}
    more["tree_coupling"] = {"draft_scale": 2.0, "spread": 1.5}
    report = {**report, **more, "drafter": {"block_size": 4}}
    assert notes_of(report)[-1] == "Trees are coupled with the target's noise: c = 2, spread 1.5."
    assert notes_of(report)[0] == (
        "A round of domino takes 0.00 ms: draft 0.00, head 0.00, verify 0.00, other 0.00 (of which commit 0.00)."
    )
