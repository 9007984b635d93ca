"""Boxes, the YOLOv5 network and its released weights, and detectors of other libraries behind one interface."""

import os
import pickle
import zipfile
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from naive_detection import fuse_one_by_one, suppress_one_by_one, yolov5_loss_by_loops
from test_detection_methods import make_images, make_yolo
from torch import Tensor, nn

import ctta
from ctta.data.streets import render_frame
from ctta.detection import (
    Boxes,
    Detector,
    TorchvisionDetector,
    TransformersDetector,
    UltralyticsDetector,
    YOLOv5,
    YOLOv5Detector,
    as_detector,
    box_iou,
    detection_stats,
    fuse_boxes,
    letterbox,
    load_detector,
    load_yolov5,
    pack,
    suppress,
    unpack,
)
from ctta.detection.libraries import _restore_maps
from ctta.detection.yolov5 import decode
from ctta.errors import CheckpointError, ConfigError, InputError
from ctta.guard.boxes import GuardedDetector


def make_boxes(seed: int, count: int = 40) -> Boxes:
    generator = torch.Generator().manual_seed(seed)
    corner = 60 * torch.rand(count, 2, generator=generator, dtype=torch.float64)
    extent = 5 + 40 * torch.rand(count, 2, generator=generator, dtype=torch.float64)
    scores = torch.rand(count, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (count,), generator=generator)
    return Boxes(boxes=torch.cat([corner, corner + extent], 1), scores=scores, labels=labels)


# ---- boxes ----


