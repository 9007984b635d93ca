"""What a guard makes of methods on small networks with every kind of norm layer, in small and large batches.

    python -m benchmarks.results.guard_matrix --cifar FOLDER --out FILE.json report
    python -m benchmarks.results.guard_matrix --out FILE.json table

The first command runs methods bare and guarded, by their published settings, on streams of CIFAR-10 test images, with
the network as trained beside them; labels only score. Networks are the embedded one and those of
``benchmarks/train/small_networks.py``. ``report`` uses the first 2,000 test images under corruptions of the benchmark;
``choose`` uses others under the hold-out corruptions, for choosing settings. Cells that FILE has are not run again. The
second command prints the table of ``docs/results/guards.md``, and in how many cells the bare and the guarded method end
above the goals.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import ctta
from benchmarks.choose.estimated_gain import Domain, StreamSpec, draw_stream
from benchmarks.train import small_networks
from ctta.core.model import AdaptiveModel
from ctta.guard import Guarded
from ctta.io.atomic import atomic_write

NUM_IMAGES = 600
LIMIT, HEALTHY_COST = 2.0, 0.5  # points of error
BATCH_SIZES = (4, 10, 64)
METHODS: dict[str, Callable[[nn.Module], AdaptiveModel]] = {
    "TENT": ctta.Tent,
    "SHOT-IM": ctta.SHOTIM,
    "SAR": ctta.SAR,
    "VANE": ctta.VANE,
}
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "embedded": ctta.models.embedded,
    "bn": small_networks.bn,
    "group_norm": small_networks.group_norm,
    "vit": small_networks.vit,
}
STREAMS: dict[str, dict[str, tuple[Domain, ...]]] = {
    "choose": {"clean": (None,), "noise": (("speckle_noise", 4),), "drift": (("gaussian_blur", 4), ("spatter", 4))},
    "report": {"clean": (None,), "noise": (("gaussian_noise", 3),), "drift": (("defocus_blur", 4), ("fog", 4))},
}
Cell = dict[str, str | int | float]
ERRORS = ("source", "bare", "guarded")


def run_cell(net: nn.Module, method: str, images: torch.Tensor, labels: torch.Tensor, batch_size: int) -> Cell:
    """Return errors in percent: of the network as trained, of the method, and of the guarded method."""
    models = {
        "source": ctta.Source(net),
        "bare": METHODS[method](net),
        "guarded": Guarded(METHODS[method](net)),
    }
    errors: Cell = {}
    for name, model in models.items():
        batches = zip(images.split(batch_size), labels.split(batch_size), strict=True)
        wrong = sum(int((model(x).argmax(1) != y).sum()) for x, y in batches)
        errors[name] = 100 * wrong / len(images)
    return errors


def run(options: argparse.Namespace) -> None:
    """Run the cells that the file does not have."""
    out, split = options.out, options.what
    cells: list[Cell] = json.loads(out.read_text()) if out.exists() else []
    done = {(cell["network"], cell["stream"], cell["batch_size"], cell["method"]) for cell in cells}
    for network in options.networks:
        net = NETWORKS[network]().eval()
        for name, domains in STREAMS[split].items():
            for order in ("shuffled", "sorted"):
                stream = f"{name} {order}"
                spec = StreamSpec(stream, domains, order, 0, NUM_IMAGES // len(domains))
                images, labels = draw_stream(options.cifar, "fit" if split == "choose" else split, spec)
                for batch_size in options.batch_sizes:
                    for method in options.methods:
                        key = (network, stream, batch_size, method)
                        if key in done:
                            continue
                        errors = run_cell(net, method, images, labels, batch_size)
                        where = dict(zip(("network", "stream", "batch_size", "method"), key, strict=True))
                        cells.append(where | errors)
                        with atomic_write(out) as path:
                            path.write_text(json.dumps(cells, indent=1) + "\n")
                        print(*where.values(), *(f"{value:.1f}" for value in errors.values()), flush=True)


def describe(cells: list[Cell]) -> str:
    """Return the table, and how often the goals are missed."""
    lines = ["| network, stream | batches of | method | Source | method | guarded |", "|---|---|---|---|---|---|"]
    for cell in cells:
        errors = " | ".join(f"{cell[name]:.1f}" for name in ERRORS)
        lines.append(f"| {cell['network']}, {cell['stream']} | {cell['batch_size']} | {cell['method']} | {errors} |")
    above = {name: sum(float(cell[name]) > float(cell["source"]) + LIMIT for cell in cells) for name in ERRORS[1:]}
    healthy = [cell for cell in cells if float(cell["bare"]) < float(cell["source"])]
    costs = [float(cell["guarded"]) - float(cell["bare"]) for cell in healthy]
    return "\n".join(
        [
            *lines,
            f"more than {LIMIT:g} points above Source: {above['bare']} bare and {above['guarded']} guarded, "
            f"of {len(cells)}",
            f"the bare method gains in {len(costs)}; there the guard costs more than {HEALTHY_COST:g} points in "
            f"{sum(cost > HEALTHY_COST for cost in costs)}, and {sum(costs) / max(len(costs), 1):+.2f} on average",
        ]
    )


def main() -> None:
    """Run cells, or print the table of those that are there."""
    parser = argparse.ArgumentParser(description="Measure a guard on networks with every kind of norm layer.")
    parser.add_argument("what", choices=[*STREAMS, "table"])
    parser.add_argument("--cifar", type=Path, help="folder of the CIFAR-10 files")
    parser.add_argument("--out", type=Path, required=True, help="file of the cells")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "table":
        print(describe(json.loads(options.out.read_text())))
    else:
        run(options)


if __name__ == "__main__":
    main()
