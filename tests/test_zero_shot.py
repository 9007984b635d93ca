"""Classifiers from image features and class vectors, and the libraries whose models they are built from."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ctta
from ctta.integrations.clip import from_open_clip, from_transformers
from ctta.models import class_vectors
from ctta.nn.heads import features_and_logits, find_head, record_features_

NAMES, TEMPLATES = ["cat", "bird", "airplane"], ["a photo of a {}.", "a {}"]


class NamedLikeAHead(nn.Module):
    """An encoder with BatchNorm, and with a layer that has the usual name of a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.head(self.body(x))
        return features


def make_net() -> ctta.models.ZeroShot:
    torch.manual_seed(0)
    return ctta.zero_shot(NamedLikeAHead(), torch.randn(5, 6)).eval()


def test_logits_are_scaled_cosines() -> None:
    net, x = make_net(), torch.rand(4, 3, 8, 8)
    vectors = net.head.weight / 100
    features = net.image_encoder(x)
    expected = 100 * F.cosine_similarity(features[:, None], vectors[None], dim=2)
    torch.testing.assert_close(net(x), expected)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(5))
    assert find_head(net) == "head" and find_head(nn.Sequential(net)) == "0.head"
    record_features_(net, "head")
    torch.testing.assert_close(features_and_logits(net, x)[0], F.normalize(features))


@pytest.mark.parametrize("method", ["tent", "vane", "neo", "t3a", "tda", "dota", "cotta", "zerosiam"])
def test_methods_adapt_it_and_leave_the_class_vectors(method: str) -> None:
    net = make_net()
    settings: dict[str, Any] = {"views": ctta.views.image_views(1)} if method == "cotta" else {}
    model = ctta.adapt(net, method, **settings)
    batches = [torch.rand(20, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    for x in batches:
        logits = model(x)
        assert logits.shape == (20, 5) and logits.isfinite().all()
    assert not torch.allclose(logits, net(batches[-1]), atol=1e-3)
    for child in model.children():
        if isinstance(child, ctta.models.ZeroShot):
            assert torch.equal(child.head.weight, net.head.weight)


@pytest.mark.parametrize("vectors", [torch.ones(6), torch.eye(6)[:1], torch.zeros(3, 6), torch.full((3, 6), torch.nan)])
def test_class_vectors_that_cannot_be_are_refused(vectors: Tensor) -> None:
    with pytest.raises(ctta.ConfigError, match="class vectors"):
        ctta.zero_shot(NamedLikeAHead(), vectors)


def test_an_encoder_of_another_space_is_refused() -> None:
    with pytest.raises(ctta.ConfigError, match="as long as the class vectors"):
        ctta.zero_shot(NamedLikeAHead(), torch.eye(5))(torch.rand(2, 3, 8, 8))


def encode_letters(texts: list[str]) -> Tensor:
    """Return counts of letters: a text encoder whose vectors have different lengths."""
    return torch.tensor([[float(text.count(letter)) + 0.1 for letter in "aeioprt"] for text in texts])


def test_the_vector_of_a_class_is_the_mean_over_templates() -> None:
    vectors = class_vectors(encode_letters, NAMES, TEMPLATES)
    for name, vector in zip(NAMES, vectors, strict=True):
        units = [F.normalize(encode_letters([template.format(name)])[0], dim=0) for template in TEMPLATES]
        mean = (units[0] + units[1]) / 2
        torch.testing.assert_close(vector, mean / mean.norm())
    for templates in ([], ["a photo"]):
        with pytest.raises(ctta.ConfigError, match="templates"):
            class_vectors(encode_letters, NAMES, templates)


class LetterTokenizer:
    """A tokenizer in the call form of transformers: a token per letter, padded to one length."""

    def __call__(self, text: list[str], *, padding: str, truncation: bool, return_tensors: str) -> dict[str, Tensor]:
        assert (padding, truncation, return_tensors) == ("max_length", True, "pt")
        rows = [([ord(letter) % 40 + 3 for letter in each] + [2] * 16)[:16] for each in text]
        return {"input_ids": torch.tensor(rows), "attention_mask": torch.ones(len(rows), 16, dtype=torch.long)}


def make_transformers(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    text = {**sizes, "num_hidden_layers": 1, "vocab_size": 50, "max_position_embeddings": 16}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = {**sizes, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8}
    name = {"clip": "CLIP", "siglip": "Siglip"}[kind]
    library: Any = transformers
    config = getattr(library, f"{name}Config")(text_config=text, vision_config=vision)
    return getattr(library, f"{name}Model")(config).eval()


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_models_of_transformers(kind: str) -> None:
    model, x = make_transformers(kind), torch.rand(6, 3, 16, 16)
    net = from_transformers(model, LetterTokenizer(), NAMES, TEMPLATES[:1])
    tokens = LetterTokenizer()(
        [TEMPLATES[0].format(name) for name in NAMES], padding="max_length", truncation=True, return_tensors="pt"
    )
    if kind == "siglip":
        tokens.pop("attention_mask")
    with torch.no_grad():
        expected = model(pixel_values=x, **tokens).logits_per_image
        bias = model.logit_bias if kind == "siglip" else 0.0
        torch.testing.assert_close(net(x), expected - bias, rtol=1e-4, atol=1e-5)
    assert not any("text" in name for name, _ in net.named_parameters())
    for method in ("tent", "tda", "neo"):
        assert ctta.adapt(net, method)(x).shape == (6, 3)


class OpenClip(nn.Module):
    """The call form of a model of OpenCLIP: ``visual``, ``encode_text`` of tokens, and the logarithm of the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = NamedLikeAHead()
        self.token_embedding = nn.Embedding(50, 6)
        self.logit_scale = nn.Parameter(torch.tensor(20.0).log())

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        vectors: Tensor = self.token_embedding(text).mean(1)
        return F.normalize(vectors, dim=-1) if normalize else vectors


def test_models_of_open_clip() -> None:
    torch.manual_seed(0)
    model, x = OpenClip().eval(), torch.rand(4, 3, 8, 8)

    def tokenize(texts: list[str]) -> Tensor:
        return LetterTokenizer()(texts, padding="max_length", truncation=True, return_tensors="pt")["input_ids"]

    net = from_open_clip(model, tokenize, NAMES, TEMPLATES[:1])
    text = model.encode_text(tokenize([TEMPLATES[0].format(name) for name in NAMES]), normalize=True)
    torch.testing.assert_close(net(x), 20 * F.normalize(model.visual(x)) @ text.T)


def test_another_model_is_refused() -> None:
    with pytest.raises(ctta.ConfigError, match="has no vision_model, get_text_features, logit_scale"):
        from_transformers(nn.Linear(1, 1), LetterTokenizer(), NAMES)
