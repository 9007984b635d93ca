"""Augmented views of a batch, over which a model's predictions are averaged.

A *view* is a callable ``(model, x) -> logits`` whose logits are aligned with ``x``: it transforms the batch, calls the
model and undoes what moves pixels. A method's ``views`` is a sequence of views, or an object whose ``draw(generator)``
returns the views of one step (:class:`DrawnViews`). A view of your own needs nothing from this package; if it
subclasses :class:`SplitView`, several of them can go through the model at once.
"""

from ctta.views.augmix import AugMixView, AugMixViews, augmix_views
from ctta.views.average import (
    Average,
    DrawnViews,
    Model,
    SplitView,
    View,
    Views,
    ViewsAtOnce,
    ViewWeights,
    average_views,
    check_images,
    check_views,
    choose_views_at_once,
    draw_views,
)
from ctta.views.geometric import GeometricViews, ScaledView, geometric_views, multiscale_flip
from ctta.views.image import ImageView, ImageViews, fast_image_views, image_views

__all__ = [
    "AugMixView",
    "AugMixViews",
    "Average",
    "DrawnViews",
    "GeometricViews",
    "ImageView",
    "ImageViews",
    "Model",
    "ScaledView",
    "SplitView",
    "View",
    "ViewWeights",
    "Views",
    "ViewsAtOnce",
    "augmix_views",
    "average_views",
    "check_images",
    "check_views",
    "choose_views_at_once",
    "draw_views",
    "fast_image_views",
    "geometric_views",
    "image_views",
    "multiscale_flip",
]