def test_overlap() -> None:
    a = torch.tensor([[0.0, 0.0, 4.0, 4.0]])
    others = torch.tensor([[0.0, 0.0, 4.0, 4.0], [2.0, 0.0, 6.0, 4.0], [4.0, 0.0, 8.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    assert box_iou(a, others).tolist() == [[1.0, pytest.approx(1 / 3), 0.0, 0.0]]


@pytest.mark.parametrize("seed", range(8))
def test_suppression_equals_one_box_after_the_other(seed: int) -> None:
    found = make_boxes(seed, 120)
    kept, none = suppress([found, make_boxes(0, 0)], 0.4, 1000)
    expected = suppress_one_by_one(found, 0.4)
    assert 10 < len(expected) < 110
    assert kept["boxes"].tolist() == [box for box, _, _ in expected]
    assert kept["labels"].tolist() == [label for _, _, label in expected]
    assert len(suppress([found], 0.4, 5)[0]["boxes"]) == 5
    assert len(none["boxes"]) == 0


@pytest.mark.parametrize("seed", range(8))
def test_fusion_equals_one_box_after_the_other(seed: int) -> None:
    views = [make_boxes(3 * seed + number) for number in range(3)]
    fused, expected = fuse_boxes(views, 0.5), fuse_one_by_one(views, 0.5)
    assert 20 < len(expected) < 115
    assert torch.allclose(fused["scores"], torch.tensor([score for _, score, _ in expected], dtype=torch.float64))
    by_score = {round(score, 12): box for box, score, _ in expected}
    for box, score in zip(fused["boxes"].tolist(), fused["scores"].tolist(), strict=True):
        assert box == pytest.approx(by_score[round(score, 12)], abs=1e-10)
    assert len(fuse_boxes([make_boxes(0, 0)] * 2)["boxes"]) == 0
    without_score = [view | {"scores": torch.zeros_like(view["scores"])} for view in views]
    assert len(fuse_boxes(without_score)["boxes"]) == 0


def test_packing_keeps_boxes() -> None:
    found = suppress([make_boxes(1), make_boxes(2, 0)], 0.5, 10)
    first, second = unpack(pack(found, 12))
    assert torch.equal(first["boxes"], found[0]["boxes"]) and torch.equal(first["labels"], found[0]["labels"])
    assert len(second["boxes"]) == 0
    assert len(unpack(pack(found, 3))[0]["boxes"]) == 3


@pytest.mark.parametrize(("shape", "size"), [((48, 100), 64), ((100, 48), None), ((33, 70), 128), ((64, 64), 64)])
def test_letterbox_finds_back(shape: tuple[int, int], size: int | None) -> None:
    image = torch.zeros(1, 3, *shape)
    image[:, :, 10:20, 30:40] = 1
    canvas, fit = letterbox(image, size, 32)
    assert canvas.shape[2] % 32 == 0 and canvas.shape[3] % 32 == 0
    assert max(canvas.shape[2:]) == size or size is None
    box = torch.tensor([[30.0, 10.0, 40.0, 20.0]])
    assert torch.allclose(fit.to_image(fit.to_canvas(box)), box, atol=1e-4)
    left, top, right, bottom = fit.to_canvas(box)[0].round().long().tolist()
    assert canvas[0, 0, top + 1 : bottom - 1, left + 1 : right - 1].min() > 0.9
    beyond = torch.tensor([[-50.0, -50.0, 500.0, 500.0]])
    assert fit.to_image(beyond).tolist() == [[0.0, 0.0, shape[1], shape[0]]]


# ---- YOLOv5 ----


def test_yolov5s_has_its_parameters() -> None:
    net = YOLOv5()
    counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in net.model]
    assert counts[:11] == [3520, 18560, 18816, 73984, 115712, 295424, 625152, 1180672, 1182720, 656896, 131584]
    assert counts[13:] == [361984, 33024, 0, 0, 90880, 147712, 0, 296448, 590336, 0, 1182720, 229245]
    assert sum(counts) == 7235389
    assert {norm.eps for norm in net.modules() if isinstance(norm, nn.BatchNorm2d)} == {1e-3}
    with pytest.raises(InputError, match="multiples of 32"):
        net(torch.rand(1, 3, 40, 64))


def test_decoded_boxes_equal_the_formula() -> None:
    net, x = make_yolo().double(), make_images(0, 1)
    detector = YOLOv5Detector(net, min_score=0.0, max_overlap=1.0, max_detections=2000)
    [found] = detector.predict(x)
    maps = net(x)
    s = maps[1][0, 2, 3, 4].sigmoid()  # second level, third anchor, row 3, column 4
    width, height = ((2 * s[2 + side]) ** 2 * (59, 119)[side] for side in (0, 1))
    cx, cy = (2 * s[0] - 0.5 + 4) * 16, (2 * s[1] - 0.5 + 3) * 16
    corners = torch.stack([cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2])
    corners = corners.clamp(min=0).minimum(torch.tensor([96.0, 64.0] * 2))
    scores = s[4] * s[5:]
    distances = (found["boxes"] - corners).abs().amax(1) + (found["scores"] - scores.max()).abs()
    best = int(distances.argmin())
    assert len(found["boxes"]) == 1000  # those with the highest scores
    if scores.max() > found["scores"].min():
        assert distances[best] < 1e-9 and found["labels"][best] == scores.argmax()


def test_boxes_are_float32_whatever_the_network_computes_in() -> None:
    torch.manual_seed(0)
    net, x = make_yolo(3), torch.rand(1, 3, 64, 96)
    raw = [each.bfloat16() for each in net(x)]
    for one, other in zip(decode(raw, net.anchors), decode([each.float() for each in raw], net.anchors), strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other)
    half = Boxes(boxes=torch.ones(1, 4).bfloat16(), scores=torch.ones(1).bfloat16(), labels=torch.tensor([299]))
    assert unpack(pack([half], 1))[0]["labels"].tolist() == [299]


@pytest.mark.parametrize("seed", range(3))
def test_loss_equals_loops(seed: int) -> None:
    torch.manual_seed(seed)
    net, x = make_yolo().double(), make_images(seed, 2)
    targets = [make_boxes(seed, 6), make_boxes(seed + 10, 0 if seed == 1 else 4)]
    targets[0]["boxes"] = targets[0]["boxes"].clamp(max=63.0)
    targets[0]["boxes"][1] = targets[0]["boxes"][0] + 0.5  # which share cells
    ours = YOLOv5Detector(net).loss(x, targets)
    inside = [Boxes(boxes=each["boxes"], labels=each["labels"]) for each in targets]
    assert torch.allclose(ours, yolov5_loss_by_loops(net, x, inside), rtol=0, atol=1e-10)
    channels_last = YOLOv5Detector(net).loss(x.to(memory_format=torch.channels_last), targets)
    assert torch.allclose(channels_last, ours, rtol=0, atol=1e-10)
    ours.backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


class FakeModule:
    """A class that only the writer of a file has."""


def save_released(net: nn.Module, path: Path) -> None:
    """Write a network as released files hold it: a pickle of objects whose classes are not installed."""

    def as_object(module: nn.Module) -> Any:
        made = FakeModule()
        made.__dict__.update(
            training=False,
            _parameters=OrderedDict(module.named_parameters(recurse=False)),
            _buffers=OrderedDict(module.named_buffers(recurse=False)),
            _modules=OrderedDict((name, as_object(child)) for name, child in module.named_children()),
            hyp={"box": 0.04, "obj": 0.7, "cls": 0.3, "lr0": 0.01},
        )
        return made

    torch.save({"epoch": -1, "model": as_object(net.half()), "ema": None, "optimizer": None}, path)
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    here = f"{__name__}\nFakeModule".encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data.replace(here, b"models.yolo\nModel"))


def test_released_weights_load_without_their_classes(tmp_path: Path) -> None:
    net = make_yolo(5)
    for name, buffer in net.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
    path = tmp_path / "yolov5n.pt"
    save_released(net, path)
    with pytest.raises((ModuleNotFoundError, AttributeError, pickle.UnpicklingError)):
        torch.load(path, weights_only=False)
    detector = load_yolov5(path)
    assert detector.size == 640 and detector.num_classes == 5 and detector.net.gains == (0.04, 0.7, 0.3)
    for name, value in net.float().state_dict().items():
        assert torch.equal(detector.net.state_dict()[name], value) or name.endswith("num_batches_tracked"), name
    x = torch.rand(1, 3, 64, 64)
    [one], [other] = load_yolov5(path, size=None).predict(x), YOLOv5Detector(net).predict(x)
    assert torch.equal(one["boxes"], other["boxes"])


def test_released_weights_change_no_function(tmp_path: Path) -> None:
    path, before = tmp_path / "bad.pt", torch._utils._rebuild_tensor_v2.__defaults__
    stream = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__K\x07\x85s\x86b."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bad/data.pkl", stream)
        archive.writestr("bad/version", b"3")
    with pytest.raises(CheckpointError):
        load_yolov5(path)
    assert torch._utils._rebuild_tensor_v2.__defaults__ == before


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_released_weights_run_no_code(tmp_path: Path) -> None:
    path, trace = tmp_path / "bad.pt", tmp_path / "trace"
    torch.save({"model": RunsCode(trace)}, path)
    with pytest.raises(CheckpointError, match="does not hold a YOLOv5"):
        load_yolov5(path)
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists(), "the file of this test runs code"


