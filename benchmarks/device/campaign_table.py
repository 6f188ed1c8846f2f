"""The tables of campaign.py, from its JSONs."""

from collections.abc import Mapping
from typing import Any

from benchmarks.document import table_lines

GB = 1e9
STEP_GOAL, ROUND_GOAL, TRAIN_GOAL = 1.15, 1.45, 0.45
DASH = "–"


def number(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return DASH if value is None else f"{value:.0%}"


# ------------------------------------------------------------------------------------------------------- one line


def line(record: Mapping[str, Any]) -> str:
    """What a phase found, in a few words."""
    if "failed" in record:
        return f"FAILED: {record['failed'].splitlines()[0]}"
    kind = record["phase"].split("-")[0]
    return f"{record['seconds']:.0f} s, {LINES[kind](record)}"


def _parity_line(record) -> str:
    return f"{sum(map(len, record['checks'].values()))} checks within their limits"


def _bandwidth_line(record) -> str:
    return f"copy {number(scaled(record['copy_bytes_per_second'], GB), 0)} GB/s, product {tflops(record)} TFLOP/s"


def _decode_line(record) -> str:
    step = record["parts"]["step"]
    return (
        f"step {step['ms']:.3f} ms ({number(step['of_limit'])} × its limit), "
        f"round {number(record['break_even_tau'])} × a step"
    )


def _sizes_line(record) -> str:
    ratios = ", ".join(f"{name} {number(size['break_even_tau'])}" for name, size in record["sizes"].items())
    return f"round ÷ step: {ratios}"


def _train_line(record) -> str:
    return ", ".join(
        f"{part} {one['milliseconds_per_row']:.1f} ms a row, MFU {percent(one['mfu'])}"
        for part, one in record["parts"].items()
    )


def _smollm2_line(record) -> str:
    shown = {name: value for name, value in record.items() if name in ("rows", "tokens", "step", "loss", "accept_len")}
    shown |= {f"τ {mode}": one["tau_pooled"] for mode, one in record.get("modes", {}).items() if "tau_pooled" in one}
    return ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if value is not None)


LINES = {
    "parity": _parity_line,
    "bandwidth": _bandwidth_line,
    "decode": _decode_line,
    "context": _sizes_line,
    "batch": _sizes_line,
    "train": _train_line,
    "smollm2": _smollm2_line,
}


def scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def tflops(record: Mapping[str, Any]) -> str:
    return number(scaled(record["flops_per_second"], 1e12), 0)


# ---------------------------------------------------------------------------------------------------- all of them


