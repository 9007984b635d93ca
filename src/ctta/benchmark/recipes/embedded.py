"""Tasks on the network and the images that come with the library: nothing to download, minutes instead of hours."""

from ctta import models
from ctta.benchmark.recipes.paper import GRADUAL, sizes
from ctta.benchmark.recipes.rows import ABLATION, METHODS, paper_rows
from ctta.benchmark.recipes.task import Options, Task
from ctta.datasets import Corrupted, sample
from ctta.streams import continual, gradual
from ctta.views import image_views

#: The authors' settings for CIFAR10-C, unchanged.
CIFAR10 = {"threshold": 0.92}
#: For 150 steps of 50 images, chosen by benchmarks/choose_demo_settings.py on other images and other corruptions; TENT
#: and Pseudo-label came out with the authors' learning rate.
SHORT_STREAM = {"threshold": 0.92, "restore": 0.001}


def demo(options: Options) -> Task:
    """A first look, minutes long: ResNet-20, 15 corruptions at severity 5 in a row, 500 images each."""
    return Task(
        network=lambda: models.load(options.model or "embedded"),
        stream=lambda order: continual(_sample(options), order=order, **sizes(options, 50, limit=500)),
        rows=paper_rows(options.preset, views=image_views(8), cotta=SHORT_STREAM),
        methods=METHODS,
        seeds=(1,),
    )


def embedded(options: Options) -> Task:
    """CIFAR-10 in bad weather: ResNet-20, 15 corruptions at severity 5 in a row, 2,000 images each."""
    return Task(
        network=lambda: models.load(options.model or "embedded"),
        stream=lambda order: continual(_sample(options), order=order, **sizes(options)),
        rows=paper_rows(options.preset, cotta=CIFAR10),
        methods=METHODS,
        seeds=(1, 2, 3),
    )


def embedded_gradual(options: Options) -> Task:
    """The same images, each corruption coming and going (official: the authors' 131 segments)."""
    return Task(
        network=lambda: models.load(options.model or "embedded"),
        stream=lambda order: gradual(_sample(options), variant=GRADUAL[options.preset], order=order, **sizes(options)),
        rows=paper_rows(options.preset, cotta=CIFAR10),
        methods=METHODS,
        orders=(0, 1, 2),
    )


def ablation(options: Options) -> Task:
    """What each part of CoTTA adds, on the stream of embedded: five seeds."""
    return Task(
        network=lambda: models.load(options.model or "embedded"),
        stream=lambda order: continual(_sample(options), order=order, **sizes(options)),
        rows=paper_rows(options.preset, cotta=CIFAR10),
        methods=ABLATION,
        seeds=(1, 2, 3, 4, 5),
    )


def _sample(options: Options) -> Corrupted:
    if options.data is not None:
        raise ValueError("this recipe brings its own images: leave --data out")
    return sample()
