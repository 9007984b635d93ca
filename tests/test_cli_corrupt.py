"""``ctta corrupt``: benchmark folders from whatever clean images somebody has."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from command_line import mistake, output, run, write_pictures

import ctta
from ctta.cli.corrupt import corrupt
from ctta.datasets import CifarC, ImageNetC
from ctta.streams import continual

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 3, 4, 5])


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    np.savez(tmp_path / "sample.npz", images=IMAGES, labels=LABELS)
    return tmp_path / "sample.npz"


def test_an_npz_becomes_a_folder_like_cifar_c(sample: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    text = output(corrupt, sample, folder, "--corruptions", "brightness,contrast", "--seed", 3)
    assert text == (
        f'{folder} holds 2 corruptions, severities 1, 2, 3, 4, 5.\nRead it with: ctta.datasets.CifarC("{folder}")\n'
    )
    made = np.load(folder / "contrast.npy")
    assert (made[24:] == ctta.corruptions.corrupt(IMAGES, "contrast", 5, seed=3)).all()
    batch = next(iter(continual(CifarC(folder), names=["contrast"], severity=5, batch_size=6)))
    assert batch.y is not None and batch.y.tolist() == LABELS.tolist()


def test_started_again_it_keeps_what_is_complete_and_says_so(sample: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    output(corrupt, sample, folder, "--corruptions", "contrast")
    (folder / "contrast.npy").write_bytes(b"complete, as far as anybody can tell")
    result = run(corrupt, sample, folder, "--corruptions", "contrast,hold-out")
    assert result.exit_code == 0
    assert result.stderr == f"{folder} was begun before: keeping its complete files and going on.\n"
    assert (folder / "contrast.npy").read_bytes() == b"complete, as far as anybody can tell"
    assert {path.stem for path in folder.glob("*.npy")} == {"contrast", "labels", *ctta.corruptions.HOLD_OUT}
    assert "different seed" in mistake(corrupt, sample, folder, "--seed", 1)


def test_a_tree_of_pictures_becomes_one_like_imagenet_c(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write_pictures(tmp_path / "clean" / name, range(2), side=32)
    folder = tmp_path / "made"
    options = ["--corruptions", "contrast", "--severities", "3,5", "--json"]
    summary = json.loads(output(corrupt, tmp_path / "clean", folder, *options))
    assert summary == {
        "folder": str(folder),
        "kind": "imagenet-c",
        "corruptions": ["contrast"],
        "severities": [3, 5],
        "seed": 0,
    }
    assert len(list(folder.glob("contrast/*/*/*.JPEG"))) == 8
    batch = next(iter(continual(ImageNetC(folder), names=["contrast"], severity=3, batch_size=4)))
    assert batch.x.shape == (4, 3, 224, 224) and batch.y is not None and batch.y.tolist() == [0, 0, 1, 1]


def test_cifar_and_other_forms_of_clean_images(tmp_path: Path) -> None:
    batches = tmp_path / "data" / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    planes = IMAGES.transpose(0, 3, 1, 2).reshape(6, 3072)
    (batches / "test_batch").write_bytes(pickle.dumps({b"data": planes, b"labels": LABELS.tolist()}))
    np.save(tmp_path / "images.npy", IMAGES)
    np.save(tmp_path / "labels.npy", LABELS)
    for name in ("cat", "dog"):
        write_pictures(tmp_path / "tree" / name, range(2), side=32)
    for source, count in {tmp_path / "data": 6, batches: 6, tmp_path / "images.npy": 6, tmp_path / "tree": 4}.items():
        folder = tmp_path / f"made from {source.name}"
        output(corrupt, source, folder, "--corruptions", "contrast", "--kind", "cifar-c")
        assert np.load(folder / "contrast.npy").shape == (5 * count, 32, 32, 3)
        if count == 6:
            assert (np.load(folder / "labels.npy")[:6] == LABELS).all()
    made = [np.load(tmp_path / f"made from {name}" / "contrast.npy") for name in ("data", "images.npy")]
    assert (made[0] == made[1]).all()


def test_mistakes_are_one_line(sample: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert "expected a list of gaussian_noise" in mistake(corrupt, sample, folder, "--corruptions", "fogg")
    assert "does not exist" in mistake(corrupt, tmp_path / "nothing", folder)
    assert "is no file of arrays" in mistake(corrupt, Path(__file__), folder)
    assert "--severities goes with --kind imagenet-c only" in mistake(corrupt, sample, folder, "--severities", "5")
    tree = tmp_path / "tree"
    write_pictures(tree / "cat", range(1))
    assert "from 1 to 5, such as 3,5; got '6'" in mistake(corrupt, tree, folder, "--severities", "6")
    write_pictures(tree / "dog", range(1), side=8)
    assert "give a size" in mistake(corrupt, tree, folder, "--kind", "cifar-c")
    assert not folder.exists()
    np.savez(tmp_path / "pictures.npz", pictures=IMAGES)
    assert "holds pictures; expected 'images'" in mistake(corrupt, tmp_path / "pictures.npz", folder)
    np.savez(tmp_path / "unlabelled.npz", images=IMAGES)
    assert "has no labels" in mistake(corrupt, tmp_path / "unlabelled.npz", folder)
    np.savez(tmp_path / "floats.npz", images=IMAGES / 255)
    assert "expected images as uint8" in mistake(corrupt, tmp_path / "floats.npz", folder)
    np.savez(tmp_path / "shifted.npz", images=IMAGES, labels=LABELS[1:])
    assert "a whole number for each" in mistake(corrupt, tmp_path / "shifted.npz", folder)
    (tmp_path / "cut.npz").write_bytes(sample.read_bytes()[:1000])
    assert "truncated or no file of plain arrays" in mistake(corrupt, tmp_path / "cut.npz", folder)
    assert run(corrupt, sample, folder, "--kind", "mnist-c").exit_code == 2


def test_ctrl_c_says_how_to_go_on(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ctta.cli.corrupt.write_cifar_c", stopped)
    result = run(corrupt, sample, tmp_path / "made")
    assert result.exit_code == 130 and "The same command goes on where it was." in result.stderr