@pytest.mark.parametrize("content", ["empty", "text", "cut", "state_dict", "script"])
def test_damaged_weights_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    save_released(make_yolo(), path)
    if content == "empty":
        path.write_bytes(b"")
    elif content == "text":
        path.write_text("<html>")
    elif content == "cut":
        path.write_bytes(path.read_bytes()[:-5000])
    elif content == "state_dict":
        torch.save(make_yolo().state_dict(), path)
    else:
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("file/constants.pkl", b"")
    with pytest.raises(CheckpointError):
        load_yolov5(path)
    with pytest.raises(FileNotFoundError):
        load_yolov5(tmp_path / "none.pt")


def test_detectors_by_name(tmp_path: Path) -> None:
    path = tmp_path / "yolov5n.pt"
    save_released(make_yolo(5), path)
    assert load_detector(f"yolov5:{path}").num_classes == 5
    folder = tmp_path / "detr"
    tiny_detr("rt_detr").save_pretrained(folder)
    loaded = load_detector(f"hf:{folder}")
    assert isinstance(loaded, TransformersDetector) and not loaded.training
    assert any(isinstance(module, nn.BatchNorm2d) for module in loaded.modules())
    with pytest.raises(ConfigError, match="did you mean 'yolov5'"):
        load_detector("yolo5:x")


