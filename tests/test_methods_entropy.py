"""Twenty steps of the entropy family agree with the naive implementation to 1e-10."""

from functools import partial
from typing import Any, Literal

import pytest
import torch
from naive import NaiveAdam
from naive_entropy import come, naive_eata, naive_fisher, shannon
from test_mathematics import EPS, assert_same_run, assert_same_weights, classifier, stream

import ctta

OPTIMIZER, NAIVE_OPTIMIZER = partial(torch.optim.Adam, lr=0.02, eps=EPS), partial(NaiveAdam, lr=0.02, eps=EPS)


def selected_fractions(model: ctta.AdaptiveModel) -> list[float]:
    found = []
    for x in stream():
        model(x)
        assert model.last_step is not None and model.last_step.selected is not None
        found.append(float(model.last_step.selected))
    return found


#: A margin at which some of these nearly uniform predictions are selected, and a redundancy that drops some of them.
SELECTIVE: dict[str, Any] = {"margin": 0.95, "redundancy": 0.9}


@pytest.mark.parametrize("kind", ["softmax", "come"])
def test_eta(kind: Literal["softmax", "come"]) -> None:
    settings = SELECTIVE if kind == "softmax" else SELECTIVE | {"margin": 1.02}
    model = ctta.ETA(classifier(), optimizer=OPTIMIZER, entropy=kind, batch_stats=1.0, **settings)
    expected, student = naive_eata(
        classifier(), stream(), optimizer=NAIVE_OPTIMIZER, entropy=shannon if kind == "softmax" else come, **settings
    )
    assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)
    assert any(0 < fraction < 1 for fraction in selected_fractions(model.reset()))


def test_eata() -> None:
    net = classifier()
    stats = ctta.source_stats(net, stream()[:4])
    model = ctta.EATA(net, source_stats=stats, fisher_weight=50.0, optimizer=OPTIMIZER, batch_stats=1.0, **SELECTIVE)
    fisher = naive_fisher(net, stream()[:4])
    expected, student = naive_eata(
        net, stream(), optimizer=NAIVE_OPTIMIZER, fisher=fisher, fisher_weight=50.0, **SELECTIVE
    )
    assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)


def test_nothing_selected_is_no_step() -> None:
    model = ctta.ETA(classifier(), margin=0.0)
    before = [p.detach().clone() for p in model.student.parameters()]
    assert set(selected_fractions(model)) == {0.0}
    assert all(map(torch.equal, before, model.student.parameters()))
    assert model.num_skipped == 0 and model.optimizer is not None and not model.optimizer.state
