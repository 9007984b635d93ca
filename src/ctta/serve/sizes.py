"""Whose fault a failure inside the network is: the client's, if the size of the images explains it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from ctta.errors import InputError
from ctta.serve.errors import ApiError, is_out_of_memory


class SizeProbe:
    """Find out whether a network failed because it does not take images of a size.

    A network may take images of one size only, and raises whatever it likes for others. Where nobody declared the size,
    a failure is explained by the size if the network as it was trained fails on an image of that size too, and not on
    one of a size that has worked before. Any other failure, and any before the first success, is the network's.

    Args:
        predict: Predicts an image of a (height, width) that holds no information.
    """

    def __init__(self, predict: Callable[[tuple[int, int]], Tensor]) -> None:
        self.working_size: tuple[int, int] | None = None  # (height, width) of the last success
        self._predict = predict

    @contextmanager
    def explain_failures(self, size: tuple[int, int]) -> Iterator[None]:
        """Raise :class:`ApiError` with status 400 if the block fails because of the size of the images.

        Args:
            size: (height, width) of the images in the block.

        Yields:
            Nothing; other errors propagate.
        """
        try:
            yield
        except (ApiError, InputError):
            raise
        except Exception as error:
            if is_out_of_memory(error) or not self._explains_failure(size):
                raise
            message = f"the network takes no images of {list(size)} pixels: send images of another size"
            raise ApiError(400, f"{message}, such as {list(self.working_size or ())}") from error
        else:
            self.working_size = size

    def _explains_failure(self, size: tuple[int, int]) -> bool:
        works = self.working_size
        return works is not None and works != size and self._is_taken(works) and not self._is_taken(size)

    def _is_taken(self, size: tuple[int, int]) -> bool:
        try:
            self._predict(size)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False
        return True
