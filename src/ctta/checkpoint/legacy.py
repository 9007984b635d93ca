"""Names in files of ctta 0.1 that are called otherwise today."""

#: Hyperparameters and settings: by the name under which their owner is stored (a key of ``METHODS``, ``"guarded"``,
#: ``"image_views"``, ``"scaled_view"``, ``"admission"``, ``"thresholds"``), the old name to the new one.
RENAMED_SETTINGS: dict[str, dict[str, str]] = {}
#: Values of settings: by owner and new setting name, the old value to the new one.
RENAMED_VALUES: dict[str, dict[str, dict[str, str]]] = {}
#: Classes that are stored by name.
RENAMED_CLASSES: dict[str, str] = {}
#: Counters of models.
RENAMED_COUNTERS: dict[str, str] = {}
#: Submodules and buffers, as parts of tensor names between dots.
RENAMED_TENSORS: dict[str, str] = {}
