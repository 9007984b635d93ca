"""Translation of files written by ctta 0.1 (format 1), in which some things have other names."""

from typing import Any

from torch import Tensor

#: Hyperparameters and settings: by the name under which their owner is stored (a key of ``METHODS``, ``"guarded"``,
#: ``"image_views"``, ``"scaled_view"``, ``"admission"``, ``"thresholds"``), the old name to the new one.
RENAMED_SETTINGS: dict[str, dict[str, str]] = {
    "guarded": {"admission": "input_spec", "every": "adapt_every", "rest": "cooldown"},
    "image_views": {"n": "num_views", "colour": "color"},
    "thresholds": {"clumping": "class_sorting"},
}
#: Counters: by stored owner, the old name to the new one.
RENAMED_COUNTERS: dict[str, dict[str, str]] = {
    "guarded": {"num_answers": "num_compared", "num_would_change": "num_differing"},
}
#: Submodules and buffers of a model: by stored owner, the old name to the new one (the first part of tensor names).
RENAMED_TENSORS: dict[str, dict[str, str]] = {"guarded": {"inner": "wrapped", "door": "validator"}}
#: Names under which settings classes are stored; the tables above use the old ones.
RENAMED_CLASSES: dict[str, str] = {"admission": "input_spec", "thresholds": "collapse_thresholds"}


def upgrade(header: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a file of format 1 as today's names have them.

    Damaged headers pass through: what is missing or has a wrong type is reported by whoever reads the result.
    """
    renamed = {_upgrade_tensor_name(name, header): value for name, value in tensors.items()}
    listed = header.get("tensors")
    if isinstance(listed, list):
        listed = sorted(_upgrade_tensor_name(str(name), header) for name in listed)
    return {**_upgrade_description(header), "tensors": listed}, renamed


def _upgrade_description(description: dict[str, Any]) -> dict[str, Any]:
    """Rename what is stored of one model, and of the models inside it."""
    owner = str(description.get("method"))
    found = dict(description)
    if isinstance(settings := found.get("hyperparameters"), dict):
        found["hyperparameters"] = _upgrade_settings(owner, settings)
    if isinstance(missing := found.get("give_on_load"), list):
        renamed = RENAMED_SETTINGS.get(owner, {})
        found["give_on_load"] = [renamed.get(name, name) if isinstance(name, str) else name for name in missing]
    if isinstance(counters := found.get("counters"), dict):
        found["counters"] = {RENAMED_COUNTERS.get(owner, {}).get(name, name): n for name, n in counters.items()}
    if isinstance(inside := found.get("inside"), dict):
        modules = RENAMED_TENSORS.get(owner, {})
        found["inside"] = {
            modules.get(name, name): _upgrade_description(part) if isinstance(part, dict) else part
            for name, part in inside.items()
        }
    return found


def _upgrade_settings(owner: str, settings: dict[str, Any]) -> dict[str, Any]:
    renamed = RENAMED_SETTINGS.get(owner, {})
    return {renamed.get(name, name): _upgrade_value(code) for name, code in settings.items()}


def _upgrade_value(code: Any) -> Any:
    """Rename within an encoded value; see :mod:`ctta.checkpoint.encoding`."""
    if not isinstance(code, dict):
        return code
    found = dict(code)
    if isinstance(items := code.get("sequence"), list):
        found["sequence"] = [_upgrade_value(item) for item in items]
    for tag in ("view", "guard"):
        if isinstance(owner := code.get(tag), str):
            found[tag] = RENAMED_CLASSES.get(owner, owner)
            if isinstance(arguments := code.get("arguments"), dict):
                found["arguments"] = _upgrade_settings(owner, arguments)
    return found


def _upgrade_tensor_name(name: str, description: dict[str, Any]) -> str:
    first, dot, rest = name.partition(".")
    inside = description.get("inside")
    if isinstance(inside, dict) and isinstance(part := inside.get(first), dict):
        rest = _upgrade_tensor_name(rest, part)
    return RENAMED_TENSORS.get(str(description.get("method")), {}).get(first, first) + dot + rest
