"""Every method passes the checks of the contract on every kind of network, and the checks find broken methods.

Each method passes every check on its first network, and on each of the others the part of them that a hash of its name
picks; ``make test-all`` runs all of them.
"""

import ast
import copy
import re
import zlib
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Self
from unittest import mock

import pytest
import torch
from other_networks import check_on
from torch import Tensor, nn

import ctta
from ctta.testing import CHECKS, NETWORKS, ContractCase, select_networks, select_settings
from ctta.testing.case import LONG_STREAM, SHORT_STREAM, count_learned_batches

HYPERPARAMETERS = {name: select_settings(method) for name, method in ctta.METHODS.items()}
#: Entropies, as fractions of ln C, below which about half of the nearly uniform predictions of a small network are.
MEDIANS = {"batch_norm": 0.9148, "group_norm": 0.9793, "vit": 0.9925, "segmentation": 0.9147}


def choose_settings(method: str, network: str) -> dict[str, Any]:
    """Return settings with which a method learns on a network, from a selection that is neither empty nor whole."""
    margin = MEDIANS.get(network, 0.9)
    by_entropy: dict[str, dict[str, Any]] = {
        "eta": {"margin": margin, "redundancy": 0.9995 if network in ("vit", "segmentation") else 1.1},
        "rdumb": {"margin": margin, "redundancy": 1.1, "period": 2},
        "sar": {"margin": margin, "radius": 1e-4},
        "deyo": {"select_below": margin, "min_drop": 0.0},
    }
    by_entropy["eata"] = by_entropy["eta"]
    return by_entropy.get(method) or HYPERPARAMETERS[method]


def list_cases() -> list[Any]:
    """Return every method, network and check.

    ``make test`` runs the checks on the first network of a method, and on the others the sixth of them that a hash of
    the names picks; the rest is marked as long.
    """
    cases: list[Any] = []
    for method, cls in ctta.METHODS.items():
        first, *others = select_networks(cls)
        for network, check in product((first, *others), CHECKS):
            is_picked = network == first or zlib.crc32(f"{method} {network} {check}".encode()) % 6 == 0
            marks = [] if is_picked else [pytest.mark.long]
            cases.append(pytest.param(method, network, check, marks=marks))
    return cases


@cache
def make_case(method: str, network: str) -> ContractCase:
    """Return the case, the same one for all checks, which share its first run."""
    cls = ctta.METHODS[method]
    networks = select_networks(cls)
    num_steps = LONG_STREAM if network == next(iter(networks)) else SHORT_STREAM
    return ContractCase(cls, networks[network], choose_settings(method, network), num_steps)


@pytest.mark.parametrize(("method", "network", "check"), list_cases())
def test_contract(method: str, network: str, check: str) -> None:
    CHECKS[check](make_case(method, network))


@pytest.mark.parametrize("check", CHECKS)
def test_contract_with_batch_statistics_alone(check: str) -> None:
    """The batches of the checks are small, so that the methods above blend their statistics."""
    CHECKS[check](ContractCase(ctta.Tent, NETWORKS["batch_norm"], {"batch_stats": 1.0}))


def test_the_paper_preset_keeps_the_contract_on_pixels() -> None:
    views = ctta.views.multiscale_flip((0.5, 1))
    settings: dict[str, Any] = {
        "gate": "element",
        "average": "probabilities",
        "predict_with": "teacher",
        "loss": "hard",
    }
    check_on(NETWORKS["segmentation"], ctta.CoTTA, views=views, threshold=0.3, **settings)


class KeepsWeightsOnReset(ctta.Tent):
    def reset(self) -> "KeepsWeightsOnReset":
        self.num_steps = 0
        return self


class ReadsGlobalGenerator(ctta.Tent):
    def adapt_step(self, x: Tensor) -> Tensor:
        return super().adapt_step(x) + torch.rand(())


class KeepsEveryBatch(ctta.Tent):
    def adapt_step(self, x: Tensor) -> Tensor:
        self.batches = [*getattr(self, "batches", []), x.clone()]
        return super().adapt_step(x)


class PredictsOtherLogits(ctta.Tent):
    def predict_step(self, x: Tensor) -> Tensor:
        return super().predict_step(x) + 1


class ChangesInput(ctta.Tent):
    def adapt_step(self, x: Tensor) -> Tensor:
        return super().adapt_step(x.mul_(0.5))