# ---- smaller looks ----


def test_networks_see_smaller_images() -> None:
    net, x = make_yolo(), torch.rand(2, 3, 60, 96)
    for size, smaller in ((64, 32), (None, None)):
        found = YOLOv5Detector(net, size=size).predict_scaled(x, 0.5)
        images = x if size else nn.functional.interpolate(x, (30, 48), mode="bilinear", antialias=True)
        expected = YOLOv5Detector(net, size=smaller).predict(images)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one["scores"], other["scores"]) and len(one["scores"])
            assert torch.allclose(one["boxes"], other["boxes"] * (1 if size else 2))
    sizes: list[torch.Size] = []
    detr = tiny_detr("rt_detr")
    detr.register_forward_pre_hook(
        lambda _, __, keywords: sizes.append(keywords["pixel_values"].shape), with_kwargs=True
    )
    detector = TransformersDetector(detr, size=(128, 192), min_score=0.1)
    [look] = detector.predict_scaled(x[:1], 0.5)
    assert sizes == [(1, 3, 64, 96)] and look["boxes"][:, 2].max() <= 96


def test_default_takes_the_surest_box_of_all_looks() -> None:
    torch.manual_seed(0)
    detector, x = YOLOv5Detector(make_yolo(), max_detections=400), torch.rand(2, 3, 64, 96)
    single, several = ctta.detect(detector, scales=()), ctta.detect(detector, scales=(0.5, 0.35))
    looks = [single(x), detector.eval().predict_scaled(x, 0.5), detector.predict_scaled(x, 0.35)]
    guarded = GuardedDetector(ctta.detect(detector))
    predicted, answer = several.predict(x), several(x)
    assert torch.equal(guarded(x)[0]["boxes"], answer[0]["boxes"])
    assert torch.equal(predicted[0]["boxes"], answer[0]["boxes"])
    for row, found in enumerate(answer):
        of_image = [each[row] for each in looks]
        every = Boxes(
            boxes=torch.cat([each["boxes"] for each in of_image]),
            scores=torch.cat([each["scores"] for each in of_image]),
            labels=torch.cat([each["labels"] for each in of_image]),
        )
        expected = suppress_one_by_one(every, 0.6)[:400]
        assert torch.allclose(found["boxes"], torch.tensor([box for box, _, _ in expected]))
        assert found["labels"].tolist() == [label for _, _, label in expected]
        assert set(found["scores"].tolist()) - set(looks[0][row]["scores"].tolist()), "a smaller look found one"


# ---- boxes of drawn streets ----


def test_boxes_of_streets_surround_their_objects() -> None:
    frame = render_frame(3, "night", size=(192, 384))
    boxes, classes = frame.find_boxes()
    assert len(boxes) > 3 and set(classes.tolist()) == {0, 1}
    for (left, top, right, bottom), label in zip(boxes.astype(int), classes, strict=True):
        inner = frame.label[top:bottom, left:right]
        assert (inner == (6, 7)[label]).sum() >= 40
    everything, _ = frame.find_boxes(1)
    covered = (frame.label == 6) | (frame.label == 7)
    for left, top, right, bottom in everything.astype(int):
        covered[top:bottom, left:right] = False
    assert not covered.any()
    assert len(render_frame(3, "night", size=(192, 384)).find_boxes(10**6)[0]) == 0


# ---- other libraries ----


