"""What the page shows of a single stream: its last image, and its last answers beside those of the source."""

import asyncio
import io
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Depends, Query, Response
from pydantic import AfterValidator
from torch import Tensor

from ctta.guard import AnswerLog
from ctta.io.images import import_pillow
from ctta.serve.auth import Authenticator
from ctta.serve.errors import ApiError
from ctta.serve.routes import STREAM_NAME_PARAMETER
from ctta.serve.schemas import binary_response, error_responses, validate_stream_name
from ctta.serve.service import Service

PNG = "image/png"
MAX_CLASSES = 20  # rows of a table


def detail_routes(service: Service, auth: Authenticator) -> APIRouter:
    """Return the routes below ``/streams`` that the page asks for single streams."""
    router = APIRouter(prefix="/streams", tags=["streams"], dependencies=[Depends(auth.require_infer)])
    Name = Annotated[str, STREAM_NAME_PARAMETER, AfterValidator(validate_stream_name)]
    store = service.store

    @router.get("/{name}/answers", responses=error_responses(400, 404, 409))
    async def show_answers(name: Name, max_classes: Annotated[int, Query(ge=1, le=MAX_CLASSES)] = 5) -> dict[str, Any]:
        """Count the last answers by what the source answers (rows) and what the stream answers (columns)."""
        stream = store.slot(name).stream
        if not service.factory.num_answers:
            raise ApiError(409, "the service remembers no answers: start it with --feedback 1000, say")
        log = None if stream is None else stream.answers
        return count_answers(log, service.class_names, max_classes)

    @router.get("/{name}/picture", responses={**binary_response(PNG), **error_responses(400, 404, 409)})
    async def show_picture(name: Name) -> Response:
        """Return the last image of a stream that is in memory, as PNG."""
        stream = store.slot(name).stream
        if not service.factory.keep_pictures:
            raise ApiError(409, "the service keeps no pictures: start it with --pictures")
        picture = None if stream is None else stream.picture
        if picture is None or len(picture) not in (1, 3):
            raise ApiError(404, f"there is no picture of the stream {name!r} in memory: its next image is one")
        content = await asyncio.to_thread(encode_picture, picture)
        return Response(content, media_type=PNG, headers={"Cache-Control": "no-store"})

    return router


def count_answers(log: AnswerLog | None, class_names: list[str] | None, max_classes: int) -> dict[str, Any]:
    """Return a table of the remembered answers: rows are the source's classes, columns the stream's.

    Args:
        log: The answers; None for none.
        class_names: Names of the classes.
        max_classes: Number of classes with a row; the rest share one more, without a class.

    Returns:
        Number of answers, fraction in which both agree, the classes of the rows, and the counts.

    >>> log = AnswerLog(10)
    >>> log.add_(torch.tensor([7, 7, 2]), torch.tensor([7, 2, 2]))
    range(0, 3)
    >>> count_answers(log, None, 5)["counts"]
    [[1, 1], [0, 1]]
    """
    if log is None:
        adapted = source = torch.empty(0, dtype=torch.long)
    else:
        adapted, source = log.classes.cpu(), log.source_classes.cpu()
        is_known = (adapted >= 0) & (source >= 0)
        adapted, source = adapted[is_known], source[is_known]
    numbers, frequency = torch.cat([adapted, source]).unique(return_counts=True)
    shown = numbers[frequency.argsort(descending=True, stable=True)[:max_classes]].sort().values
    num_rows = len(shown) + (len(numbers) > len(shown))
    # The classes without a row have the number of the last one.
    rows, columns = (_find(shown, values) for values in (source, adapted))
    counts = torch.bincount(rows * num_rows + columns, minlength=num_rows**2).view(num_rows, num_rows)
    return {
        "total": len(adapted),
        "agreement": float((adapted == source).double().mean()) if len(adapted) else None,
        "classes": [
            {"class": number, "label": class_names[number] if class_names else None} for number in shown.tolist()
        ],
        "counts": counts.tolist(),
    }


def _find(shown: Tensor, values: Tensor) -> Tensor:
    """Return the place of each value among sorted ones, or their number if it is not there."""
    if not len(shown):
        return values
    places = torch.searchsorted(shown, values).clamp(max=len(shown) - 1)
    return torch.where(shown[places] == values, places, len(shown))


def encode_picture(picture: Tensor) -> bytes:
    """Return an image (1 or 3, height, width) of bytes as PNG.

    Args:
        picture: The image.

    Returns:
        The file.
    """
    pixels = picture.permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    import_pillow().fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return file.getvalue()