class HidesState(ctta.Tent):
    def adapt_step(self, x: Tensor) -> Tensor:
        self.hidden = getattr(self, "hidden", 0.0) + 1.0
        return super().adapt_step(x) * self.hidden


class CountsUndeclared(ctta.Tent):
    """An undeclared counter, which changes no logits within the streams of the checks."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.num_seen = 0

    def adapt_step(self, x: Tensor) -> Tensor:
        self.num_seen += len(x)
        return super().adapt_step(x) * (1 if self.num_seen < 1000 else 2)


class UpdatesAfterSkippedStep(ctta.Tent):
    def minimize(self, loss: Tensor, **means: Tensor | None) -> bool:
        super().minimize(loss, **means)
        with torch.no_grad():
            next(self.student.parameters()).fill_(1)
        return True


class SharesStudent(ctta.Tent):
    def fork(self) -> "SharesStudent":
        fresh = super().fork()
        fresh.student = self.student
        return fresh


class AcceptsAnyInput(ctta.Tent):
    def check_input(self, x: Tensor) -> None:
        pass


class KeepsTensorOnTheHost(ctta.Tent):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.scale = torch.ones(())

    def adapt_step(self, x: Tensor) -> Tensor:
        return super().adapt_step(x) * self.scale


class ResetsOnTheHost(ctta.Tent):
    def reset(self) -> Self:
        super().reset()
        self.scale = torch.ones(())
        return self


class KeepsAutocastCache(ctta.CoTTA):
    def adapt(self, x: Tensor) -> Tensor:
        with mock.patch("torch.clear_autocast_cache"):
            return super().adapt(x)


class DeploysItsHook(ctta.Tent):
    """A method that scales features by a hook of its own, and returns it with the network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.student[0].register_forward_hook(halve)  # type: ignore[index]

    def deploy(self, batches: Any = None) -> nn.Module:
        return copy.deepcopy(self.student)


class HooksItsNetwork(DeploysItsHook):
    deploy = ctta.AdaptiveModel.deploy


def halve(layer: nn.Module, x: Any, features: Tensor) -> Tensor:
    return features * 0.5


def test_a_hook_of_a_method_does_not_stay_in_a_deployed_network_but_one_of_the_caller_does() -> None:
    net = NETWORKS["batch_norm"]()
    assert isinstance(net, nn.Sequential)
    net[2].register_forward_hook(halve)
    model = HooksItsNetwork(net)
    batches = [torch.rand(6, 3, 16, 16)]
    model(batches[0])
    for plain in (model.deploy(), model.deploy(batches), model.fork().deploy()):
        assert halve not in plain.get_submodule("0")._forward_hooks.values()
        assert [*plain.get_submodule("2")._forward_hooks.values()] == [halve]


class LeavesDropoutOn(ctta.Tent):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.student.train()


@pytest.mark.parametrize(
    ("method", "check"),
    [
        (KeepsWeightsOnReset, "check_reset_equals_new"),
        (ReadsGlobalGenerator, "check_global_rng_is_unused"),
        (KeepsEveryBatch, "check_memory_is_bounded"),
        (PredictsOtherLogits, "check_predict_equals_next_adapt"),
        (ChangesInput, "check_network_and_input_are_untouched"),
        (HidesState, "check_resume_is_bit_identical"),
        (HidesState, "check_reset_equals_new"),
        (CountsUndeclared, "check_resume_is_bit_identical"),
        (UpdatesAfterSkippedStep, "check_non_finite_step_is_skipped"),
        (SharesStudent, "check_forks_share_only_the_source"),
        (AcceptsAnyInput, "check_bad_input_changes_nothing"),
        (LeavesDropoutOn, "check_dropout_is_off"),
        (KeepsTensorOnTheHost, "check_state_is_where_the_network_is"),
        (ResetsOnTheHost, "check_state_is_where_the_network_is"),
        (DeploysItsHook, "check_deploys_plain_network"),
        (KeepsAutocastCache, "check_autocast_sees_updated_weights"),
    ],
)
def test_the_checks_find_broken_methods(method: type[ctta.AdaptiveModel], check: str) -> None:
    with pytest.raises(AssertionError):
        CHECKS[check](ContractCase(method, NETWORKS["batch_norm"], {}))


