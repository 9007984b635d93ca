"""Methods of one's own on the command line: in bench, adapt and serve, from a file or an installed package."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import invoke, output, user_error, write_images, write_network
from own_methods import METHOD, NETWORK, write_method

import ctta
from ctta.adapt import adapt_folder
from ctta.benchmark import BenchmarkResult, run
from ctta.cli.adapt import adapt
from ctta.cli.bench import bench
from ctta.cli.catalog import methods
from ctta.errors import ConfigError
from ctta.serve import build_method

SHORT = ("--corruptions", "fog,snow", "--limit", "4", "--batch-size", "4", "--threads", "1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder to work in, with a network for the images of the recipe embedded."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK.replace("nn.LazyLinear(3)", "nn.LazyLinear(10)").replace("16, 16", "32, 32"))
    write_method(tmp_path)
    return tmp_path


def test_bench_runs_a_method_of_a_file_beside_others(folder: Path) -> None:
    arguments = ("embedded", "--model", "file:net.py:net", "--methods", "source,cotta_paper,file:mine.py:Mine", *SHORT)
    settings = ("--set", "Mine.lr=0.01", "--set", "cotta_paper.views=1", "--seeds", "1", "--out", "run")
    text = output(bench, *arguments, *settings)
    labels = [line.split()[0] for line in text.splitlines() if line.startswith(("Source", "CoTTA", "Mine"))]
    assert sorted(labels) == ["CoTTA", "Mine", "Source"]
    assert "Mine" in Path("run/report/report.md").read_text()
    (cell,) = Path("run/cells").glob("Mine-*-standard")
    about = json.loads((cell / "about.json").read_text())
    assert (about["method"], about["labels"]["seed"]) == ("Mine", None)
    assert about["settings"]["optimizer"] == "SGD(lr=0.01)"
    paper = json.loads(Path("run/cells/cotta_paper-standard-seed1/about.json").read_text())
    assert paper["settings"]["gate"] == "'element'" and paper["method"] == "CoTTA paper"


def test_workers_find_the_class_and_an_edited_file_is_not_mixed_with_old_results(folder: Path) -> None:
    def run_mine(workers: int) -> BenchmarkResult:
        return run(
            "embedded",
            methods=["file:mine.py:Mine"],
            settings={"Mine.strength": 2.0},
            model="file:net.py:net",
            corruptions=["fog"],
            limit=4,
            batch_size=4,
            folder="run",
            workers=workers,
            threads=1,
            report=False,
        )

    first = run_mine(workers=1)
    (result,) = first.results
    assert result.method == "Mine" and not first.failures
    assert run_mine(workers=0).results == first.results  # complete, so it does not run again
    (folder / "mine.py").write_text(METHOD.replace("1e-3", "1e-2"))
    with pytest.raises(ConfigError, match="has changed"):
        run_mine(workers=0)


def test_nothing_is_claimed_of_a_class_without_facts(folder: Path) -> None:
    text = output(methods, "file:mine.py:Mine")
    assert "The class has no docstring." in text and "Trains:" not in text
    assert "strength" in text and "(the learning rate as --set lr=VALUE)" in text
    (row,) = json.loads(output(methods, "file:mine.py:Mine", "--json"))
    assert row["trains"] is None and row["settings"]["strength"] == "1.0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "tnet"), "there is no method 'tnet' (did you mean 'tent'?); expected one of source, bn_stats"),
        (("--methods", "cotta_weight_averag"), "(did you mean 'cotta_weight_average'?)"),
        (("--methods", "mine.py:Mine"), "there is no method 'mine.py:Mine' (did you mean 'file:mine.py:Mine'?)"),
        (("--methods", "file:mine.py:Mein"), "mine.py has no class Mein (did you mean 'Mine'?)"),
        (("--set", "tnt.lr=1"), "'tnt.lr=1' names a method that this recipe does not have (did you mean 'tent'?)"),
        (("--corruptions", "fogg"), "unknown corruption 'fogg' (did you mean 'fog'?)"),
        (("--size", "8", "8"), "the recipe 'embedded' does not take the option 'size': leave it out"),
        (("--model", "embeded"), "unknown network 'embeded' (did you mean 'embedded'?)"),
        (("--model", "net.py"), "unknown network 'net.py' (did you mean 'file:net.py:build'?)"),
        (("--model", "net.py:net"), "unknown network 'net.py:net' (did you mean 'file:net.py:net'?)"),
        (("--mean", "0.5"), "give mean and std together"),
        (("--mean", "a,b,c"), "expected three numbers such as 0.5,0.5,0.5"),
    ],
)
def test_mistakes_are_corrected(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in user_error(bench, "embedded", "--model", "file:net.py:net", *arguments)


RANDOM = """
import torch, ctta

