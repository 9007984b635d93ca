"""Find out whether adaptation helps a network, and which method and settings."""

import os
from collections.abc import Sequence

from numpy.typing import ArrayLike
from torch import nn

from ctta.advise.advice import Advice, NetworkFacts, PictureFacts
from ctta.advise.calibration import collect_signals, fit_estimator, list_steps
from ctta.advise.candidates import count_norm_layers, list_candidates
from ctta.advise.input_check import check_input
from ctta.advise.pictures import (
    DEFAULT_CORRUPTIONS,
    DEFAULT_SEVERITY,
    STREAM_ORDERS,
    CorruptedPictures,
    ImageSource,
    StreamOrder,
    gather_images,
    iter_batches,
    label_pictures,
)
from ctta.advise.race import SOURCE, OnProgress, RaceSettings, run_race
from ctta.advise.threshold import calibrate_threshold
from ctta.advise.work_folder import open_folder
from ctta.core.registry import resolve_method
from ctta.core.validation import check_choice, check_integer, check_positive
from ctta.data.corruptions.registry import check_corruption
from ctta.data.datasets.corruptible import CLEAN
from ctta.errors import ConfigError
from ctta.models import Normalized

#: How many pictures are used by default, and batches if these have more.
NUM_PICTURES, NUM_BATCHES = 512, 10
#: Pictures of each domain that the estimate of accuracy without labels is calibrated on.
CALIBRATION_IMAGES = 192


def advise(
    net: nn.Module,
    images: ImageSource,
    labels: ArrayLike | None = None,
    *,
    batch_size: int = 32,
    order: StreamOrder = "shuffled",
    methods: Sequence[str] | None = None,
    corruptions: Sequence[str] = DEFAULT_CORRUPTIONS,
    severity: float = DEFAULT_SEVERITY,
    limit: int | None = None,
    budget: float = 10.0,
    size: tuple[int, int] | None = None,
    use_labels: bool | None = None,
    check_normalization: bool = True,
    folder: str | os.PathLike[str] | None = None,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Advice:
    """Find out whether adaptation helps a network, and which method and settings, on the user's own pictures.

    First it checks that the network expects the images that it is given. Methods that cannot work are left out, each
    with a reason. The others adapt to the pictures under one corruption after the other, and to the clean pictures at
    the end: all of them on a part of the pictures, then the best few on more. Without labels, errors are counted
    against the network's answers on the clean pictures.

    Args:
        net: The network, for images in [0, 1]; it is never changed.
        images: Clean pictures, like those that the network was trained on but not the same: a folder with or without a
            subfolder per class, an ``.npz`` file, uint8 (N, H, W, 3), or floats (N, 3, H, W) in [0, 1]. Some hundred
            are enough.
        labels: Label of each picture of an array; the labels of a folder are its subfolders.
        batch_size: Images per step that the application will have.
        order: How the classes of the stream of the application follow each other: "shuffled", "correlated" (a few at a
            time, as a camera sees them) or "sorted" (one after the other).
        methods: The methods to try, such as ``["tent", "cotta_fast"]``; by default all that can work.
        corruptions: The corruptions, of ``ctta.data.corruptions``; clean pictures follow.
        severity: Their severity, above 0 and up to 5.
        limit: Largest number of pictures, drawn at random; by default 512, or ten batches if that is more.
        budget: Minutes that it should take at most. Slow methods are left out, and fewer pictures are used.
        size: (height, width) to resize image files to.
        use_labels: True requires labels, False ignores them; None uses them if they can be the network's classes.
        check_normalization: Whether to raise if the network clearly expects images in another normalization.
        folder: Where the evaluations are written; called again after an interruption, it goes on from there.
        seed: Seed of the draws.
        on_progress: Called with the seconds of work that are done, and that there are by the estimate.

    Returns:
        The advice: print it, ``advice.build()`` the recommended model, ``advice.save("ctta.toml")``.

    Raises:
        ConfigError: The network expects images in another normalization, or an argument is not valid.
        DataError: The pictures cannot be read, or their labels cannot be the network's classes.
        InputError: An array has another shape, or its values are not in [0, 1].
    """
    check_choice("order", order, STREAM_ORDERS)
    check_integer("batch_size", batch_size, 1)
    check_positive("budget", budget)
    for name in corruptions:
        check_corruption(name, severity)
    for name in methods or ():
        resolve_method(name)
    limit = max(NUM_PICTURES, NUM_BATCHES * batch_size) if limit is None else check_integer("limit", limit, 1)
    clean = gather_images(images, labels, size=size, limit=limit, seed=seed)
    pictures = label_pictures(net, clean, use_labels=use_labels, seed=seed)
    found = check_input(net, pictures)
    if found.expected is not None and check_normalization:
        raise ConfigError(
            f"{found.describe()}. To go on with the network as it is, give --any-input (check_normalization=False)"
        )
    # Rounded, so that what is tried is exactly what a user pastes.
    threshold = round(calibrate_threshold(net, iter_batches(net, pictures.images, batch_size)), 3)
    candidates, left_out = list_candidates(
        net, batch_size=batch_size, order=order, methods=methods, threshold=threshold
    )
    steps = (*((name, float(severity)) for name in corruptions), (CLEAN, 0.0))
    settings = RaceSettings(steps, batch_size, order, 60 * budget, seed)
    corrupted = CorruptedPictures(pictures)
    with open_folder(folder, "ctta-advise-") as path:
        race = run_race(net, corrupted, candidates, settings, path, on_progress=on_progress)
    race.left_out = left_out | race.left_out
    estimator, chosen = None, race.choose().candidate
    if chosen != SOURCE:
        few = pictures.select(slice(CALIBRATION_IMAGES))
        estimator = fit_estimator(collect_signals(net, few, chosen, list_steps(), batch_size, on_progress))
    height, width = pictures.images.shape[1:3]
    inner = net.net if isinstance(net, Normalized) else net
    return Advice(
        NetworkFacts(
            type(inner).__name__,
            sum(parameter.numel() for parameter in net.parameters()),
            pictures.num_classes,
            count_norm_layers(net),
            found,
        ),
        PictureFacts(
            len(pictures.images),
            (height, width),
            pictures.reference,
            pictures.has_labels,
            pictures.clean_error,
            pictures.confidence,
        ),
        settings,
        race,
        net,
        estimator,
    )
