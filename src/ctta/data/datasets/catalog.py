"""Catalog of the public datasets and checkpoints that can be downloaded."""

from dataclasses import dataclass

from ctta.io.progress import format_bytes


@dataclass(frozen=True)
class Dataset:
    """A public file, its location and what identifies a complete copy of it.

    Attributes:
        url: Address of the file.
        file: Path of the file below the cache folder; a file that a user puts there is used instead of downloading.
        sha256: Checksum that a download must have; where none is known, a download needs ``insecure=True``.
        md5: Checksum as the authors or the host publish it. It detects damage, but not a file made to deceive.
        size: Length in bytes, where known exactly.
        approximate_size: Length in bytes to tell people, where the exact one is not known.
        page: Page of the host or the authors, which has the terms of use.
        license: Name of the license; empty where the page has to be read.
        is_archive: Whether the file is unpacked, so that :func:`ctta.data.datasets.download` returns a folder.
        needs_confirmation: Whether the host may first answer with a page on which the download has to be confirmed.
    """

    url: str
    file: str
    sha256: str | None = None
    md5: str | None = None
    size: int | None = None
    approximate_size: int | None = None
    page: str = ""
    license: str = ""
    is_archive: bool = True
    needs_confirmation: bool = False

    @property
    def size_text(self) -> str:
        """The size for people to read, such as ``"2.9 GB"`` or ``"about 21 GB"``; empty if it is not known."""
        size = self.size or self.approximate_size
        if size is None:
            return ""
        number = format_bytes(size)
        return number if self.size else f"about {number.replace('.0 GB', ' GB')}"

    @property
    def license_text(self) -> str:
        """The license and the page that has the terms, for people to read; the page alone if no license is known."""
        page = (self.page or self.url).removeprefix("https://")
        return f"{self.license}, {page}" if self.license else f"see {page}"

    @property
    def has_checksum(self) -> bool:
        """Whether damage to the file can be detected."""
        return self.sha256 is not None or self.md5 is not None


def _imagenet_c(group: str, md5: str, gigabytes: int) -> Dataset:
    return Dataset(
        f"https://zenodo.org/records/2235448/files/{group}.tar?download=1",
        f"imagenet-c/{group}.tar",
        md5=md5,
        approximate_size=gigabytes * 10**9,
        page="https://zenodo.org/records/2235448",
    )


def _google_drive(identifier: str, file: str, megabytes: int) -> Dataset:
    url = f"https://drive.google.com/uc?export=download&id={identifier}"
    return Dataset(
        url,
        file,
        approximate_size=megabytes * 10**6,
        page="https://github.com/RobustBench/robustbench",
        is_archive=False,
        needs_confirmation=True,
    )


#: All datasets and checkpoints by the name that :func:`download` takes. Zenodo publishes MD5 only; the
#: SHA-256 of CIFAR-10-C, CIFAR-10 and CIFAR-100 are those of TensorFlow Datasets and Keras. The sizes of ImageNet-C are
#: those of its page, rounded; those of the checkpoints are four bytes per weight.
DATASETS: dict[str, Dataset] = {
    "cifar10-c": Dataset(
        "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar?download=1",
        "CIFAR-10-C.tar",
        sha256="c72763e101c723b7c507b96205f7e938912a5d587376173b825850cf3cb876a7",
        md5="56bf5dcef84df0e2308c6dcbcbbd8499",
        size=2_918_471_680,
        page="https://zenodo.org/records/2535967",
        license="CC BY 4.0",
    ),
    "cifar100-c": Dataset(
        "https://zenodo.org/records/3555552/files/CIFAR-100-C.tar?download=1",
        "CIFAR-100-C.tar",
        md5="11f0ed0f1191edbf9fa23466ae6021d3",
        size=2_918_473_216,
        page="https://zenodo.org/records/3555552",
    ),
    "imagenet-c/noise": _imagenet_c("noise", "e80562d7f6c3f8834afb1ecf27252745", 21),
    "imagenet-c/blur": _imagenet_c("blur", "2d8e81fdd8e07fef67b9334fa635e45c", 7),
    "imagenet-c/weather": _imagenet_c("weather", "33ffea4db4d93fe4a428c40a6ce0c25d", 12),
    "imagenet-c/digital": _imagenet_c("digital", "89157860d7b10d5797849337ca2e5c03", 7),
    "imagenet-c/extra": _imagenet_c("extra", "d492dfba5fc162d8ec2c3cd8ee672984", 15),
    "cifar10": Dataset(
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        "cifar-10-python.tar.gz",
        sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        md5="c58f30108f718f92721af3b95e74349a",
        size=170_498_071,
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        license="none stated",
    ),
    "cifar100": Dataset(
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        "cifar-100-python.tar.gz",
        sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        size=169_001_437,
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        license="none stated",
    ),
    # RobustBench's checkpoints of the two source networks; no checksum of them is published.
    "wrn28-10-standard": _google_drive("1t98aEuzeTL8P7Kpd5DIrCoCL21BNZUhC", "wrn28-10-standard.pt", 146),
    "resnext29-augmix": _google_drive("1ocnHbvDdOBLvgNr6K7vEYL08hUdkD1Rv", "resnext29-augmix.pt", 28),
}