class Noisy(ctta.AdaptiveModel):
    def __init__(self, net, *, SEED scale=30.0):
        super().__init__(net GIVEN)
        self.scale = scale

    def adapt_step(self, x):
        def noise(logits):
            return self.scale * torch.randn(logits.shape, generator=self.generator("noise"))

        logits = self.source(x)
        return logits + noise(logits)
"""


def test_several_seeds_of_a_random_method_are_several_runs(folder: Path) -> None:
    Path("seeded.py").write_text(RANDOM.replace("SEED", "seed=0,").replace("GIVEN", ", seed=seed"))
    Path("unseeded.py").write_text(RANDOM.replace("SEED", "").replace("GIVEN", ""))
    common = ("embedded", "--model", "file:net.py:net", *SHORT, "--seeds", "1-3", "--out", "run", "--json")
    result = invoke(bench, *common, "--methods", "source,file:seeded.py:Noisy")
    assert result.exit_code == 0 and "One run for all seeds, as they draw no random numbers: source." in result.stderr
    errors = {json.loads(line)["seed"]: json.loads(line)["error"] for line in result.stdout.splitlines()}
    assert set(errors) == {None, 1, 2, 3}
    refused = user_error(bench, *common, "--methods", "source,file:unseeded.py:Noisy")
    assert "takes no seed, so 3 seeds would give one result: add the keyword seed=0" in refused
    one = ("embedded", "--model", "file:net.py:net", *SHORT, "--seeds", "1", "--out", "other")
    assert "Noisy" in output(bench, *one, "--methods", "file:unseeded.py:Noisy")


def test_adapt_saves_and_resumes_a_method_of_a_file(tmp_path: Path) -> None:
    network, name, images = write_network(tmp_path), write_method(tmp_path), tmp_path / "images"
    write_images(images, range(6))
    table, state = tmp_path / "out.csv", tmp_path / "state.safetensors"
    arguments = ("--model", network, "--images", images, "--out", table, "--state", state, "--batch-size", 3)
    first = output(adapt, *arguments, "--method", name, "--set", "lr=0.01", "--json")
    assert json.loads(first)["method"] == "Mine" and "SGD(lr=0.01)" in json.loads(first)["settings"]
    write_images(images, range(6, 9))
    assert "was saved by file:mine.py:Mine, which is not part of ctta" in user_error(adapt, *arguments)
    error = user_error(adapt, *arguments, "--method", name, "--set", "lr=0.02")
    assert "was made with other settings (optimizer.arguments.lr: 0.01 → 0.02)" in error
    second = output(adapt, *arguments, "--method", name, "--set", "lr=0.01", "--json")
    assert json.loads(second)["num_images"] == 3
    rows = csv.DictReader(table.read_text().splitlines())
    assert [row["batch"] for row in rows] == ["0"] * 3 + ["1"] * 3 + ["2"] * 3
    model = ctta.load(state, ctta.models.load(network), method=name)
    assert model.num_steps == 3


def test_adapt_takes_presets_and_names_the_classes_of_the_embedded_network(tmp_path: Path) -> None:
    images, table, state = tmp_path / "images", tmp_path / "out.csv", tmp_path / "state.safetensors"
    write_images(images, range(4), side=32)
    arguments = ("--model", "embedded", "--images", images, "--out", table, "--state", state, "--batch-size", 4)
    text = output(adapt, *arguments, "--method", "cotta_fast", "--set", "views=1", "--json")
    assert "balanced=True" in json.loads(text)["settings"]
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert all(row["name"] == ctta.models.CIFAR10_CLASSES[int(row["class"])] for row in rows)
    write_images(images, range(4, 5), side=32)
    assert "was made with other settings" in user_error(adapt, *arguments, "--method", "cotta_fast")
    assert json.loads(output(adapt, *arguments, "--json"))["num_images"] == 1


def test_a_table_without_names_is_continued_without(tmp_path: Path) -> None:
    """Tables of earlier versions have no column with the classes of the embedded network."""
    images, table, state = tmp_path / "images", tmp_path / "out.csv", tmp_path / "state.safetensors"
    write_images(images, range(2), side=32)
    arguments = ("--model", "embedded", "--method", "source", "--images", images, "--out", table, "--state", state)
    output(adapt, *arguments)
    rows = list(csv.reader(table.read_text().splitlines()))
    place = rows[0].index("name")
    table.write_text("".join(",".join(row[:place] + row[place + 1 :]) + "\n" for row in rows))
    write_images(images, range(2, 3), side=32)
    output(adapt, *arguments)
    assert "name" not in table.read_text().splitlines()[0] and len(table.read_text().splitlines()) == 4


def test_mean_and_std_normalize_in_front_of_the_network(tmp_path: Path) -> None:
    network, images = write_network(tmp_path), tmp_path / "images"
    write_images(images, range(3))
    arguments = ("--model", network, "--images", images, "--method", "source", "--batch-size", 3)
    output(adapt, *arguments, "--out", tmp_path / "a.csv", "--mean", "0.5,0.4,0.3", "--std", "0.2")
    wrapped = ctta.models.Normalized(ctta.models.load(network), (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
    adapt_folder(wrapped, images, tmp_path / "b.csv", method="source", batch_size=3)
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()
    normalizes = ("--model", "embedded", "--images", images, "--out", tmp_path / "c.csv")
    error = user_error(adapt, *normalizes, "--mean", "0.5", "--std", "0.2")
    assert "'embedded' normalizes its input itself: leave out mean and std" in error


def test_serve_takes_the_same_names(tmp_path: Path) -> None:
    net, name = ctta.models.load(write_network(tmp_path)), write_method(tmp_path)
    mine = build_method(net, name, ["lr=0.01", "strength=2.0"])
    assert type(mine).__name__ == "Mine" and mine.hyperparameters["strength"] == 2.0
    assert build_method(net, "cotta_paper").hyperparameters["gate"] == "element"
    with pytest.raises(ConfigError):
        build_method(net, "cotta_fats")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder with three installed packages, as pip leaves them; each reports when it is imported."""
    site = tmp_path / "site"
    codes = {"nice": METHOD, "broken": "import no_such_module", "exits": "raise SystemExit('no license')"}
    for name, code in codes.items():
        info = site / f"{name}_methods-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-methods\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[ctta.methods]\n{name} = {name}_code:Mine\n")
        report = f"import sys\nprint('imported {name}', file=sys.stderr)\n"
        (site / f"{name}_code.py").write_text(report + code)
    (site / "helpers_of_mine.py").write_text("SCALE = 1.0\n")
    return site