@pytest.mark.parametrize("method", ["tent", nn.Linear, ctta.Tent.__init__])
def test_check_method_expects_a_class(method: Any) -> None:
    with pytest.raises(TypeError, match="extends"):
        ctta.testing.check_method(method)


def test_check_method_names_the_check_and_the_network() -> None:
    with pytest.raises(AssertionError) as caught:
        ctta.testing.check_method(PredictsOtherLogits)
    assert "check_predict_equals_next_adapt" in caught.value.__notes__[0]
    assert "batch_norm" in caught.value.__notes__[0]


class WithExtraState(ctta.Tent):
    """A method with a submodule, a buffer and a counter beside its networks."""

    memory: Tensor
    num_seen: int

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.head = nn.LayerNorm(self.count_classes())
        self.register_buffer("memory", torch.zeros(self.count_classes()))
        self.register_counter("num_seen")

    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(super().adapt_step(x))
        self.memory.lerp_(logits.detach().mean(0).to(self.memory), 0.1)
        self.num_seen += len(x)
        return logits

    predict_step = ctta.AdaptiveModel.predict_step


def test_a_method_with_extra_state_keeps_the_contract() -> None:
    ctta.testing.check_method(WithExtraState, networks={"batch_norm": NETWORKS["batch_norm"]})


def test_counters_are_declared() -> None:
    model = WithExtraState(NETWORKS["batch_norm"]())
    model(torch.rand(4, 3, 16, 16))
    assert model.counters == {"num_steps": 1, "num_skipped": 0, "num_seen": 4}
    assert model.reset().counters == dict.fromkeys(("num_steps", "num_skipped", "num_seen"), 0)
    with pytest.raises(ctta.ConfigError):
        model.register_counter("student")
    with pytest.raises(ctta.ConfigError):
        model.register_counter("num seen")


def test_an_undeclared_counter_is_named() -> None:
    case = ContractCase(CountsUndeclared, NETWORKS["batch_norm"], {})
    with pytest.raises(AssertionError, match=r"register_counter\('num_seen'\)"):
        CHECKS["check_resume_is_bit_identical"](case)


class DoesNotStoreArgument(ctta.Tent):
    def __init__(self, net: nn.Module, *, strength: float = 1.0) -> None:
        super().__init__(net)


def test_a_hyperparameter_that_is_not_stored_is_named() -> None:
    model = DoesNotStoreArgument(NETWORKS["batch_norm"]())
    for use in (model.reset, model.fork, lambda: repr(model)):
        with pytest.raises(TypeError, match=r"self\.strength"):
            use()


def test_arguments_that_the_networks_are_built_with_are_read_only() -> None:
    model = ctta.BNStats(NETWORKS["batch_norm"]())
    for name in ("batch_stats", "output"):
        with pytest.raises(AttributeError):
            setattr(model, name, 0)


def test_distributed_wrappers_are_removed() -> None:
    net = NETWORKS["batch_norm"]().eval()
    wrapped = object.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = net
    x = torch.rand(4, 3, 16, 16)
    assert torch.equal(ctta.Tent(wrapped)(x), ctta.Tent(net)(x))


@pytest.mark.parametrize("method", ctta.METHODS)
def test_models_built_under_inference_mode_adapt(method: str) -> None:
    cls = ctta.METHODS[method]
    make_network = next(iter(select_networks(cls).values()))
    case = ContractCase(cls, make_network, HYPERPARAMETERS.get(method, {}))
    expected = case.make_model()
    with torch.inference_mode():
        model = case.make_model()
        for x in case.make_stream():
            assert torch.equal(model(x), expected(x))
        assert torch.equal(model.reset()(x), expected.reset()(x))


class NeverSteps(ctta.Tent):
    """A method that forgets to learn."""

    def adapt_step(self, x: Tensor) -> Tensor:
        return self.predict_step(x)


class ConfidentOnly(ctta.Tent):
    """A method that learns from samples with a low entropy, and takes no step where there is none."""

    def __init__(self, net: nn.Module, *, margin: float = 10.0) -> None:
        super().__init__(net)
        self.margin = margin

    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        entropies = ctta.functional.entropy(logits)
        selected = entropies[entropies < self.margin]  # NaN is not below
        if len(selected):
            self.minimize(selected.mean())
        return logits