def tiny_detr(kind: str) -> Any:
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    if kind == "yolos":
        config = transformers.YolosConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=[64, 96],
            patch_size=16,
            num_detection_tokens=6,
            num_labels=3,
        )
        return transformers.YolosForObjectDetection(config).eval()
    if kind == "rt_detr":
        backbone = transformers.RTDetrResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 8, 16, 16],
            depths=[1, 1, 1, 1],
            out_features=["stage2", "stage3", "stage4"],
        )
        config = transformers.RTDetrConfig(
            backbone_config=backbone,
            encoder_in_channels=[8, 16, 16],
            encoder_hidden_dim=32,
            encoder_ffn_dim=32,
            d_model=32,
            decoder_in_channels=[32, 32, 32],
            decoder_ffn_dim=32,
            num_queries=10,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            num_denoising=0,
            num_labels=3,
        )
        return transformers.RTDetrForObjectDetection(config).eval()
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        use_pretrained_backbone=False,
        backbone_config=transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=["stage4"]
        ),
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_queries=6,
        num_labels=3,
    )
    return transformers.DetrForObjectDetection(config).eval()


@pytest.mark.parametrize("kind", ["detr", "yolos", "rt_detr"])
def test_transformers(kind: str) -> None:
    net = tiny_detr(kind)
    settings: dict[str, Any] = {"size": (64, 96)} if kind == "rt_detr" else {}
    detector = as_detector(net, **settings)
    assert isinstance(detector, TransformersDetector) and detector.num_classes == 3
    assert detector.normalizes is (kind != "rt_detr")
    x = torch.rand(2, 3, 64, 96)
    found = detector.predict(x)
    assert all(0 <= each["labels"].max() < 3 and each["boxes"][:, 2].max() <= 96 for each in found)
    targets = [Boxes(boxes=torch.tensor([[10.0, 10.0, 50.0, 60.0]]), labels=torch.tensor([1]))] * 2
    loss = detector.loss(x, targets)
    assert loss.requires_grad and loss > 0
    shapes = {"detr": [(2, 3)], "yolos": [(4, 6)], "rt_detr": [(8, 12), (4, 6), (2, 3)]}
    assert [tuple(each.shape[2:]) for each in detector.features(x)] == shapes[kind]
    for method in ("bn_stats", "shift_statistics", "cotta"):
        is_lost = kind == "yolos" and method != "cotta"
        with pytest.warns(UserWarning, match="has no BatchNorm") if is_lost else nullcontext():
            model = ctta.detect(detector, method, **({"min_threshold": 0.1} if method == "cotta" else {}))
        if isinstance(thresholds := getattr(model, "thresholds", None), Tensor):
            thresholds.fill_(0.1)
        assert len(model(x)) == 2
        assert method != "cotta" or (model.last_step is not None and model.last_step.updated)
    actmad = ctta.detect(detector, "actmad", source_stats=detection_stats(detector, [x]), per="channel")
    actmad(x.flip(3))
    assert actmad.last_step is not None and actmad.last_step.updated


def test_tokens_are_where_they_came_from() -> None:
    """A bright patch of the image is bright at its place of every map."""
    detector = as_detector(tiny_detr("yolos"))
    dark, bright = torch.zeros(1, 3, 64, 96), torch.zeros(1, 3, 64, 96)
    bright[:, :, 16:32, 64:80] = 1  # row 1 and column 4 of the patches
    difference = (detector.features(bright)[0] - detector.features(dark)[0]).abs().sum(1)[0]
    assert divmod(int(difference.argmax()), 6) == (1, 4)
    # Deformable DETR has the tokens of several maps, each half as large, one after the other.
    maps = [torch.rand(2, 5, height, width) for height, width in ((9, 13), (5, 7), (3, 4))]
    tokens = torch.cat([each.flatten(2).transpose(1, 2) for each in maps], 1)
    assert all(map(torch.equal, _restore_maps(tokens, (70, 100)), maps))
    with pytest.raises(InputError, match="162 tokens"):
        _restore_maps(tokens[:, 2:], (70, 100))


