"""Folders of runs for the tests of the report, written file by file as a benchmark would, with invented numbers."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    """A run without cells."""
    (folder / "cells").mkdir(parents=True)
    about = {"format": 1, "recipe": recipe, "options": {}, "commands": [command or f"ctta bench {recipe}"]}
    (folder / "run.json").write_text(json.dumps(about))
    return folder


def write_cell(
    run: Path,
    method: str,
    wrong: Sequence[Sequence[int]],  # per segment and batch
    *,
    domains: Sequence[str],
    batch_size: int = 200,
    order: int | None = None,
    seed: int | None = None,
    num_batches: int | None = None,
    seconds: float = 0.4,
    **about: Any,
) -> Path:
    """A cell whose batches have so many wrong predictions."""
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
        "num_batches": sum(len(batches) for batches in wrong) if num_batches is None else num_batches,
        "reset_at_domain": method.endswith("*"),
        "labels": {"recipe": recipe, "row": method.lower(), "order": order, "seed": seed},
        "environment": {"python": "3.11.9", "torch": "2.13.0", "device": "cpu", "threads": 2},
    }
    (folder / "about.json").write_text(json.dumps(facts | about))
    lines = [
        batch_line(segment, count, batch_size, seconds) for segment, batches in enumerate(wrong) for count in batches
    ]
    (folder / "batches.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def batch_line(segment: int, wrong: int, batch_size: int, seconds: float) -> str:
    """A batch with its images spread over the bins of confidence, the sure ones right more often."""
    bins, left, errors = [], batch_size, wrong
    for number in range(15):
        count = left if number == 14 else min(left, batch_size // 30 + number * batch_size // 200)
        mistakes = min(errors, count if number == 14 else round(count * (15 - number) / 16))
        bins.append([count, count * (number + 0.5) / 15, count - mistakes])
        left, errors = left - count, errors - mistakes
    score = {"count": batch_size, "wrong": wrong, "bins": bins}
    record = {"segment": segment, "score": score, "seconds": seconds, "peak_mib": 900 + segment, "loss": 0.1}
    return json.dumps(record | {"confidence": 0.8, "augmented": None, "skipped": False})


def write_story(
    run: Path,
    domains: Sequence[str],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    order: int | None = None,
    batches: int = 10,
    batch_size: int = 200,
    **about: Any,
) -> Path:
    """All methods, with the errors one expects: some domains are harder, TENT decays, CoTTA does not."""
    hardness = {name: random.Random(name).uniform(0.4, 1.7) for name in STANDARD}
    for method, (mean, growth, cost) in METHODS.items():
        learns = method not in ("Source", "BN Stats Adapt")
        for seed in seeds if learns else [None]:
            dice = random.Random(f"{method} {seed}")
            wrong = []
            for place, domain in enumerate(domains):
                kind, _, severity = domain.partition(" ")
                level = mean * hardness.get(kind, 1) * int(severity or 5) / 5 + growth * (place / len(domains)) ** 2
                shares = [min(0.95, max(0.01, dice.gauss(level / 100, 0.025))) for _ in range(batches)]
                wrong.append([round(share * batch_size) for share in shares])
            seconds = cost * batch_size / 1000
            write_cell(
                run, method, wrong, domains=domains, order=order, seed=seed, batch_size=batch_size, seconds=seconds,
                **about,
            )  # fmt: skip
    return run
