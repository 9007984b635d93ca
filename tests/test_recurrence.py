"""Streams whose domains come back, and protocols by name: index arithmetic without images."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import LABELS, NAMES, create_data, create_stream

from ctta.benchmark import BenchmarkOptions, build_task
from ctta.data.corruptions.registry import KIND_OF
from ctta.data.datasets import ArrayDataset
from ctta.data.streams import (
    PROTOCOLS,
    CorruptionSequence,
    cdc,
    clean,
    continual,
    corruption_order,
    cyclic,
    in_memory,
    parse_protocol,
    recurring,
    rounds,
)
from ctta.errors import ConfigError, DataError

BLACK = ArrayDataset(np.zeros((200, 8, 8, 3), np.uint8), np.arange(200) % 10, name="black")


def test_visits_count_the_rounds() -> None:
    twice = rounds(create_stream(), 2)
    assert (create_stream().visits, twice.visits) == ([0, 0], [0, 0, 1, 1])
    assert rounds(twice, 2).visits == [0, 0, 1, 1, 2, 2, 3, 3]


def test_recurring_draws_every_visit_anew() -> None:
    stream = recurring(BLACK, num_visits=3, batch_size=20)
    assert stream.domains == [f"{name} 5" for name in corruption_order(5)] * 3
    assert stream.visits == [visit for visit in range(3) for _ in range(15)]
    rows = [segment.rows.tolist() for segment in stream.segments]
    assert len({tuple(each) for each in rows}) == 45 and all(sorted(each) == list(range(200)) for each in rows)
    assert "rounds=3 correlated sampler=rotta concentration=0.1" in stream.name
    assert recurring(BLACK, num_visits=3, batch_size=20, seed=1).hash != stream.hash
    named = recurring(BLACK, num_visits=2, names=("fog", "snow"), sampler="iid")
    assert named.domains == ["fog 5", "snow 5"] * 2


def test_cyclic_repeats_the_kinds_with_their_corruptions_in_another_order() -> None:
    stream = cyclic(BLACK, num_visits=4, batch_size=20)
    corruptions = [domain.split()[0] for domain in stream.domains]
    visits = [corruptions[start : start + 15] for start in range(0, 60, 15)]
    for visit in visits:
        assert sorted(visit) == sorted(corruption_order())
        kinds = [KIND_OF[name] for name in visit]
        assert kinds == ["noise"] * 3 + ["blur"] * 4 + ["weather"] * 4 + ["digital"] * 4
    assert len({tuple(visit) for visit in visits}) == 4
    assert stream.visits == [visit for visit in range(4) for _ in range(15)]
    assert cyclic(BLACK, num_visits=4, batch_size=20, seed=1).hash != stream.hash
    with pytest.raises(ConfigError):
        cyclic(BLACK, names=("fog", "none"))


def test_cdc_uses_every_image_once_per_visit_in_whole_batches() -> None:
    stream = cdc(BLACK, num_visits=3, names=("fog", "snow", "frost"), batch_size=16)
    for visit in range(3):
        pieces = [segment for segment in stream.segments if segment.visit == visit]
        for name in ("fog 5", "snow 5", "frost 5"):
            rows = [segment.rows for segment in pieces if segment.domain == name]
            assert sorted(np.concatenate(rows).tolist()) == list(range(200))
            assert all(len(part) % 16 == 0 for part in rows[:-1]), "batches are cut at no other place"
    assert len(stream) == 3 * 3 * 13, "as many batches as without pieces"
    lengths = Counter(segment.num_batches(16) for segment in stream.segments)
    assert len(stream.segments) > 9 and len(lengths) > 3, "pieces of many lengths"
    assert cdc(BLACK, num_visits=3, names=("fog", "snow", "frost"), batch_size=16, seed=1).hash != stream.hash


def test_clean_images_are_not_corrupted(tmp_path: Path) -> None:
    stream = clean(create_data(), batch_size=24)
    batch = next(iter(stream))
    np.testing.assert_array_equal((batch.x * 255).round().permute(0, 2, 3, 1).numpy(), create_data().images)
    assert stream.domains == ["clean"]
    own = in_memory(create_data().images, LABELS, name="mine", batch_size=8)
    assert clean(own, limit=9, batch_size=4).segments[0].rows.tolist() == list(range(9))
    assert clean(own).domains == ["mine"] and len(clean(own)) == 3
    from ctta.data.corruptions import write_cifar_c
    from ctta.data.datasets import CifarC

    write_cifar_c(create_data().images, LABELS, tmp_path, names=["contrast"])
    with pytest.raises(DataError):
        clean(CifarC(tmp_path))


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_can_be_named(name: str) -> None:
    names = None if name == "clean" else ("fog", "snow")
    sequence = CorruptionSequence(names=names, batch_size=10)
    stream = parse_protocol(name).build(BLACK, sequence)
    assert stream.hash == parse_protocol(name).build(BLACK, sequence).hash
    assert stream.batch_size == (1 if name == "single" else 10)
    assert PROTOCOLS[name].summary.endswith(".") and PROTOCOLS[name].reference
    if "seed" in PROTOCOLS[name].defaults:
        assert parse_protocol(f"{name},seed=7").build(BLACK, sequence).hash != stream.hash
    if "num_visits" in PROTOCOLS[name].defaults:
        assert set(stream.visits) == set(range(20))
        with pytest.raises(ConfigError):
            parse_protocol(name).build(BLACK, CorruptionSequence(names=names, num_rounds=2))
    else:
        twice = parse_protocol(name).build(BLACK, CorruptionSequence(names=names, batch_size=10, num_rounds=2))
        assert len(twice) == 2 * len(stream) and set(twice.visits) == {0, 1}
        if "seed" in PROTOCOLS[name].defaults:
            first, second = twice.segments[0], twice.segments[len(twice.segments) // 2]
            assert first.digest != second.digest, "drawn anew in every round"


def test_settings_of_a_protocol_are_typed_after_commas() -> None:
    typed = parse_protocol("recurring, num_visits=2,sampler=note,concentration=0.5")
    stream = typed.build(BLACK, CorruptionSequence(names=("fog",), batch_size=10))
    expected = recurring(BLACK, num_visits=2, sampler="note", concentration=0.5, names=("fog",), batch_size=10)
    assert stream.hash == expected.hash
    sequence = CorruptionSequence(names=("fog",), limit=100, severity=3, num_rounds=2, batch_size=10)
    plain = rounds(continual(BLACK, names=("fog",), limit=100, severity=3, batch_size=10), 2)
    assert parse_protocol("continual").build(BLACK, sequence).hash == plain.hash


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recuring", "no protocol 'recuring' .did you mean 'recurring'.*expected one of continual, gradual"),
        ("rotta,gamma=1", "the protocol 'rotta' has no setting 'gamma'.*it has concentration, num_slots, seed"),
        ("sorted,seed=1", "the protocol 'sorted' has no setting 'seed'"),
        ("rotta,concentration=high", "concentration must be a number"),
        ("rotta,0.1", "NAME=VALUE"),
        ("rotta,num_slots=abc", "num_slots of the protocol 'rotta' must be a number, got 'abc'"),
        ("no-wait,ratio=inf", "ratio of the protocol 'no-wait' must be a number, got 'inf'"),
    ],
)
def test_mistyped_protocols(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_protocol(text)


@pytest.mark.parametrize("name", [name for name, each in PROTOCOLS.items() if "seed" in each.defaults])
def test_seeds_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError):
        parse_protocol(f"{name},seed=-1").build(BLACK, CorruptionSequence(names=("fog",), batch_size=10))


@pytest.mark.parametrize("name", ["recurring", "cyclic", "cdc"])
def test_numbers_of_visits_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError):
        parse_protocol(f"{name},num_visits=0").build(BLACK, CorruptionSequence(names=("fog",), batch_size=10))


def make(recipe: str, order: int | None = None, **options: Any) -> Any:
    return build_task(recipe, BenchmarkOptions(**options)).make_stream(order)


def test_recipes_take_protocols() -> None:
    common: dict[str, Any] = {"limit": 50, "batch_size": 25, "corruptions": NAMES}
    assert make("embedded", protocol="continual", rounds=3, **common).hash == make("embedded", rounds=3, **common).hash
    recurrent = make("embedded", protocol="recurring,num_visits=2", **common)
    assert recurrent.domains == ["contrast 5", "brightness 5"] * 2
    shuffled = make("embedded", order=4, protocol="mixed", **common)
    assert shuffled.hash != make("embedded", protocol="mixed", **common).hash
    assert build_task("imagenetc", BenchmarkOptions(protocol="recurring")).default_orders == (5,)
    assert build_task("imagenetc", BenchmarkOptions(protocol="gradual")).default_orders == tuple(range(10))
    assert build_task("embedded", BenchmarkOptions(protocol="rotta", corruptions=("fog",))).default_orders == (None,)


def test_batches_of_one_reach_the_methods() -> None:
    task = build_task("embedded", BenchmarkOptions(protocol="single", limit=5))
    assert task.make_stream(None).batch_size == 1
    assert task.methods["roid"].settings["batch_size"] == 1
    with pytest.raises(ConfigError):
        build_task("embedded", BenchmarkOptions(protocol="single", batch_size=4))


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("embedded-gradual", {"protocol": "mixed"}, "'embedded-gradual' does not take the option 'protocol'"),
        ("streets", {"protocol": "mixed"}, "'streets' does not take the option 'protocol'"),
        ("embedded", {"protocol": "gradual", "severity": 3}, "every severity: leave out the option 'severity'"),
        ("embedded", {"protocol": "clean", "severity": 3}, "no corruption: leave out the option 'severity'"),
        ("embedded", {"protocol": "clean", "corruptions": ("fog",)}, "leave out the option 'corruptions'"),
        ("embedded", {"protocol": "cdc", "rounds": 2}, "has visits .cdc,num_visits=20.: leave out the option 'rounds'"),
    ],
)
def test_options_that_do_not_go_together(recipe: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(recipe, **options)


def test_clean_images_have_no_order_of_corruptions() -> None:
    with pytest.raises(ConfigError):
        parse_protocol("clean").build(BLACK, CorruptionSequence(order=3))


def test_protocol_is_a_later_option() -> None:
    assert "protocol" not in BenchmarkOptions().to_dict()
    options = BenchmarkOptions(protocol="rotta,seed=1")
    assert BenchmarkOptions.from_dict(options.to_dict()) == options
    assert options.changes == ["--protocol rotta,seed=1"]