def test_frozen_norms_of_transformers_follow_the_stream() -> None:
    net = tiny_detr("rt_detr")
    frozen = [module for module in net.modules() if type(module).__name__ == "RTDetrFrozenBatchNorm2d"]
    for module in frozen:
        module.running_mean.uniform_(-0.2, 0.2)
        module.running_var.uniform_(0.5, 2.0)
        module.weight.uniform_(0.5, 2.0)
        module.bias.uniform_(-0.2, 0.2)
    x = torch.rand(2, 3, 64, 96)
    given, detector = TransformersDetector(net, size=(64, 96)), as_detector(net, size=(64, 96))
    norms = [module for module in detector.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(frozen) > 3 and len(norms) >= len(frozen)
    assert any(type(module).__name__ == "RTDetrFrozenBatchNorm2d" for module in net.modules()), "the caller's is kept"
    for one, other in zip(given.features(x), detector.features(x), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    names = {name for name, each in detector.named_parameters() if each.requires_grad}
    assert names == {name for name, each in given.named_parameters() if each.requires_grad}
    for method in ("bn_stats", "shift_statistics"):
        model = ctta.detect(net, method)
        [before], [after] = given.predict(x[:1]), model(x[:1])
        assert not torch.equal(before["scores"], after["scores"])
    sites = detector.find_adaptor_sites()
    assert any("backbone" in norm for _, norm in sites)


def test_boxes_of_transformers_equal_its_own_post_processing() -> None:
    transformers: Any = import_module("transformers")
    detr, rt_detr = transformers.DetrImageProcessorPil(), transformers.RTDetrImageProcessorPil()
    x = torch.rand(1, 3, 64, 96)
    for kind, processor in (("detr", detr), ("rt_detr", rt_detr)):
        net = tiny_detr(kind)
        detector = TransformersDetector(net, min_score=0.1, size=(64, 96))
        with torch.no_grad():
            mean, std = (torch.tensor(each).view(3, 1, 1) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
            out = net(pixel_values=(x - mean) / std if kind == "detr" else x)
        [expected] = processor.post_process_object_detection(out, threshold=0.1, target_sizes=[(64, 96)])
        [found] = detector.predict(x)
        order = expected["scores"].sort(descending=True, stable=True).indices
        assert torch.allclose(found["scores"], expected["scores"][order])
        assert torch.equal(found["labels"], expected["labels"][order])
        assert torch.allclose(found["boxes"], expected["boxes"][order].clamp(min=0), atol=1e-3)


class FrozenBatchNorm2d(nn.Module):
    """The layer of torchvision's released detectors: buffers only, which no training changes."""

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.5), ("bias", 0.1), ("running_mean", 0.2), ("running_var", 0.5)):
            self.register_buffer(name, torch.full((num_features,), value))

    def forward(self, x: Tensor) -> Tensor:
        w, b, mean, var = (each.view(1, -1, 1, 1) for each in self.buffers())
        return (x - mean) * (var + self.eps).rsqrt() * w + b


class FakeFasterRCNN(nn.Module):
    """The call form of torchvision's detectors: lists in; losses in training mode, boxes in eval mode."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3, stride=8, padding=1), norm(4))
        self.roi_heads = nn.Module()
        self.roi_heads.box_predictor = nn.Module()
        self.roi_heads.box_predictor.cls_score = nn.Linear(4, 3)

    @staticmethod
    def transform(images: list[Tensor], targets: Any) -> tuple[Any, Any]:
        assert isinstance(images, list)
        return SimpleNamespace(tensors=torch.stack(images)), targets

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        assert isinstance(images, list) and images[0].ndim == 3
        maps = self.backbone(self.transform(images, targets)[0].tensors)
        logits = self.get_submodule("roi_heads.box_predictor.cls_score")(maps.mean((2, 3)))
        if self.training:
            assert targets is not None and not self.backbone[1].training
            for each in targets:
                assert ((each["boxes"][:, 2:] - each["boxes"][:, :2]) > 0).all() and each["labels"].dtype == torch.int64
            noise = torch.rand(())  # of the proposals that are drawn
            labels = torch.stack([each["labels"][0] for each in targets])
            return {"loss_classifier": nn.functional.cross_entropy(logits, labels), "loss_box_reg": noise * maps.mean()}
        score, label = logits[:, 1:].softmax(1).max(1)
        box = torch.tensor([[1.0, 2.0, 30.0, 40.0]])
        return [
            {"boxes": box.clone(), "scores": score[number, None], "labels": label[number, None] + 1}
            for number in range(len(images))
        ]


def test_call_form_of_torchvision() -> None:
    torch.manual_seed(0)
    detector, x = as_detector(FakeFasterRCNN().eval()), torch.rand(2, 3, 64, 64)
    assert isinstance(detector, TorchvisionDetector) and detector.num_classes == 3
    targets = [
        Boxes(boxes=torch.tensor([[1.0, 2.0, 30.0, 40.0], [5.0, 5.0, 5.0, 9.0]]), labels=torch.tensor([1, 2]))
    ] * 2
    state = torch.get_rng_state()
    assert detector.loss(x, targets) == detector.loss(x, targets)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in detector.net.modules())
    assert [tuple(each.shape) for each in detector.features(x)] == [(2, 4, 8, 8)]
    model = ctta.detect(FakeFasterRCNN().eval(), "cotta", flip=False, min_threshold=0.1)
    model.get_buffer("thresholds").fill_(0.1)
    before = model.get_buffer("source.net.backbone.1.running_mean").clone()
    found = model(x)
    assert [each["boxes"].tolist() for each in found] == [[[1.0, 2.0, 30.0, 40.0]]] * 2
    assert model.last_step is not None and model.last_step.updated
    assert torch.equal(model.get_buffer("student.net.backbone.1.running_mean"), before)


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_frozen_norms_of_torchvision_follow_the_stream(eps: float) -> None:
    torch.manual_seed(0)
    net, x = FakeFasterRCNN(partial(FrozenBatchNorm2d, eps=eps)).eval(), torch.rand(1, 3, 64, 64)  # type: ignore[arg-type]
    source, detector = TorchvisionDetector(net), as_detector(net)
    assert torch.allclose(source.features(x)[0], detector.features(x)[0], atol=1e-6)
    assert isinstance(net.backbone[1], FrozenBatchNorm2d)
    assert not any(each.requires_grad for name, each in detector.named_parameters() if "backbone.1" in name)
    [before], [after] = ctta.detect(net, "source")(x), ctta.detect(net)(x)
    assert not torch.equal(before["scores"], after["scores"])
    stats = detection_stats(net, [torch.rand(2, 3, 64, 64)])
    actmad = ctta.detect(net, "actmad", source_stats=stats, per="channel")
    actmad(x)
    assert actmad.last_step is not None and actmad.last_step.updated


def test_classes_of_other_heads_of_torchvision() -> None:
    for name in ("num_classes", "num_columns"):  # RetinaNet and FCOS; SSD
        net = nn.Module()
        net.compute_loss, net.head = None, nn.Module()  # type: ignore[assignment]
        net.head.classification_head = nn.Module()
        setattr(net.head.classification_head, name, 5)
        assert as_detector(net).num_classes == 5


class FakeHead(nn.Module):
    """The last layer of Ultralytics' networks: a list of maps in."""

    nc = 2

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 1)
        self.dfl = nn.Sequential(nn.Conv2d(4, 1, 1, bias=False))  # the integral of a distribution, which is fixed

    def forward(self, maps: list[Tensor]) -> Any:
        raw = self.conv(maps[0]).flatten(2)
        boxes = raw[:, :4].sigmoid() * 40 + 10
        return (torch.cat([boxes, raw[:, 4:].sigmoid()], 1), maps)