def markdown(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Everything that was measured, the goals first."""
    whole = {name: record for name, record in records.items() if "failed" not in record}
    parts = [heading(whole), goals(whole), checks(whole), decode_table(of_kind(whole, "decode"))]
    parts += [sizes_table(of_kind(whole, kind), kind) for kind in ("context", "batch")]
    parts += [train_table(of_kind(whole, "train")), *pipeline_lines(of_kind(whole, "smollm2"))]
    parts += [f"- Failed: {name}: {one['failed'].splitlines()[0]}" for name, one in records.items() if "failed" in one]
    return "\n\n".join(part for part in parts if part) + "\n"


def of_kind(records: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """By what follows the kind in a phase's name: "8b", "paper"."""
    return {name.split("-", 1)[1]: record for name, record in records.items() if name.startswith(f"{kind}-")}


def heading(records: Mapping[str, Any]) -> str:
    if not records:
        return "Nothing was measured."
    one = next(iter(records.values()))
    dates = ", ".join(sorted({record["date"] for record in records.values()}))
    commits = ", ".join(sorted({str(record["commit"]) for record in records.values()}))
    text = (
        f"`python -m benchmarks.device.campaign`: {one['devices']} × {one['device']}, jax {one['jax']}, {dates}, "
        f"commit {commits}. **Random weights; acceptance lengths are set by hand.** A limit is the time that the bytes "
        "that must be moved take at the bandwidth of a copy, measured in the same run."
    )
    if one["small"]:
        text = f"**A test of the command with tiny shapes: no figure is a measurement.**\n\n{text}"
    if "bandwidth" in records:
        rates = records["bandwidth"]
        known = scaled(rates["sheet_flops_per_second"], 1e12)
        text += (
            f" Copy: {number(scaled(rates['copy_bytes_per_second'], GB), 0)} GB/s. A bfloat16 product of 8,192 rows: "
            f"{tflops(rates)} TFLOP/s; the data sheet says {number(known, 0)}."
        )
    return text


def goals(records: Mapping[str, Any]) -> str:
    """The three goals, each with the phases that meet and that miss it."""
    decode, train = of_kind(records, "decode"), of_kind(records, "train")
    step = {size: record["parts"]["step"]["of_limit"] for size, record in decode.items()}
    whole = {size: record["break_even_tau"] for size, record in decode.items()}
    mfu = {point: record["parts"]["whole"]["mfu"] for point, record in train.items()}
    rows = [
        judged(f"a step takes at most {STEP_GOAL} × its limit", step, lambda value: value <= STEP_GOAL, number),
        judged(f"a round takes at most {ROUND_GOAL} × a step", whole, lambda value: value <= ROUND_GOAL, number),
        judged(f"training reaches {TRAIN_GOAL:.0%} MFU", mfu, lambda value: value >= TRAIN_GOAL, percent),
    ]
    return "\n".join(row for row in rows if row)


def judged(words: str, values: Mapping[str, float | None], met, show) -> str:
    """One line; values that were not measured are neither."""
    there = {name: value for name, value in values.items() if value is not None}
    if not there:
        return ""
    lists = {True: [], False: []}
    for name, value in there.items():
        lists[met(value)].append(f"{name} {show(value)}")
    verdicts = [
        f"{word}: {', '.join(names)}." for word, names in (("Met", lists[True]), ("Missed", lists[False])) if names
    ]
    return f"- Goal: {words}. {' '.join(verdicts)}"


def checks(records: Mapping[str, Any]) -> str:
    if "parity" not in records:
        return ""
    by_set = records["parity"]["checks"]
    worst = {
        name: max((one["error"] / one["limit"] for one in found.values() if one["limit"]), default=0.0)
        for name, found in by_set.items()
    }
    shown = ", ".join(f"{name} {share:.0%}" for name, share in worst.items())
    return f"Golden files: all checks pass; the largest share of a tolerance that an error takes: {shown}."


def decode_table(found: Mapping[str, Any]) -> str:
    """ms and × the limit of every part, a column for each size."""
    if not found:
        return ""
    names = list(dict.fromkeys(name for record in found.values() for name in record["parts"]))
    slots = next(iter(found.values()))["slots"]

    def cell(record, name: str) -> str:
        part = record["parts"].get(name)
        if not part:
            return DASH
        return f"{part['ms']:.3f}" + (f" ({part['of_limit']:.2f})" if part["of_limit"] else "")

    rows = [[name, *(cell(record, name) for record in found.values())] for name in names]
    rows.append(["break-even τ = round ÷ step", *(number(record["break_even_tau"]) for record in found.values())])
    for tau in next(iter(found.values()))["speedup_at_tau"]:
        speeds = (number(record["speedup_at_tau"][tau]) for record in found.values())
        rows.append([f"speed-up at τ {tau}, set by hand", *speeds])
    rows.append(["peak GB", *(number(scaled(record["peak_bytes"], GB), 1) for record in found.values())])
    title = f"Decoding, one request, caches of {slots:,} slots: ms (× the limit)"
    return "\n".join(table_lines([title, *(f"Qwen3-{size.upper()}" for size in found)], rows))


def sizes_table(found: Mapping[str, Any], kind: str) -> str:
    """A line for each size of model and of caches, or number of rows."""
    if not found:
        return ""
    titles = {"context": "caches of one request", "batch": "requests together"}
    header = [
        titles[kind],
        "step ms (× limit)",
        "round ms (× limit)",
        "round ÷ step",
        "speed-up at τ",
        "plain tokens/s",
    ]
    rows = []
    for size, record in found.items():
        for name, one in record["sizes"].items():
            cells = [f"{one[part]['ms']:.3f} ({number(one[part]['of_limit'])})" for part in ("step", "round")]
            speeds = ", ".join(f"{tau}: {number(value)}" for tau, value in one["speedup_at_tau"].items())
            plain = number(one["plain_tokens_per_second"], 0)
            rows.append([f"Qwen3-{size.upper()}, {name}", *cells, number(one["break_even_tau"]), speeds, plain])
    return "\n".join(table_lines(header, rows))


def train_table(found: Mapping[str, Any]) -> str:
    if not found:
        return ""
    header = ["training step", "ms a row", "tokens/s", "TFLOP/s", "MFU", "of a product's rate", "peak GB"]
    rows = []
    for point, record in found.items():
        chosen = record["choices"]
        shape = f"{point}: {chosen['rows']} × {chosen['length']:,} tokens, {chosen['anchors']} anchors"
        for part, one in record["parts"].items():
            measured = record["flops_per_second"]
            share = one["tflops_per_second"] * 1e12 / measured / chosen["devices"] if measured else None
            memory = number(scaled(record["peak_bytes"], GB), 1) if part == "whole" else DASH
            cells = [f"{one['milliseconds_per_row']:.2f}", f"{one['tokens_per_second']:,.0f}"]
            cells += [f"{one['tflops_per_second']:.1f}", percent(one["mfu"]), percent(share), memory]
            rows.append([f"{shape}, {part.replace('_', ' ')}", *cells])
    return "\n".join(table_lines(header, rows))


def pipeline_lines(found: Mapping[str, Any]) -> list[str]:
    return [f"- SmolLM2, {name}: {line(record)}." for name, record in found.items()]
