"""Repositories like those on the Hugging Face hub, read by transformers itself: their code and their revisions."""

import builtins
import json
from pathlib import Path

import pytest
import torch
import transformers

from ctta.errors import ConfigError
from ctta.models import load

PROCESSOR = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.2, 0.2, 0.2]}
COMMITS = {"main": "a" * 40, "v1.0": "b" * 40}

#: A network with code of its own, which leaves a trace if it is executed.
CODE = """
from pathlib import Path
from transformers import PretrainedConfig, ResNetForImageClassification

Path({trace!r}).touch()

class OwnConfig(PretrainedConfig):
    model_type = "own"

class OwnNet(ResNetForImageClassification):
    config_class = OwnConfig
"""


def write_repository(folder: Path, seed: int) -> None:
    """Write a small network with random weights."""
    folder.mkdir(parents=True)
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = transformers.ResNetForImageClassification(config)  # type: ignore[no-untyped-call]
    network.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with code, in front of a user who answers every question with yes."""
    folder = tmp_path / "repository"
    write_repository(folder, seed=0)
    (folder / "code.py").write_text(CODE.format(trace=str(tmp_path / "executed")))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "own", "auto_map": {"AutoConfig": "code.OwnConfig"}},
        {
            "model_type": "bert",  # transformers has the configuration, but no class of it for images
            "architectures": ["OwnForImageClassification"],
            "auto_map": {"AutoModelForImageClassification": "code.OwnNet"},
        },
        {"model_type": "own", "auto_map": {"AutoConfig": "someone/else--code.OwnConfig"}},
    ],
    ids=["configuration", "network", "another repository"],
)
def test_code_of_a_repository_is_never_executed(
    repository: Path, tmp_path: Path, changes: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    edit_config(repository, **changes)
    with pytest.raises(ConfigError, match="own repository") as raised:
        load(f"hf:{repository}")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "executed").exists()
    assert "[y/N]" not in "".join(capfd.readouterr())


def test_code_that_is_not_needed_is_ignored(repository: Path, tmp_path: Path) -> None:
    edit_config(repository, auto_map={"AutoModelForImageClassification": "code.OwnNet"})
    load(f"hf:{repository}")
    assert not (tmp_path / "executed").exists()


def test_the_trace_is_left_by_a_loader_that_trusts_the_repository(repository: Path, tmp_path: Path) -> None:
    edit_config(repository, model_type="own", auto_map={"AutoConfig": "code.OwnConfig"})
    transformers.AutoConfig.from_pretrained(repository, trust_remote_code=True)
    assert (tmp_path / "executed").exists()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the cache of the hub with two revisions of a network, and disconnect."""
    root = tmp_path / "hub" / "models--organization--net"
    (root / "refs").mkdir(parents=True)
    for seed, (reference, commit) in enumerate(COMMITS.items()):
        (root / "refs" / reference).write_text(commit)
        write_repository(root / "snapshots" / commit, seed)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("hub")
def test_a_revision_is_pinned() -> None:
    x = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        main, tag, commit, other = (
            load(f"hf:organization/net{revision}")(x).logits for revision in ("", "@v1.0", f"@{'b' * 40}", "@main")
        )
    assert torch.equal(tag, commit) and torch.equal(main, other)
    assert not torch.equal(main, tag)
    with pytest.raises(ConfigError):
        load("hf:organization/net@v2.0")


def test_revisions_and_folders(tmp_path: Path) -> None:
    write_repository(tmp_path / "net@home", seed=0)
    load(f"hf:{tmp_path / 'net@home'}")
    with pytest.raises(ConfigError):
        load(f"hf:{tmp_path / 'net@home'}@v1")
    for malformed in ("@v1", "organization/net@"):
        with pytest.raises(ConfigError):
            load(f"hf:{malformed}")


def test_a_folder_without_its_processor_names_the_missing_file(tmp_path: Path) -> None:
    write_repository(tmp_path / "net", seed=0)
    whole = load(f"hf:{tmp_path / 'net'}")
    (tmp_path / "net" / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json, .* or give --mean R,G,B --std R,G,B"):
        load(f"hf:{tmp_path / 'net'}")
    mean, std = PROCESSOR["image_mean"], PROCESSOR["image_std"]
    given, x = load(f"hf:{tmp_path / 'net'}", mean=mean, std=std), torch.rand(2, 3, 32, 32)
    assert torch.equal(given(x).logits, whole(x).logits)
    with pytest.raises(ConfigError, match="give mean and std together"):
        load(f"hf:{tmp_path / 'net'}", mean=mean)
    (tmp_path / "net" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load(f"hf:{tmp_path / 'net'}")
    with pytest.raises(ConfigError, match="there is no folder"):
        load(f"hf:{tmp_path / 'nowhere'}")


def test_a_network_that_normalizes_takes_no_other_normalization(tmp_path: Path) -> None:
    write_repository(tmp_path / "net", seed=0)
    with pytest.raises(ConfigError, match="normalizes its input itself"):
        load(f"hf:{tmp_path / 'net'}", mean=[0.5], std=[0.5])
