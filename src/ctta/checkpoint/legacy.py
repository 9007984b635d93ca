"""Names that have changed since files of version 0.1 were written: old name to new name."""

#: Keyword arguments and dataclass fields.
RENAMED_SETTINGS: dict[str, str] = {}
#: Classes stored by name.
RENAMED_CLASSES: dict[str, str] = {}
#: Prefixes of tensor names (submodules and buffers).
RENAMED_TENSORS: dict[str, str] = {}
