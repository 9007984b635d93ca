"""The small network that comes with the embedded street; PROVENANCE.md says where it comes from."""

from importlib.resources import as_file, files

from safetensors.torch import load_file
from torch import nn

from ctta.models.from_transformers import FromTransformers
from ctta.models.other_libraries import library, part_of
from ctta.synthetic import CLASSES


def tiny_segformer() -> FromTransformers:
    """A SegFormer of four stages and random weights, a fifth of the smallest published one, without BatchNorm."""
    transformers = library("transformers")
    config = part_of(transformers, "SegformerConfig")(
        num_labels=len(CLASSES),
        depths=[1, 1, 2, 1],
        hidden_sizes=[24, 48, 96, 128],
        num_attention_heads=[1, 2, 4, 4],
        mlp_ratios=[4, 4, 3, 3],
        decoder_hidden_size=96,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    net = part_of(transformers, "SegformerForSemanticSegmentation")(config)
    # The architecture has one BatchNorm, in its head; a group norm of one group is layer norm over the whole map.
    net.decode_head.batch_norm = nn.GroupNorm(1, config.decoder_hidden_size)
    return FromTransformers(net, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))  # it learnt from images in [0, 1] as they are


def streets() -> FromTransformers:
    """A SegFormer of 0.8 million parameters trained on the embedded street in clear weather, in eval mode.

    It takes images in [0, 1] and tells the nine classes of :data:`ctta.synthetic.CLASSES` apart. Every norm layer is a
    layer norm. Needs the extra ``segmentation``.

    >>> import torch
    >>> streets()(torch.rand(1, 3, 128, 256)).logits.shape
    torch.Size([1, 9, 32, 64])
    """
    net = tiny_segformer()
    with as_file(files("ctta.models") / "streets.safetensors") as path:
        net.net.load_state_dict(load_file(path))
    return net.eval()
