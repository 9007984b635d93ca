"""Twenty steps of the methods that use features agree with naive implementations to 1e-10, and their edge cases."""

import pytest
import torch
from naive_features import naive_lame, naive_t3a
from test_mathematics import CLOSE, assert_same_run, stream
from test_methods_entropy import decided_classifier

import ctta


@pytest.mark.parametrize("max_iterations", [1, 100])
def test_lame(max_iterations: int) -> None:
    net = decided_classifier(2.0)
    expected = naive_lame(net, stream(9), max_iterations=max_iterations)
    assert_same_run(ctta.LAME(net, max_iterations=max_iterations), stream(9), expected)


def test_lame_of_fewer_images_than_neighbors_and_of_equal_images_is_finite() -> None:
    model = ctta.LAME(decided_classifier())
    x = stream(1)[0]
    for batch in (x, x.expand(6, -1, -1, -1)):
        logits = model(batch)
        assert logits.isfinite().all()
        CLOSE(logits.exp().sum(1), torch.ones(len(batch), dtype=torch.float64))


def test_lame_gives_neighbors_the_same_label() -> None:
    model = ctta.LAME(decided_classifier(), affinity="knn", num_neighbors=1)
    x = stream(4)[0]
    logits = model(torch.cat([x, x + 1e-9]))
    assert torch.equal(logits[:4].argmax(1), logits[4:].argmax(1))


@pytest.mark.parametrize("num_supports", [1, 3, 100])
def test_t3a(num_supports: int) -> None:
    net = decided_classifier()
    expected = naive_t3a(net, stream(), num_supports=num_supports)
    model = ctta.T3A(net, num_supports=num_supports)
    assert_same_run(model, stream(), expected)
    assert model.features.shape == (4, num_supports, 12)
