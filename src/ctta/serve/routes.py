"""Routes for streams (an image in, a label out, and what an operator needs) and for the live page."""

import asyncio
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import APIRouter, Depends, Query, Response
from fastapi import Path as PathParameter
from pydantic import AfterValidator, BaseModel, Field, ValidationError
from torch import Tensor

from ctta.checkpoint.files import save
from ctta.core.model import AdaptiveModel
from ctta.errors import CheckpointError
from ctta.guard.answers import AnswerLog
from ctta.io.images import Resize, decoding_errors, import_pillow, to_unit_floats, to_upright_rgb
from ctta.serve.http import (
    EXAMPLE_STREAM,
    STREAM_ERRORS,
    STREAM_NAME_PATTERN,
    TRIM_THRESHOLD,
    ApiError,
    Authenticator,
    BodyReader,
    IdempotencyKey,
    describe_body,
    error_responses,
    hide_internal_errors,
    is_out_of_memory,
    path_example,
    report_disk_errors,
    return_freed_memory,
    validate_stream_name,
)
from ctta.serve.listing import StreamQuery, list_streams
from ctta.serve.options import Limits
from ctta.serve.service import Service
from ctta.serve.stream import ImageFile, ServedStream

SAFETENSORS = "application/octet-stream"
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
#: Memory that decoding takes at most: Pillow has four bytes per pixel, copies them to rotate and to convert them, and
#: some decoders have eight more. Without resizing there are copies for numpy and as floats.
BYTES_PER_PIXEL = 20
#: A small image file, which a service resizes to the size of its images.
EXAMPLE_PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAG0lEQVR42mNkYGBQYBDARCwMCgIMDFjQ4JQAAIWuBc54"
    "Zaa9AAAAAElFTkSuQmCC"
)
EXAMPLE_FEEDBACK: dict[str, Any] = {
    "labels": {"summary": "Labels of two answers", "value": {"ids": [0, 1], "labels": [0, 1]}}
}
STREAM_NAME_PARAMETER = PathParameter(
    json_schema_extra={"pattern": STREAM_NAME_PATTERN}, openapi_examples=path_example(EXAMPLE_STREAM)
)
PAGE_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
#: Nothing from other servers, nothing inline, in nobody's frame.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MAX_CLASSES = 20  # rows of a table


class Prediction(BaseModel):
    """The most probable class of an image."""

    class_: int = Field(alias="class")
    label: str | None
    confidence: float


class FeedbackRequest(BaseModel):
    """Labels for some of the last answers of a stream, or in place of them whether each answer is right.

    A label is the number of the right class, or its name.
    """

    ids: list[Annotated[int, Field(strict=True, ge=0, lt=2**63)]] = Field(max_length=10_000)
    labels: list[Annotated[int, Field(strict=True, ge=0, lt=2**31)] | Annotated[str, Field(strict=True)]] | None = (
        Field(None, max_length=10_000)
    )
    right: list[Annotated[bool, Field(strict=True)]] | None = Field(None, max_length=10_000)


class FeedbackResponse(BaseModel):
    """What the labels say about the last answers of a stream, with and without adaptation."""

    stream: str
    num_labels: int
    accuracy: float | None
    source_accuracy: float | None
    gain: float | None
    low: float | None
    high: float | None
    evidence: float
    num_open: int
    is_harmful: bool
    unknown: int


class ImageResponse(Prediction):
    """The prediction of a stream, and on request that of the source network."""

    id: int | None
    stream: str
    update: int
    adapted: bool
    reason: str | None
    batch_stats: float
    resized: tuple[int, int] | None
    source: Prediction | None


