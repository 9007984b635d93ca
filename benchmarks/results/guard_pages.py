"""Results of `guard_report.py run`: JSON, a table in Markdown, and a plot for each stream."""

import json
from math import nan
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.results.guard_report import METHODS, NOISE_BATCHES, ROWS, STREAMS

REMEDIES = ("rollback", "reset", "sorted_stream")
COLORS = {"source": "#666666", "bare": "#c2410c", "guarded": "#1d4ed8"}
TITLES = {"tent": "TENT", "cotta": "CoTTA, 8 views", "source": "Source"}
WINDOW = 6  # batches of the moving average

Lines = list[dict[str, Any]]


def read(work: Path) -> dict[str, dict[str, Lines]]:
    """Read the lines of every finished cell, by stream and row."""
    found: dict[str, dict[str, Lines]] = {}
    for stream in STREAMS:
        found[stream] = {}
        for row in ROWS:
            stem = f"{stream}-{row}".replace(" ", "_")
            if (work / f"{stem}.done").exists():
                text = (work / f"{stem}.jsonl").read_text()
                found[stream][row] = [json.loads(line) for line in text.splitlines()]
    return found


def summarize(stream: str, lines: Lines) -> dict[str, Any]:
    """Return the error over the stream and in its last domain, in percent; for guarded methods also the alarms."""
    scored = [line for line in lines if line["error"] is not None]
    last = scored[-1]["segment"]
    found: dict[str, Any] = {
        "error": 100 * mean(line["error"] for line in scored),
        "last_domain_error": 100 * mean(line["error"] for line in scored if line["segment"] == last),
        "batches": len(lines),
    }
    if "score" in lines[0]:
        alarms = [number for number, line in enumerate(lines) if set(line["events"]) & set(REMEDIES)]
        start = find_noise(lines) if stream == "noise burst" else 0
        after = [number for number in alarms if number >= start]
        found |= {"alarms": len(alarms), "first_alarm": after[0] - start if after else None}
        found["alarms_before_the_fault"] = len(alarms) - len(after)
    return found


def find_noise(lines: Lines) -> int:
    """Return the number of the first batch of noise."""
    return next(number for number, line in enumerate(lines) if line["error"] is None)


def format_table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Format the table in Markdown."""
    head = "| stream | method | error % | last domain % | alarms | first alarm, batches |\n|---|---|---|---|---|---|\n"
    rows = []
    for stream, cells in results.items():
        for row, cell in cells.items():
            name, _, guard = row.partition(" ")
            label = f"{TITLES[name]}{', guarded' if guard else ''}"
            alarms = str(cell["alarms"]) if "alarms" in cell else ""
            first = "" if cell.get("first_alarm") is None else str(cell["first_alarm"])
            rows.append(
                f"| {stream} | {label} | {cell['error']:.1f} | {cell['last_domain_error']:.1f} | {alarms} | {first} |"
            )
    return head + "\n".join(rows) + "\n"


def draw(stream: str, cells: dict[str, Lines], path: Path) -> None:
    """Plot the error over time, one panel per method, with markers for alarms."""
    done = [name for name in METHODS if f"{name} guarded" in cells]
    size = (5 * len(done) + 1, 3.6)
    figure, axes = plt.subplots(1, len(done), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for panel, name in zip(axes[0], done, strict=True):
        for row, kind in (("source", "source"), (name, "bare"), (f"{name} guarded", "guarded")):
            label = {"source": "source, never adapted", "bare": "without guard", "guarded": "guarded"}[kind]
            width = 1.1 if kind == "source" else 1.6
            panel.plot(moving_average(cells[row]), color=COLORS[kind], label=label, linewidth=width)
        alarms = [n for n, line in enumerate(cells[f"{name} guarded"]) if set(line["events"]) & set(REMEDIES)]
        panel.plot(alarms, [2] * len(alarms), label="alarm", marker="^", linestyle="none", color=COLORS["guarded"])
        if stream == "noise burst":
            start = find_noise(cells[name])
            panel.axvspan(start, start + NOISE_BATCHES, color="#e5e7eb")
            panel.text(start + NOISE_BATCHES / 2, 90, "noise", ha="center", fontsize=9, color="#666666")
        panel.set(
            title=f"{TITLES[name]}: {stream}", xlabel="batch of 50 images", xlim=(-1, len(cells[name])), ylim=(0, 100)
        )
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#eeeeee")
    axes[0][0].set_ylabel(f"error %, mean of {WINDOW} batches")
    lines, names = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def moving_average(lines: Lines) -> list[float]:
    """Return the mean error over the last batches; NaN where there are no labels."""
    errors = []
    for number, line in enumerate(lines):
        recent = [line["error"] for line in lines[max(0, number - WINDOW + 1) : number + 1]]
        known = [100 * error for error in recent if error is not None]
        errors.append(nan if line["error"] is None else mean(known))
    return errors


def show(work: Path, results: Path) -> None:
    """Write all results, and print the table."""
    results.mkdir(parents=True, exist_ok=True)
    cells = read(work)
    found = {stream: {row: summarize(stream, lines) for row, lines in rows.items()} for stream, rows in cells.items()}
    (results / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    print(format_table(found))
    for stream, rows in cells.items():
        if any(row.endswith("guarded") for row in rows):
            draw(stream, rows, results / f"{stream.replace(' ', '-')}.png")
