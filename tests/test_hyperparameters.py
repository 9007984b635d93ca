"""Hyperparameters as text, such as ``restore=0.005``."""

import warnings
from typing import Any

import pytest
import torch

import ctta
from ctta.core.hyperparameters import parse_hyperparameters
from ctta.errors import ConfigError


def test_hyperparameters_are_parsed_from_text() -> None:
    found = parse_hyperparameters(
        ctta.CoTTA, ["optimizer=SGD", "lr=1e-2", "optimizer.momentum=0.9", "gate=element", "views=0"]
    )
    optimizer: Any = found.pop("optimizer")([torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer) is torch.optim.SGD
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.01, 0.9)
    assert found == {"gate": "element", "views": ()}
    assert parse_hyperparameters(ctta.Tent, ["lr=0.5"])["optimizer"].func is torch.optim.Adam
    for texts, words in {
        ("restore",): "NAME=VALUE",
        ("optimizer=Madam",): "a class of torch.optim",
        ("views=many",): "a number of random views",
        ("decay=much",): "decay must be a number such as 0.999",
        ("seed=1.5",): "seed must be an integer such as 0",
        ("optimizer.speed=1",): "does not take speed",
    }.items():
        with pytest.raises(ConfigError, match=words):
            parse_hyperparameters(ctta.CoTTA, texts)
    with pytest.raises(ConfigError, match="Source has no setting 'lr'; it has output"):
        parse_hyperparameters(ctta.Source, ["lr=1"])


def test_a_word_that_starts_with_a_digit_is_text_without_a_warning() -> None:
    """The compiler has something to say about it, which a user did not ask for."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ConfigError, match="decay must be a number"):
            parse_hyperparameters(ctta.CoTTA, ["decay=1or"])
    assert not caught
