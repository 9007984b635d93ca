"""The numbers of every method on the embedded benchmark, and how the results of further runs join them."""

from collections.abc import Iterable, Mapping
from statistics import mean, stdev
from typing import Any

from ctta.core.registry import list_methods, resolve_method
from ctta.evaluation import Result

#: The numbers of one method, as numbers.json holds them.
Row = dict[str, Any]


class MergeError(ValueError):
    """Raised for results that do not belong into the same table."""


def add_results(rows: Mapping[str, Row], results: Iterable[Result], *, limit: int | None = None) -> dict[str, Row]:
    """Return the rows with further results; a seed that a row already has is left out.

    Args:
        rows: The rows by the names of the methods.
        results: Complete results on the same stream.
        limit: The number of images of each corruption that these results have seen; None for all of them.

    Returns:
        New rows.

    Raises:
        MergeError: A row has other settings, or has seen more or other images.
    """
    merged = dict(rows)
    for result in sorted(results, key=lambda each: each.labels["seed"] or 0):
        name = result.labels["row"]
        latest = summarize(name, result, limit)
        merged[name] = _merge(name, merged[name], latest) if name in merged else latest
    return merged


def summarize(name: str, result: Result, limit: int | None = None) -> Row:
    """Return the row of a single result; times are added later."""
    info = resolve_method(name).info if name in list_methods() else None
    settings = result.settings
    trains_norms = info is None or settings.get("trains") == "'norms'" or settings.get("skip_top") == "False"
    error, seed = round(100 * result.error, 2), result.labels["seed"]
    row = {
        "title": result.method,
        "trains": info.trains if info and not trains_norms else "norm layers",
        "seeds": [seed],
        "error": error,
        "deviation": None,
        "error_by_seed": [error],
        "detailed_seeds": [seed],
        "error_by_corruption": {
            domain: round(100 * value, 2) for domain, value in zip(result.domains, result.errors, strict=True)
        },
        "calibration_error": round(100 * result.calibration_error, 2),
        "num_skipped": result.num_skipped,
        "settings": settings,
        "ctta": result.environment.get("ctta"),
    }
    if result.update_share is not None:
        row["update_share"] = round(result.update_share, 4)
    return row if limit is None else row | {"limit": limit}


def add_errors(name: str, row: Row, errors: Mapping[int, float]) -> Row:
    """Return a row with the errors of further seeds, of which nothing else is known.

    Args:
        name: The method.
        row: Its row.
        errors: The error in percent by seed. One of the row's own seeds shows that the stream is the same.

    Raises:
        MergeError: No seed is common to both, or a common seed has another error.
    """
    known = dict(zip(row["seeds"], row["error_by_seed"], strict=True))
    common = known.keys() & errors.keys()
    if not common or any(known[seed] != errors[seed] for seed in common):
        raise MergeError(f"{name} has the errors {known} by seed, and these are {dict(errors)}: another stream?")
    return row | _average_seeds(known | dict(errors))


def _merge(name: str, row: Row, latest: Row) -> Row:
    """Return a row with one more seed: means over seeds count every seed once."""
    if "limit" in row and "limit" not in latest:
        return latest  # all images replace a sample of them
    if row.get("limit") != latest.get("limit"):
        seen, given = (each.get("limit", "all") for each in (row, latest))
        raise MergeError(f"{name} has seen {seen} images of each corruption, and a result {given}")
    if _without_seed(row["settings"]) != _without_seed(latest["settings"]):
        raise MergeError(f"{name} has the settings {row['settings']}, and a result {latest['settings']}")
    detailed: list[int] = row["detailed_seeds"] if "detailed_seeds" in row else row["seeds"]
    (seed,) = latest["seeds"]
    if seed in detailed:
        return row
    known = dict(zip(row["seeds"], row["error_by_seed"], strict=True))
    if known.get(seed, latest["error"]) != latest["error"]:
        raise MergeError(f"{name} has an error of {known[seed]} with seed {seed}, and a result {latest['error']}")

    def average(old: float, new: float) -> float:
        return round((old * len(detailed) + new) / (len(detailed) + 1), 2)

    corruptions = row["error_by_corruption"]
    return row | {
        **_average_seeds(known | {seed: latest["error"]}),
        "detailed_seeds": sorted([*detailed, seed]),
        "error_by_corruption": {
            domain: average(error, latest["error_by_corruption"][domain]) for domain, error in corruptions.items()
        },
        "calibration_error": average(row["calibration_error"], latest["calibration_error"]),
        "num_skipped": row["num_skipped"] + latest["num_skipped"],
    }


def _average_seeds(errors: dict[int, float]) -> Row:
    """Return what a row says about the errors of its seeds."""
    errors = dict(sorted(errors.items()))
    values = list(errors.values())
    return {
        "seeds": list(errors),
        "error": round(mean(values), 2),
        "deviation": round(stdev(values), 2) if len(values) > 1 else None,
        "error_by_seed": values,
    }


def _without_seed(settings: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in settings.items() if name != "seed"}