def binary_response(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Describe a successful answer that is not JSON."""
    return {200: {"content": {media_type: {"schema": {"type": "string", "format": "binary"}}}}}


def stream_routes(service: Service, auth: Authenticator, read_body: BodyReader) -> APIRouter:
    """Return the routes below ``/streams``."""
    router = APIRouter(prefix="/streams", tags=["streams"])
    infer, admin = [Depends(auth.require_infer)], [Depends(auth.require_admin)]
    store, limits = service.store, service.limits
    # None if the size of images is not known.
    image_examples = {"png": {"summary": "A PNG file", "externalValue": EXAMPLE_PNG}} if service.image_size else {}
    Name = Annotated[str, STREAM_NAME_PARAMETER, AfterValidator(validate_stream_name)]
    Body = Annotated[bytearray, Depends(read_body)]

    @router.get("", dependencies=infer, responses=error_responses(400))
    async def show_streams(query: Annotated[StreamQuery, Depends()]) -> dict[str, Any]:
        """List the streams, by default the most recently used first, and totals of all."""
        listing = await list_streams(store.slots.values(), query)
        page = [store.slots[name] for name in listing.page(query) if name in store.slots]
        return listing.describe([slot.summary() for slot in page if slot.last_summary is not None])

    @router.get("/{name}", dependencies=infer, responses=error_responses(400, 404, 503))
    async def show_stream(name: Name) -> dict[str, Any]:
        """Show a stream: its counts, health and history."""
        slot = store.slot(name)
        if slot.last_summary is None:
            if slot.is_stored:
                raise ApiError(503, f"the stream {name!r} cannot be read now: see the log", retry_after=30)
            raise ApiError(404, f"the stream {name!r} is being created")
        return slot.summary()

    @router.post(
        "/{name}/image",
        dependencies=infer,
        response_model=ImageResponse,
        responses=error_responses(400, *STREAM_ERRORS),
        openapi_extra=describe_body("image/png", "image/jpeg", "application/octet-stream", examples=image_examples),
    )
    async def classify_image(
        name: Name, body: Body, adapt: bool = True, compare: bool = False, key: IdempotencyKey = None
    ) -> dict[str, Any]:
        """Classify an image file; ``adapt=false`` only predicts, ``compare=true`` also asks the source network."""
        num_pixels = await asyncio.to_thread(read_num_pixels, body, size=service.image_size, limits=limits)
        num_bytes = BYTES_PER_PIXEL * num_pixels
        async with service.request_memory.reserve(num_bytes) as shrink_reservation:
            size = service.image_size or store.image_size(name)
            image = await asyncio.to_thread(decode_image, body, size=size)
            if num_bytes >= TRIM_THRESHOLD:
                await asyncio.to_thread(return_freed_memory)
            if size is not None:  # or another request may set the size of the stream first, and this one decodes again
                shrink_reservation(image.pixels.nbytes)
            # The source first: it may fail.
            source = await asyncio.to_thread(service.predict_source, image.pixels) if compare else None
            result = await service.infer(name, image, adapt=adapt, check=service.classify, key=key)
        return {
            "id": None if result.ids is None else result.ids[0],
            "stream": name,
            **service.classify(result.logits),
            "update": result.num_updates,
            "adapted": result.adapted,
            "reason": result.reason,
            "batch_stats": result.batch_stats,
            "resized": result.resized_to,
            "source": None if source is None else service.classify(source),
        }

    @router.post(
        "/{name}/feedback",
        dependencies=admin,
        response_model=FeedbackResponse,
        responses=error_responses(400, 404, *STREAM_ERRORS),
        openapi_extra=describe_body(
            "application/json",
            schema=FeedbackRequest.model_json_schema(),
            examples=EXAMPLE_FEEDBACK,
        ),
    )
    async def give_feedback(name: Name, body: Body) -> dict[str, Any]:
        """Take labels for some of the last answers, and say by them whether adaptation helps; nothing is trained."""
        try:
            request = FeedbackRequest.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"][:2]))
            raise ApiError(400, f"expected {{'ids': [...], 'labels': [...]}}; {place}: {first['msg']}") from error
        return await service.feedback(name, request.ids, request.labels, right=request.right)

    @router.post("/{name}/{action}", dependencies=admin, responses=error_responses(400, 404, *STREAM_ERRORS))
    async def act(name: Name, action: Literal["reset", "freeze", "unfreeze", "rollback"]) -> dict[str, Any]:
        """Reset, freeze, unfreeze or roll back a stream."""
        await store.run(name, lambda stream: stream.act(action))
        return store.slot(name).summary()

    state_errors = error_responses(400, 404, *STREAM_ERRORS)

    @router.get("/{name}/state", dependencies=admin, responses={**binary_response(SAFETENSORS), **state_errors})
    async def download_state(name: Name) -> Response:
        """Download the file that ``ctta.load`` reads."""
        content = await store.run(name, lambda stream: _dump_state(service, stream))
        headers = {"Content-Disposition": f'attachment; filename="{name}.safetensors"'}
        return Response(content, media_type=SAFETENSORS, headers=headers)

    @router.put(
        "/{name}/state",
        dependencies=admin,
        responses=error_responses(400, *STREAM_ERRORS),
        openapi_extra=describe_body(SAFETENSORS),
    )
    async def upload_state(name: Name, body: Body) -> dict[str, Any]:
        """Continue with a file that ``ctta.save`` wrote, for the same network and settings."""
        model = await asyncio.to_thread(_parse_state, service, body)
        await store.run(name, lambda stream: stream.load(model), create=True)
        return store.slot(name).summary()

    @router.delete("/{name}", dependencies=admin, responses=error_responses(400, 404, *STREAM_ERRORS))
    async def delete_stream(name: Name) -> dict[str, str]:
        """Delete a stream, in memory and on disk."""
        await store.delete(name)
        return {"deleted": name}

    @router.get("/{name}/answers", dependencies=infer, responses=error_responses(400, 404, 409))
    async def show_answers(name: Name, max_classes: Annotated[int, Query(ge=1, le=MAX_CLASSES)] = 5) -> dict[str, Any]:
        """Count the last answers by what the source answers (rows) and what the stream answers (columns)."""
        stream = store.slot(name).stream
        if not service.factory.options.num_answers:
            raise ApiError(409, "the service remembers no answers: start it with --feedback 1000, for example")
        log = None if stream is None else stream.answers
        return count_answers(log, service.class_names, max_classes)

    @router.get(
        "/{name}/image",
        dependencies=infer,
        responses={**binary_response("image/png"), **error_responses(400, 404, 409)},
    )
    async def show_image(name: Name) -> Response:
        """Return the last image of a stream that is in memory, as PNG."""
        stream = store.slot(name).stream
        if not service.factory.options.keep_images:
            raise ApiError(409, "the service keeps no images: start it with --show-images")
        image = None if stream is None else stream.last_image
        if image is None or len(image) not in (1, 3):
            raise ApiError(404, f"there is no image of the stream {name!r} in memory: its next image is one")
        content = await asyncio.to_thread(encode_image, image)
        return Response(content, media_type="image/png", headers={"Cache-Control": "no-store"})

    return router


def read_num_pixels(body: bytes | bytearray, *, size: tuple[int, int] | None, limits: Limits) -> int:
    """Return the number of pixels of an image file from its header, before anything is decompressed.

    Args:
        body: The file.
        size: (height, width) that it is going to be resized to; None to keep its size.
        limits: Of the number of pixels, and of each side unless the image is resized.
    """
    with _reject_unreadable_images(), import_pillow().open(io.BytesIO(body), formats=IMAGE_FORMATS) as file:
        width, height = file.size
    if width * height > limits.max_image_pixels:
        allowed = f"{limits.max_image_pixels} are allowed"
        raise ApiError(413, f"the image has {width}x{height} pixels, and {allowed}: shrink it")
    if size is None and max(width, height) > limits.max_side:
        raise ApiError(413, f"got a side of {max(width, height)} pixels, and {limits.max_side} are allowed")
    return int(width * height)


def decode_image(body: bytes | bytearray, *, size: tuple[int, int] | None) -> ImageFile:
    """Decode an image file, and resize it to a (height, width) unless that is None; ApiError if it is no image."""
    with _reject_unreadable_images(), import_pillow().open(io.BytesIO(body), formats=IMAGE_FORMATS) as file:
        image = to_upright_rgb(file, "the image")
    width, height = image.size
    pixels = to_unit_floats(np.array(Resize(size)(image) if size else image)[None])
    return ImageFile(pixels, (height, width), lambda size: decode_image(body, size=size).pixels)


@contextmanager
def _reject_unreadable_images() -> Iterator[None]:
    try:
        yield
    except decoding_errors() as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "BytesIO" in reason:  # how Pillow names a file without a name
            reason = "send the file itself and not a form, as curl --data-binary @image.png does"
        raise ApiError(400, f"the body is not a readable image ({', '.join(IMAGE_FORMATS)}): {reason}") from error


def _dump_state(service: Service, stream: ServedStream) -> bytes:
    task = f"a download of stream {stream.name}"
    with report_disk_errors(task, service.metrics.count_failure), tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "state.safetensors")
        save(stream.model, path)
        return path.read_bytes()


def _parse_state(service: Service, body: bytearray) -> AdaptiveModel:
    on_failure = service.metrics.count_failure
    with (
        hide_internal_errors("an upload", on_failure),
        report_disk_errors("an upload", on_failure),
        tempfile.TemporaryDirectory() as directory,
    ):
        path = Path(directory, "upload")
        path.write_bytes(body)
        try:
            return service.factory.load_upload(path)
        except CheckpointError as error:
            if is_out_of_memory(error):
                raise
            raise ApiError(400, str(error).replace(f"{directory}{os.sep}", "the ")) from error


def page_routes(auth: Authenticator) -> APIRouter:
    """Return the routes of the live page; it holds no secret, as its data comes from routes that need a token."""
    router = APIRouter(include_in_schema=False, dependencies=[Depends(auth.allow_anyone)])
    headers = {
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    def add(path: str, content: bytes, media_type: str) -> None:
        @router.get(path)
        async def send() -> Response:
            return Response(content, media_type=media_type, headers=headers)

    for path, (name, media_type) in PAGE_FILES.items():
        add(path, (files("ctta.serve") / name).read_bytes(), media_type)
    return router


def count_answers(log: AnswerLog | None, class_names: list[str] | None, max_classes: int) -> dict[str, Any]:
    """Return a table of the remembered answers: rows are the source's classes, columns the stream's.

    The ``max_classes`` most frequent classes have a row each, and the others share one more.

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
    row_of_class = torch.full((int(numbers.max()) + 1 if len(numbers) else 0,), len(shown))  # the last, for the others
    row_of_class[shown] = torch.arange(len(shown))
    rows, columns = row_of_class[source], row_of_class[adapted]
    counts = torch.bincount(rows * num_rows + columns, minlength=num_rows**2).view(num_rows, num_rows)
    return {
        "total": len(adapted),
        "agreement": float((adapted == source).double().mean()) if len(adapted) else None,
        "classes": [
            {"class": number, "label": class_names[number] if class_names else None} for number in shown.tolist()
        ],
        "counts": counts.tolist(),
    }


def encode_image(image: Tensor) -> bytes:
    """Return an image (1 or 3, height, width) of bytes as PNG."""
    pixels = image.permute(1, 2, 0).cpu().contiguous().numpy()
    file = io.BytesIO()
    import_pillow().fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return file.getvalue()
