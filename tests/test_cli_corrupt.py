"""``ctta corrupt``: benchmark folders from clean images of every supported kind."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from command_line import invoke, output, user_error, write_images

import ctta
from ctta.cli.data import corrupt
from ctta.data.datasets import CifarC, ImageNetC
from ctta.data.streams import continual

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 3, 4, 5])


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    np.savez(tmp_path / "sample.npz", images=IMAGES, labels=LABELS)
    return tmp_path / "sample.npz"


def test_a_mistyped_corruption_is_corrected(tmp_path: Path) -> None:
    np.savez(tmp_path / "clean.npz", images=np.zeros((1, 8, 8, 3), np.uint8), labels=[0])
    error = user_error(corrupt, tmp_path / "clean.npz", tmp_path / "made", "--corruptions", "snow,fogg")
    assert error.startswith("unknown corruption 'fogg' (did you mean 'fog'?)") and not (tmp_path / "made").exists()


def test_an_npz_becomes_a_folder_like_cifar_c(sample: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    text = output(corrupt, sample, folder, "--corruptions", "brightness,contrast", "--seed", 3)
    assert text == (
        f"{folder} contains 2 corruptions at severities 1, 2, 3, 4, 5.\n"
        f'Read it with: ctta.data.datasets.CifarC("{folder}")\n'
    )
    made = np.load(folder / "contrast.npy")
    assert (made[24:] == ctta.data.corruptions.corrupt(IMAGES, "contrast", 5, seed=3)).all()
    batch = next(iter(continual(CifarC(folder), names=["contrast"], severity=5, batch_size=6)))
    assert batch.y is not None and batch.y.tolist() == LABELS.tolist()


def test_a_second_run_keeps_complete_files(sample: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    output(corrupt, sample, folder, "--corruptions", "contrast")
    (folder / "contrast.npy").write_bytes(b"looks complete")
    result = invoke(corrupt, sample, folder, "--corruptions", "contrast,hold-out")
    assert result.exit_code == 0
    assert result.stderr == f"Resuming {folder}: complete files are kept.\n"
    assert (folder / "contrast.npy").read_bytes() == b"looks complete"
    assert {path.stem for path in folder.glob("*.npy")} == {"contrast", "labels", *ctta.data.corruptions.HOLD_OUT}
    assert "seed: 0 → 1" in user_error(corrupt, sample, folder, "--seed", 1)


def test_a_tree_of_images_becomes_one_like_imagenet_c(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write_images(tmp_path / "clean" / name, range(2), side=32)
    folder = tmp_path / "made"
    options = ["--corruptions", "contrast", "--severities", "3,2.25", "--json"]
    summary = json.loads(output(corrupt, tmp_path / "clean", folder, *options))
    assert summary == {
        "folder": str(folder),
        "kind": "imagenet-c",
        "corruptions": ["contrast"],
        "severities": [2.25, 3],
        "seed": 0,
    }
    assert len(list(folder.glob("contrast/*/*/*.JPEG"))) == 8
    batch = next(iter(continual(ImageNetC(folder), names=["contrast"], severity=3, batch_size=4)))
    assert ImageNetC(folder).domain("contrast", 2.25).paths[0].is_relative_to(folder / "contrast" / "2.25")
    assert batch.x.shape == (4, 3, 32, 32) and batch.y is not None and batch.y.tolist() == [0, 0, 1, 1]
    output(corrupt, tmp_path / "clean", tmp_path / "cropped", *options, "--crop")
    batch = next(iter(continual(ImageNetC(tmp_path / "cropped"), names=["contrast"], severity=3, batch_size=4)))
    assert batch.x.shape == (4, 3, 224, 224)
    assert "size: nothing → original" in user_error(corrupt, tmp_path / "clean", tmp_path / "cropped", *options)


def test_every_kind_of_clean_images(tmp_path: Path) -> None:
    batches = tmp_path / "data" / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    planes = IMAGES.transpose(0, 3, 1, 2).reshape(6, 3072)
    (batches / "test_batch").write_bytes(pickle.dumps({b"data": planes, b"labels": LABELS.tolist()}))
    np.save(tmp_path / "images.npy", IMAGES)
    np.save(tmp_path / "labels.npy", LABELS)
    for name in ("cat", "dog"):
        write_images(tmp_path / "tree" / name, range(2), side=32)
    for source, count in {tmp_path / "data": 6, batches: 6, tmp_path / "images.npy": 6, tmp_path / "tree": 4}.items():
        folder = tmp_path / f"made from {source.name}"
        output(corrupt, source, folder, "--corruptions", "contrast", "--kind", "cifar-c")
        assert np.load(folder / "contrast.npy").shape == (5 * count, 32, 32, 3)
        if count == 6:
            assert (np.load(folder / "labels.npy")[:6] == LABELS).all()
    made = [np.load(tmp_path / f"made from {name}" / "contrast.npy") for name in ("data", "images.npy")]
    assert (made[0] == made[1]).all()


def test_user_errors_are_one_line(sample: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert "did you mean 'fog'?" in user_error(corrupt, sample, folder, "--corruptions", "fogg")
    assert "does not exist" in user_error(corrupt, tmp_path / "nothing", folder)
    assert "is not a file of arrays" in user_error(corrupt, Path(__file__), folder)
    assert "--crop requires --kind imagenet-c" in user_error(corrupt, sample, folder, "--crop")
    assert "--severities requires --kind imagenet-c" in user_error(corrupt, sample, folder, "--severities", "5")
    tree = tmp_path / "tree"
    write_images(tree / "cat", range(1))
    assert "above 0 and up to 5, such as 3,5 or 2.25; got '6'" in user_error(corrupt, tree, folder, "--severities", "6")
    write_images(tree / "dog", range(1), side=8)
    assert "give a size" in user_error(corrupt, tree, folder, "--kind", "cifar-c")
    assert not folder.exists()
    np.savez(tmp_path / "pictures.npz", pictures=IMAGES)
    assert "contains pictures; expected 'images'" in user_error(corrupt, tmp_path / "pictures.npz", folder)
    np.savez(tmp_path / "unlabeled.npz", images=IMAGES)
    assert "has no labels" in user_error(corrupt, tmp_path / "unlabeled.npz", folder)
    np.savez(tmp_path / "floats.npz", images=IMAGES / 255)
    assert "expected images as uint8" in user_error(corrupt, tmp_path / "floats.npz", folder)
    np.savez(tmp_path / "shifted.npz", images=IMAGES, labels=LABELS[1:])
    assert "one integer per image" in user_error(corrupt, tmp_path / "shifted.npz", folder)
    (tmp_path / "cut.npz").write_bytes(sample.read_bytes()[:1000])
    assert "truncated or not a file of plain arrays" in user_error(corrupt, tmp_path / "cut.npz", folder)
    assert invoke(corrupt, sample, folder, "--kind", "mnist-c").exit_code == 2


def test_ctrl_c_says_how_to_resume(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ctta.cli.data.write_cifar_c", stopped)
    result = invoke(corrupt, sample, tmp_path / "made")
    assert result.exit_code == 130 and "Run the same command again to resume." in result.stderr
