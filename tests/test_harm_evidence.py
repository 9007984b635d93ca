"""The test for harm by labels: valid however often one looks, and still able to find harm, also late."""

from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor

from ctta.guard.answers import BETS, FALSE_ALARMS, STARTS, Z_95, AnswerLog, compute_evidence

NUM_STREAMS = 400


def draw(num_labels: int, better: float, worse: float, seed: int = 0) -> Tensor:
    """Return outcomes (streams, labels): 1 where only the method is right, -1 where only the source is."""
    generator = np.random.default_rng(seed)
    return torch.from_numpy(
        generator.choice([1, -1, 0], (NUM_STREAMS, num_labels), p=[better, worse, 1 - better - worse])
    )


def follow_evidence(outcomes: Tensor) -> Tensor:
    """Return the evidence after each label (streams, labels)."""
    begun = torch.arange(outcomes.shape[1]).unsqueeze(1) >= STARTS
    found = []
    for part in outcomes.split(50):  # of all streams at once, the bets would take a gigabyte
        better, worse = ((part.unsqueeze(2) == kind).long() * begun for kind in (1, -1))
        found.append(compute_evidence(better.cumsum(1), worse.cumsum(1)))
    return torch.cat(found)


def find_false_alarms(outcomes: Tensor) -> float:
    return float((follow_evidence(outcomes) >= 1 / FALSE_ALARMS).any(1).double().mean())


@pytest.mark.parametrize("differing", [0.02, 0.3, 1.0])
def test_false_alarms_are_bounded_under_continuous_looking(differing: float) -> None:
    outcomes = draw(500, differing / 2, differing / 2)  # neither gain nor harm, where alarms are likeliest
    error = (FALSE_ALARMS * (1 - FALSE_ALARMS) / NUM_STREAMS) ** 0.5
    assert find_false_alarms(outcomes) <= FALSE_ALARMS + 3 * error


def test_an_interval_at_every_label_is_not_valid() -> None:
    """What the test replaces, on the same streams."""
    outcomes = draw(600, 0.15, 0.15).double()
    number = torch.arange(1, 601)
    total, differing = outcomes.cumsum(1), outcomes.abs().cumsum(1)
    center = total / (number + 2)
    error = (differing + 1 - total.square() / (number + 2)).sqrt() / (number + 2)
    assert float((center + Z_95 * error < 0).any(1).double().mean()) > 3 * FALSE_ALARMS


def test_outcomes_may_depend_on_those_before() -> None:
    """The gain of each label is zero given those before it; how often answers differ follows the stream."""
    generator, outcomes = np.random.default_rng(1), torch.zeros(NUM_STREAMS, 400, dtype=torch.long)
    capital = torch.zeros(NUM_STREAMS)
    for number in range(400):
        rate = torch.where(capital < 0, 0.9, 0.1)  # more happens while the method is behind
        differs = torch.from_numpy(generator.random(NUM_STREAMS)) < rate
        signs = torch.from_numpy(generator.choice([1, -1], NUM_STREAMS))
        outcomes[:, number] = differs * signs
        capital += outcomes[:, number]
    assert 0 < find_false_alarms(outcomes) <= FALSE_ALARMS + 0.03


def test_harm_is_found_early_and_late() -> None:
    harm = draw(300, 0.05, 0.2)
    late = torch.cat([draw(300, 0.15, 0.05, seed=1), draw(600, 0.05, 0.2, seed=2)], 1)
    for outcomes, start in ((harm, 0), (late, 300)):
        alarms = follow_evidence(outcomes) >= 1 / FALSE_ALARMS
        assert float(alarms[:, :start].any(1).double().mean()) <= FALSE_ALARMS
        assert float(alarms[:, start:].any(1).double().mean()) > 0.9


def test_the_log_counts_as_bets_one_after_the_other() -> None:
    log, generator = AnswerLog(60), np.random.default_rng(2)
    answers, source = (torch.from_numpy(generator.integers(0, 3, 100)) for _ in range(2))
    labels, outcomes = generator.integers(0, 3, 100), []
    for number in range(100):
        log.add_(answers[number : number + 1], source[number : number + 1])
        log.set_labels_([number], [2])  # a mistake, which is corrected
        log.set_labels_([number, number, 500], [0, labels[number], 1])
        outcomes.append(int(answers[number] == labels[number]) - int(source[number] == labels[number]))
    begun = [start for start in STARTS.tolist() if start < 100]
    shares = [1 / (place * (place + 1)) for place in range(1, len(STARTS) + 1)]
    capital = sum(shares[len(begun) :])
    for share, start in zip(shares, begun, strict=False):
        wealth = [prod(1 - bet * outcome for outcome in outcomes[start:]) for bet in BETS.tolist()]
        capital += share * sum(wealth) / len(wealth)
    assert log.summarize().evidence == pytest.approx(capital / sum(shares), rel=1e-12)
    again = AnswerLog(10)
    again.take_over_(log.state_dict())
    assert again.summarize().evidence == log.summarize().evidence
    log.forget_labels_()
    assert log.summarize().evidence == 1