class StepsUnguarded(ctta.Tent):
    """A method that calls the optimizer itself, without a check of the loss."""

    def adapt_step(self, x: Tensor) -> Tensor:
        assert self.optimizer is not None
        logits: Tensor = self.student(x)
        self.optimizer.zero_grad()
        ctta.functional.entropy(logits).mean().backward()
        self.optimizer.step()
        return logits


ONE_NETWORK = {"group_norm": NETWORKS["group_norm"]}


@pytest.fixture
def one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``check_method`` run one check only, where a test is about what it does besides."""
    name = "check_reset_equals_new"
    monkeypatch.setattr(ctta.testing, "CHECKS", {name: CHECKS[name]})


@pytest.mark.usefixtures("one_check")
def test_a_method_that_never_steps_is_found() -> None:
    with pytest.raises(AssertionError, match="minimize"):
        ctta.testing.check_method(NeverSteps, networks=ONE_NETWORK)


def test_a_method_that_selects_samples_keeps_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    ctta.testing.check_method(ConfidentOnly, networks=ONE_NETWORK)
    assert capsys.readouterr().out == f"ConfidentOnly: {len(CHECKS)} checks on 1 network passed; 3 steps taken\n"


@pytest.mark.usefixtures("one_check")
def test_a_method_that_selects_nothing_is_declared(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="allow_no_steps=True"):
        ctta.testing.check_method(ConfidentOnly, networks=ONE_NETWORK, margin=-1.0)
    ctta.testing.check_method(ConfidentOnly, networks=ONE_NETWORK, margin=-1.0, allow_no_steps=True)
    assert capsys.readouterr().out.endswith("1 network passed; 0 steps taken\n")


@pytest.mark.usefixtures("one_check")
@pytest.mark.parametrize("method", ctta.METHODS)
def test_every_method_passes_as_a_user_types_it(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without hyperparameters: methods with a large memory or many views declare small ones, and all learn."""
    cls = ctta.METHODS[method]
    ctta.testing.check_method(cls)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(cls.__name__) and re.search(r" checks on (each of \d networks|1 network) passed; ", line)
    for name in select_settings(cls):
        assert f"{name}=" in line
    if method == "memo":
        assert line.endswith("; 3 steps taken in each, none of which lasts")


def test_a_subclass_is_checked_with_the_settings_that_it_takes() -> None:
    class FixedMemory(ctta.RoTTA):
        def __init__(self, net: nn.Module, *, memory_size: int = 32) -> None:
            super().__init__(net, memory_size=memory_size, update_every=6)

    assert select_settings(FixedMemory) == {"memory_size": 8}
    assert select_settings(ctta.RoTTA) == {"memory_size": 8, "update_every": 6}


def test_an_unguarded_optimizer_step_is_found() -> None:
    case = ContractCase(StepsUnguarded, NETWORKS["batch_norm"], {"optimizer": partial(torch.optim.SGD, lr=0.1)})
    with pytest.raises(AssertionError, match="not finite"):
        CHECKS["check_non_finite_step_is_skipped"](case)


#: Those with an optimizer, except for MEMO, which forgets within the step.
LEARNING = [name for name, method in ctta.METHODS.items() if method.info and method.info.backward_passes]
LEARNING.remove("memo")
#: Networks on which a method learns nothing: VANE learns from one prediction per image.
NOT_LEARNED_ON = {("vane", "segmentation")}


@pytest.mark.parametrize("method", LEARNING)
def test_learning_methods_learn_on_every_network(method: str) -> None:
    """Without this, checks of a method that selects nothing would say nothing."""
    cls = ctta.METHODS[method]
    for network, make_network in select_networks(cls).items():
        expected = 0 if (method, network) in NOT_LEARNED_ON else 3
        learned = count_learned_batches(ContractCase(cls, make_network, choose_settings(method, network)))
        assert learned == expected, network


def test_every_assertion_of_the_contract_says_what_is_wrong() -> None:
    for path in Path(ctta.testing.__file__).parent.glob("*.py"):
        asserts = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
        assert [f"{path.name}:{node.lineno}" for node in asserts if node.msg is None] == []


def test_an_empty_assertion_of_a_method_gets_a_text() -> None:
    class Picky(ctta.Tent):
        def check_input(self, x: Tensor) -> None:
            if len(x) == 6:
                raise AssertionError

    with pytest.raises(AssertionError, match="Picky"):
        ctta.testing.check_method(Picky, networks=ONE_NETWORK)
