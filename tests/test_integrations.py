"""Models within Lightning, transformers and trackers, nested outputs, and adapted networks in other runtimes."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ctta
from ctta.integrations import (
    export_to_opentelemetry,
    export_to_prometheus,
    log_steps,
    log_to_tensorboard,
    read_metrics,
)
from ctta.integrations.monitoring import MAX_STREAMS, HealthCollector
from ctta.testing.networks import BlockViT


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), pool, nn.Flatten(), nn.Linear(8, 5)).eval()


def make_stream(num_batches: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(16, 3, 12, 12, generator=generator) for _ in range(num_batches)]


def adapt_to(model: ctta.AdaptiveModel, stream: list[Tensor]) -> Tensor:
    return torch.cat([model(x) for x in stream])


class TestMonitoring:
    """An alert names the stream, whatever reads the health of models in a loop of one's own."""

    def test_prometheus_reads_the_health_of_each_stream(self) -> None:
        from prometheus_client import CollectorRegistry, generate_latest

        models, registry = {name: ctta.Guarded(ctta.Tent(make_net())) for name in ("dock", "gate")}, CollectorRegistry()
        collector = export_to_prometheus(models, registry)
        adapt_to(models["gate"], make_stream())
        models["yard"] = ctta.Guarded(ctta.Tent(make_net()))  # added later
        found = {
            (sample.name, sample.labels["stream"]): sample.value
            for family in registry.collect()
            for sample in family.samples
        }
        assert found["ctta_stream_confidence", "gate"] == models["gate"].health.confidence
        assert ("ctta_stream_confidence", "dock") not in found  # it has seen nothing
        assert {stream for _, stream in found} == {"dock", "gate", "yard"}
        registry.unregister(collector)
        assert generate_latest(registry) == b""

    def test_opentelemetry_reads_the_health_of_each_stream(self) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader

        reader, model = InMemoryMetricReader(), ctta.Guarded(ctta.Tent(make_net()))
        export_to_opentelemetry({"gate": model}, MeterProvider([reader]).get_meter("cameras"))
        adapt_to(model, make_stream())
        data: Any = reader.get_metrics_data()
        points = {
            metric.name: metric.data.data_points[0] for metric in data.resource_metrics[0].scope_metrics[0].metrics
        }
        assert points["ctta.stream.confidence"].value == model.health.confidence
        assert points["ctta.stream.collapse_score"].attributes == {"stream": "gate"}

    def test_only_some_streams_have_metrics_and_those_in_trouble_do(self) -> None:
        streams = [(f"camera{number}", {"collapse_score": 0.0}) for number in range(2 * MAX_STREAMS)]
        streams += [("collapsed", {"collapse_score": 1.5}), ("harmed", {"estimated_gain_high": -0.01})]
        (family,) = [
            each for each in HealthCollector(lambda: streams).collect() if each.name == "ctta_stream_collapse_score"
        ]
        names = [sample.labels["stream"] for sample in family.samples]
        assert names[:2] == ["collapsed", "camera0"] and len(names) == MAX_STREAMS - 1  # one has no score


