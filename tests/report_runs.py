"""Run folders with synthetic results for tests of the report, written as a benchmark writes them, and their parsing."""

import json
import random
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from ctta.benchmark.report import Table, read_runs
from ctta.evaluation import Result

STANDARD = [
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
]
CONTINUAL = [f"{name} 5" for name in STANDARD]
GRADUAL = [f"{name} {severity}" for name in STANDARD for severity in (1, 2, 3, 4, 5, 4, 3, 2, 1)][4:]
ROUNDS = CONTINUAL * 10

#: Method: mean error in percent, how much it grows over the stream, milliseconds per image.
METHODS = {
    "Source": (43, 0, 2.1),
    "BN Stats Adapt": (20, 0, 2.3),
    "Pseudo-label": (19, 6, 7.5),
    "TENT-online*": (18, 0, 7.9),
    "TENT-continual": (19, 40, 7.8),
    "Test Aug": (18.5, 0, 70),
    "CoTTA": (16, -1, 85),
}


def write_run(folder: Path, *, recipe: str = "cifar10c", command: str | None = None) -> Path:
    """Write a run without cells."""
    (folder / "cells").mkdir(parents=True)
    about = {"format": 1, "recipe": recipe, "options": {}, "commands": [command or f"ctta bench {recipe}"]}
    (folder / "run.json").write_text(json.dumps(about))
    return folder


def write_cell(
    run: Path,
    method: str,
    batches: Sequence[Sequence[Any]],  # per segment and batch: number of wrong predictions, or the score
    *,
    domains: Sequence[str],
    batch_size: int = 200,
    order: int | None = None,
    seed: int | None = None,
    num_batches: int | None = None,
    seconds: float = 0.4,
    **about: Any,
) -> Path:
    """Write a cell whose batches have these numbers of wrong predictions, or these scores."""
    recipe = json.loads((run / "run.json").read_text())["recipe"]
    folder = run / "cells" / f"{len(list((run / 'cells').iterdir())):03d}"
    folder.mkdir()
    facts = {
        "format": 1,
        "method": method,
        "settings": {"learning_rate": "0.001", "seed": str(seed or 0)},
        "source": "f00dfeed" * 8,
        "stream": f"{recipe} continual severity=5 order={'standard' if order is None else order}",
        "stream_hash": f"hash of order {order}",
        "domains": list(domains),
        "num_batches": sum(map(len, batches)) if num_batches is None else num_batches,
        "reset_at_domain": method.endswith("*"),
        "labels": {"recipe": recipe, "row": method.lower(), "order": order, "seed": seed},
        "environment": {"python": "3.11.9", "torch": "2.13.0", "device": "cpu", "threads": 2},
    }
    (folder / "about.json").write_text(json.dumps(facts | about))
    lines = [
        format_batch(segment, score if isinstance(score, dict) else make_image_score(score, batch_size), seconds)
        for segment, scores in enumerate(batches)
        for score in scores
    ]
    (folder / "batches.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def make_image_score(wrong: int, batch_size: int) -> dict[str, Any]:
    return {"count": batch_size, "wrong": wrong, "bins": make_bins(wrong, batch_size)}


def make_pixel_score(right: Sequence[int], *, num_labeled: int = 1000, count: int = 1) -> dict[str, Any]:
    """Return a score of classes with equally many pixels; wrong pixels are predicted as the next class."""
    wrong = [num_labeled - number for number in right]
    return {
        "count": count,
        "labelled": [num_labeled] * len(right),
        "predicted": [number + wrong[place - 1] for place, number in enumerate(right)],
        "right": list(right),
        "bins": make_bins(sum(wrong), num_labeled * len(right)),
    }


def make_bins(wrong: int, total: int) -> list[list[float]]:
    """Return predictions spread over the confidence bins, with higher accuracy at higher confidence."""
    bins, left, errors = [], total, wrong
    for number in range(15):
        count = left if number == 14 else min(left, total // 30 + number * total // 200)
        mistakes = min(errors, count if number == 14 else round(count * (15 - number) / 16))
        bins.append([count, count * (number + 0.5) / 15, count - mistakes])
        left, errors = left - count, errors - mistakes
    return bins


def format_batch(segment: int, score: dict[str, Any], seconds: float) -> str:
    record = {"segment": segment, "score": score, "seconds": seconds, "peak_mib": 900 + segment, "loss": 0.1}
    return json.dumps(record | {"confidence": 0.8, "augmented": None, "skipped": False})


def write_all_methods(
    run: Path,
    domains: Sequence[str],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    order: int | None = None,
    num_batches: int = 10,
    batch_size: int = 200,
    **about: Any,
) -> Path:
    """Write cells of all methods: some domains are harder, TENT degrades, CoTTA does not."""
    difficulty = {name: random.Random(name).uniform(0.4, 1.7) for name in STANDARD}
    for method, (mean, growth, cost) in METHODS.items():
        learns = method not in ("Source", "BN Stats Adapt")
        for seed in seeds if learns else [None]:
            rng = random.Random(f"{method} {seed}")
            wrong = []
            for place, domain in enumerate(domains):
                name, _, severity = domain.partition(" ")
                level = mean * difficulty.get(name, 1) * int(severity or 5) / 5 + growth * (place / len(domains)) ** 2
                fractions = [min(0.95, max(0.01, rng.gauss(level / 100, 0.025))) for _ in range(num_batches)]
                wrong.append([round(fraction * batch_size) for fraction in fractions])
            seconds = cost * batch_size / 1000
            write_cell(
                run, method, wrong, domains=domains, order=order, seed=seed, batch_size=batch_size, seconds=seconds,
                **about,
            )  # fmt: skip
    return run


def write_weather(run: Path, *, rounds: int = 10, num_classes: int = 19, **about: Any) -> Path:
    """Write cells of four methods on the conditions of ACDC: night is hardest, TENT degrades."""
    difficulty = {"fog": 0.8, "night": 0.45, "rain": 0.7, "snow": 0.65}
    for method, decay in (("Source", 0.0), ("BN Stats Adapt", 0.01), ("TENT-continual", 0.02), ("CoTTA", -0.005)):
        rng = random.Random(method)
        scores = []
        for number in range(rounds):
            for level in difficulty.values():
                fraction = level + (0.03 if method == "CoTTA" else 0) - decay * number
                right = [round(1000 * min(1, max(0, rng.gauss(fraction, 0.1)))) for _ in range(num_classes)]
                scores.append([make_pixel_score(right)])
        write_cell(run, method, scores, domains=[*difficulty] * rounds, stream="acdc train rounds", **about)
    return run


def read_results(run: Path) -> list[Result]:
    """Return the complete results of a run."""
    (recorded,) = read_runs([run])
    return list(recorded.results)


def format_row(table: Table, label: str) -> dict[str, str]:
    (found,) = [row for row in table.rows if row.label == label]
    return {column.key: cell.text for column, cell in zip(table.columns, found.cells, strict=True)}


class ParsedPage(HTMLParser):
    """The first table of a page as lists of texts, and everything that could load something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open) and data.strip():
            space = "|" if self.tables[-1][-1][-1] else ""
            self.tables[-1][-1][-1] += space + data.strip()