def run_with(site: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process that finds the packages of a folder."""
    search_path = os.pathsep.join([str(site), *filter(None, sys.path)])
    command = [sys.executable, "-m", "ctta", *map(str, arguments)]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": search_path}, capture_output=True, text=True)


def test_a_broken_package_does_not_break_the_list_of_methods(site: Path) -> None:
    process = run_with(site, "methods", "--json")
    assert process.returncode == 0 and json.loads(process.stdout)[-1]["name"] == "nice"
    lines = [line for line in process.stderr.splitlines() if not line.startswith("imported")]
    for line, name, cause in zip(
        sorted(lines), ("broken", "exits"), ("No module named 'no_such_module'", "no license"), strict=True
    ):
        assert line.startswith(f"Skipped: the method '{name}' of the package {name}-methods cannot be imported")
        assert cause in line and line.endswith("update or remove the package.")


def test_only_the_package_of_the_named_method_is_imported(site: Path, tmp_path: Path) -> None:
    network, images = write_network(tmp_path), tmp_path / "images"
    write_images(images, range(3))
    common = ("adapt", "--model", network, "--images", images, "--batch-size", 3)
    for method, imported in {"nice": ["imported nice"], "tent": []}.items():
        process = run_with(site, *common, "--method", method, "--out", tmp_path / f"{method}.csv")
        assert process.returncode == 0, process.stderr
        assert [line for line in process.stderr.splitlines() if line.startswith("imported")] == imported
    process = run_with(site, *common, "--method", "nicee", "--out", tmp_path / "x.csv")
    assert process.returncode == 1 and "(did you mean 'nice'?)" in process.stderr
    assert "imported" not in process.stderr