class TestTracking:
    def test_tensorboard_gets_every_step(self, tmp_path: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        model, stream, losses = ctta.Tent(make_net()), make_stream(), []
        with SummaryWriter(tmp_path) as writer:
            log_steps(model, log_to_tensorboard(writer, "camera7"))
            for x in stream:
                model(x)
                assert model.last_step is not None
                losses.append(model.last_step.loss.item())
        events: Any = EventAccumulator(str(tmp_path)).Reload()
        logged = events.Scalars("camera7/loss")
        assert [each.step for each in logged] == [1, 2, 3]
        assert [each.value for each in logged] == losses

    def test_every_nth_batch_until_removed(self) -> None:
        model, steps = ctta.Tent(make_net()), list[int]()
        handle = log_steps(model, lambda values, step: steps.append(step), every=2)
        for x in make_stream(5):
            model(x)
        assert steps == [2, 4]
        handle.remove()
        model(make_stream()[0])
        assert steps == [2, 4]

    def test_the_health_of_a_guarded_model_is_logged(self) -> None:
        model = ctta.Guarded(ctta.Tent(make_net()))
        assert read_metrics(model) == {} or "loss" not in read_metrics(model)
        model(make_stream()[0])
        values = read_metrics(model)
        assert values["health/confidence"] == pytest.approx(model.health.confidence)
        assert "loss" in values and "health/step" not in values
        assert all(type(value) is float for value in values.values())

    def test_logging_changes_nothing(self) -> None:
        logged, bare = ctta.Tent(make_net()), ctta.Tent(make_net())
        log_steps(logged, lambda values, step: None)
        assert torch.equal(adapt_to(logged, make_stream()), adapt_to(bare, make_stream()))


#: Of Lightning and of the exporter, about their own use of torch.
OLD_TREES = "ignore:.*LeafSpec.*is deprecated:FutureWarning"


@pytest.mark.filterwarnings(OLD_TREES, "ignore:.*does not have many workers")
class TestLightning:
    @pytest.fixture
    def module(self) -> Any:
        from lightning.pytorch import LightningModule

        class Classifier(LightningModule):  # type: ignore[misc]  # mypy does not read Lightning
            def __init__(self) -> None:
                super().__init__()
                self.part = nn.ModuleDict({"net": make_net()})

            def predict_step(self, x: Tensor) -> Tensor:
                logits: Tensor = self.part["net"](x)
                return logits

        return Classifier()

    @staticmethod
    def predict(callback: Any, module: Any, stream: list[Tensor]) -> Tensor:
        from lightning.pytorch import Trainer

        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(accelerator="cpu", callbacks=[callback], **quiet)
        batches: Any = stream  # a list is a dataset, too
        return torch.cat(trainer.predict(module, DataLoader(batches, batch_size=None)))

    def test_predictions_are_those_of_the_method(self, module: Any) -> None:
        from ctta.integrations.lightning import AdaptCallback

        net, stream, callback = module.part.net, make_stream(), AdaptCallback("part.net", "tent", lr=0.01)
        expected = ctta.Tent(make_net(), lr=0.01)
        assert torch.equal(self.predict(callback, module, stream), adapt_to(expected, stream))
        assert module.part.net is net and torch.equal(net[1].weight, make_net().state_dict()["1.weight"])
        assert torch.equal(self.predict(callback, module, stream), adapt_to(expected, stream))  # it goes on
        assert callback.model is not None and callback.model.num_steps == 6
        again = AdaptCallback("part.net", callback.model.fork())
        assert torch.equal(self.predict(again, module, stream), adapt_to(expected.reset(), stream))

    def test_the_network_is_put_back_after_a_failure(self, module: Any) -> None:
        from ctta.integrations.lightning import AdaptCallback

        net = module.part.net
        with pytest.raises(ctta.InputError):
            self.predict(AdaptCallback("part.net", "tent"), module, [torch.full((2, 3, 12, 12), float("nan"))])
        assert module.part.net is net

    def test_mistakes(self, module: Any) -> None:
        from ctta.integrations.lightning import AdaptCallback

        with pytest.raises(ctta.ConfigError):
            self.predict(AdaptCallback("net", "tent"), module, make_stream())
        with pytest.raises(ctta.ConfigError):
            AdaptCallback("part.net", ctta.Tent(make_net()), lr=0.1)


class TestTransformers:
    @pytest.fixture
    def pipeline(self) -> Any:
        import transformers

        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "image_size": 16,
            "patch_size": 8,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
        }
        sizes |= {"num_attention_heads": 2, "num_labels": 4}
        config = transformers.ViTConfig(**sizes)
        processor = transformers.ViTImageProcessorPil(size={"height": 16, "width": 16})
        net: Any = transformers.ViTForImageClassification(config)
        return transformers.pipeline("image-classification", model=net.eval(), image_processor=processor)

    @pytest.fixture
    def images(self) -> list[Any]:
        from PIL import Image

        rng = np.random.default_rng(0)
        return [Image.fromarray(rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)) for _ in range(4)]

    def test_a_pipeline_adapts(self, pipeline: Any, images: list[Any]) -> None:
        from ctta.integrations.transformers import adapt_pipeline

        net = pipeline.model
        before = {name: value.clone() for name, value in net.state_dict().items()}
        pixels = pipeline.image_processor(images, return_tensors="pt")["pixel_values"]
        expected = ctta.Tent(net)
        assert adapt_pipeline(pipeline, "tent") is pipeline
        for _ in range(2):
            scores = pipeline(images, batch_size=4, top_k=4)
            probabilities = expected(pixels).softmax(1)
            for answers, row in zip(scores, probabilities, strict=True):
                found = {answer["label"]: answer["score"] for answer in answers}
                assert [found[f"LABEL_{label}"] for label in range(4)] == pytest.approx(row.tolist(), abs=1e-6)
        assert pipeline.model.model.num_steps == 2
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    def test_a_loaded_model_goes_on(self, pipeline: Any, images: list[Any], tmp_path: Path) -> None:
        from ctta.integrations.transformers import adapt_pipeline

        net = pipeline.model
        adapt_pipeline(pipeline, "tent")(images, batch_size=4)
        ctta.save(pipeline.model.model, tmp_path / "state.safetensors")
        adapt_pipeline(pipeline, ctta.load(tmp_path / "state.safetensors", net))
        pipeline(images, batch_size=4)
        assert pipeline.model.model.num_steps == 2

    def test_other_inputs_are_refused(self, pipeline: Any) -> None:
        from ctta.integrations.transformers import adapt_pipeline

        model = adapt_pipeline(pipeline, "tent").model
        with pytest.raises(ctta.ConfigError):
            model(torch.rand(2, 3, 16, 16), bool_masked_pos=torch.ones(2, 4))


def make_vit() -> nn.Module:
    torch.manual_seed(0)
    return BlockViT(size=12).eval()