class FakeUltralytics(nn.Module):
    """The call form of Ultralytics' ``DetectionModel`` from a file: settings as a dictionary, gradients off.

    It returns raw boxes in a tuple, its loss takes a dictionary, and reads settings as attributes.
    """

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(4) if norm is None else norm
        self.model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3, stride=8, padding=1), norm), FakeHead())
        self.args: Any = {"box": 5.0, "imgsz": 640}
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.model[1]([self.model[0](x)])

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        assert set(batch) == {"img", "batch_idx", "cls", "bboxes"}
        assert batch["bboxes"].shape == (len(batch["batch_idx"]), 4) and batch["cls"].shape[1:] == (1,)
        self.seen = batch
        out = self(batch["img"])[0]
        gains = torch.tensor([self.args.box, self.args.cls, self.args.dfl])
        parts = gains * torch.stack([out[:, :4].mean(), out[:, 4:].mean(), batch["bboxes"].mean()]) * len(batch["img"])
        return parts, parts.detach()


def test_call_form_of_ultralytics() -> None:
    torch.manual_seed(0)
    net = FakeUltralytics().eval()
    detector, x = as_detector(net, size=64), torch.rand(2, 3, 48, 96)
    assert isinstance(detector, UltralyticsDetector) and detector.num_classes == 2
    targets = [
        Boxes(boxes=torch.tensor([[0.0, 0.0, 48.0, 24.0], [3.0, 3.0, 3.0, 3.0]]), labels=torch.tensor([1, 0])),
        Boxes(boxes=torch.empty(0, 4), labels=torch.empty(0, dtype=torch.int64)),
    ]
    loss = detector.loss(x, targets)
    assert loss.ndim == 0 and loss.requires_grad
    assert net.args == {"box": 5.0, "imgsz": 640} and not any(each.requires_grad for each in net.parameters())
    assert vars(detector.net.args) == {"box": 5.0, "cls": 0.5, "dfl": 1.5, "imgsz": 640}
    assert [name for name, each in detector.named_parameters() if not each.requires_grad] == [
        "net.model.1.dfl.0.weight"
    ]
    net = detector.net
    # 96x48 becomes 64x32, which needs no border.
    assert net.seen["img"].shape == (2, 3, 32, 64) and net.seen["bboxes"].tolist() == [[0.25, 0.25, 0.5, 0.5]]
    assert net.seen["batch_idx"].tolist() == [0.0] and net.seen["cls"].tolist() == [[1.0]]
    found = detector.predict(x)
    assert len(found) == 2 and found[0]["boxes"][:, 2].max() <= 96
    assert [tuple(each.shape) for each in detector.features(x)] == [(2, 4, 4, 8)]
    assert len(ctta.detect(detector, "shift_statistics")(x)) == 2
    model = ctta.detect(detector, "cotta", min_threshold=0.1)
    model.get_buffer("thresholds").fill_(0.1)
    model(x)
    assert model.last_step is not None and model.last_step.updated
    trained = FakeUltralytics().requires_grad_(True)
    trained.args = SimpleNamespace(box=1.0, cls=1.0, dfl=1.0)
    assert as_detector(trained).get_submodule("net") is trained
    with pytest.warns(UserWarning, match="predict of Ultralytics fuses them"):
        ctta.detect(FakeUltralytics(nn.Identity()).eval())