def deploy_after(method: str) -> tuple[nn.Module, nn.Module]:
    """Return a deployed network that predicts what its method does, or one of estimated statistics; and its source."""
    net, settings = make_vit() if method == "foa" else make_net(), dict[str, Any]()
    if method == "foa":
        settings = {"source_stats": ctta.source_stats(net, make_stream(1)), "num_prompts": 2, "population": 4}
    model = ctta.Tent(net, lr=0.01) if method == "tent" else ctta.adapt(net, method, **settings)
    adapt_to(model, make_stream())
    if method == "tent":
        return model.deploy(make_stream()).eval(), net
    deployed = model.deploy().eval()
    with torch.no_grad():
        torch.testing.assert_close(deployed(make_stream()[0]), model.predict_once(make_stream()[0]))
    return deployed, net


@pytest.fixture(scope="module", params=["tent", "neo", "unmix_tns", "t3a", "bn_ema", "foa"])
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """Return a deployed network and its source."""
    return deploy_after(request.param)


@pytest.mark.parametrize("method", ["unmix_tns", "foa", "neo"])
def test_the_state_of_a_deployed_network_holds_all_of_its_adaptation(method: str) -> None:
    adapted, x = deploy_after(method)[0], make_stream()[0]
    blank = copy.deepcopy(adapted)
    with torch.no_grad():
        expected = adapted(x)
        for value in blank.state_dict().values():
            value.zero_()
        assert not torch.allclose(blank(x), expected)
        blank.load_state_dict(adapted.state_dict())
        assert torch.equal(blank(x), expected)


class TestExport:
    """A deployed network leaves Python: torch.export, and ONNX in another runtime."""

    def test_torch_export(self, pair: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
        deployed, x = pair[0], make_stream()[0]
        program = torch.export.export(deployed, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(program, tmp_path / "adapted.pt2")
        loaded: Any = torch.export.load(tmp_path / "adapted.pt2").module()
        with torch.no_grad():
            torch.testing.assert_close(loaded(x[:5]), deployed(x[:5]), rtol=0, atol=1e-6)

    @pytest.mark.filterwarnings(OLD_TREES)
    def test_onnx(self, pair: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
        import onnxruntime

        (deployed, source), x, path = pair, make_stream()[0], tmp_path / "adapted.onnx"
        shapes = ({0: torch.export.Dim("batch")},)
        torch.onnx.export(deployed, (x,), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
        session = onnxruntime.InferenceSession(path)
        (logits,) = session.run(None, {session.get_inputs()[0].name: x[:5].numpy()})
        with torch.no_grad():
            expected = deployed(x[:5])
            assert (expected - source(x[:5])).abs().max() > 1e-3  # it is the adapted network
        np.testing.assert_allclose(logits, expected.numpy(), rtol=0, atol=1e-5)


class MaskNetwork(nn.Module):
    """Outputs in the layout of Ultralytics' segmentation: boxes, scores and mask coefficients, and mask prototypes."""

    num_classes, num_masks = 5, 4

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.boxes = nn.Conv2d(8, 4 + self.num_classes + self.num_masks, 1)
        self.prototypes = nn.Conv2d(8, self.num_masks, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[list[Tensor], Tensor, Tensor]]:
        features = self.backbone(x)
        anchors = self.boxes(features).flatten(2)  # (N, 4 + C + M, A)
        return anchors, ([features], anchors[:, 4 + self.num_classes :], self.prototypes(features))


def read_pixel_logits(out: tuple[Tensor, tuple[list[Tensor], Tensor, Tensor]]) -> Tensor:
    """Return class logits per pixel: over anchors, the mean of each class score where the mask of the anchor is."""
    anchors, (_features, coefficients, prototypes) = out
    masks = torch.einsum("nma,nmhw->nahw", coefficients, prototypes).sigmoid()
    return torch.einsum("nca,nahw->nchw", anchors[:, 4 : 4 + MaskNetwork.num_classes], masks) / masks.shape[1]


class TestNestedOutputs:
    def test_a_function_finds_the_logits_of_masks(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        net, stream = MaskNetwork().eval(), make_stream()
        expected = nn.functional.interpolate(
            read_pixel_logits(net(stream[0])), size=(12, 12), mode="bilinear", align_corners=False
        )
        source = ctta.Source(net, output=read_pixel_logits)(stream[0])
        torch.testing.assert_close(source, expected.detach())
        model = ctta.adapt(net, "tent", output=read_pixel_logits)
        assert adapt_to(model, stream).shape == (48, 5, 12, 12)
        ctta.save(model, tmp_path / "masks.safetensors")
        loaded = ctta.load(tmp_path / "masks.safetensors", net, output=read_pixel_logits)
        assert torch.equal(loaded(stream[0]), model(stream[0]))
        assert not torch.equal(model.predict(stream[0]), ctta.adapt(net, "tent", output=read_pixel_logits)(stream[0]))