class OwnDetector(nn.Module):
    num_classes = 2

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def predict(self, images: Tensor) -> list[Boxes]:
        level = self.norm(images).mean((1, 2, 3)).sigmoid()
        return [
            Boxes(boxes=torch.tensor([[1.0, 1.0, 9.0, 9.0]]), scores=each[None], labels=torch.tensor([1]))
            for each in level
        ]

    def loss(self, images: Tensor, targets: list[Boxes]) -> Tensor:
        loss: Tensor = self.norm(images).mean() * sum(len(each["labels"]) for each in targets)
        return loss

    def features(self, images: Tensor) -> list[Tensor]:
        return [self.norm(images)]


def test_any_module_with_three_functions() -> None:
    model = ctta.detect(OwnDetector().eval(), "cotta", flip=False, min_threshold=0.2)
    model.get_buffer("thresholds").fill_(0.2)
    [found] = model(torch.rand(1, 3, 32, 32))
    assert found["boxes"].tolist() == [[1.0, 1.0, 9.0, 9.0]]
    assert model.last_step is not None and model.last_step.updated
    assert isinstance(model.deploy(), Detector)
    with pytest.raises(ConfigError, match="no convolution to add adaptors"):
        stats = detection_stats(OwnDetector().eval(), [torch.rand(2, 3, 32, 32)])
        ctta.detect(OwnDetector().eval(), "whw", source_stats=stats)
