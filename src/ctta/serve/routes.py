"""Routes for streams (an image in, a label out, and what an operator needs) and for the live page."""

import asyncio
import io
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Response
from fastapi import Path as PathParameter
from pydantic import AfterValidator, ValidationError

from ctta.checkpoint.files import save
from ctta.core.model import AdaptiveModel
from ctta.errors import CheckpointError
from ctta.io.images import Resize, decoding_errors, import_pillow, to_unit_floats, to_upright_rgb
from ctta.serve.auth import Authenticator
from ctta.serve.errors import ApiError, hide_internal_errors, is_out_of_memory, report_disk_errors
from ctta.serve.examples import FEEDBACK, STREAM, image_examples, path_example
from ctta.serve.limits import LARGE, BodyReader, Limits, return_freed_memory
from ctta.serve.listing import StreamQuery, list_streams, read_query
from ctta.serve.schemas import (
    STREAM_ERRORS,
    STREAM_NAME_PATTERN,
    FeedbackRequest,
    FeedbackResponse,
    ImageResponse,
    binary_response,
    describe_body,
    error_responses,
    validate_stream_name,
)
from ctta.serve.service import Service
from ctta.serve.stream import ImageFile, ServedStream

SAFETENSORS = "application/octet-stream"
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
#: Memory that decoding takes at most: Pillow has four bytes per pixel, copies them to rotate and to convert them, and
#: some decoders have eight more. Without resizing there are copies for numpy and as floats.
BYTES_PER_PIXEL = 20
STREAM_NAME_PARAMETER = PathParameter(
    json_schema_extra={"pattern": STREAM_NAME_PATTERN}, openapi_examples=path_example(STREAM)
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


def stream_routes(service: Service, auth: Authenticator, read_body: BodyReader) -> APIRouter:
    """Return the routes below ``/streams``."""
    router = APIRouter(prefix="/streams", tags=["streams"])
    infer, admin = [Depends(auth.require_infer)], [Depends(auth.require_admin)]
    store, limits = service.store, service.limits
    Name = Annotated[str, STREAM_NAME_PARAMETER, AfterValidator(validate_stream_name)]
    Body = Annotated[bytearray, Depends(read_body)]

    @router.get("", dependencies=infer, responses=error_responses(400))
    async def show_streams(query: Annotated[StreamQuery, Depends(read_query)]) -> dict[str, Any]:
        """List the streams, by default the most recently used first, and totals of all."""
        listing = await list_streams(store.slots.values(), query)
        page = [store.slots[name] for name in listing.page(query) if name in store.slots]
        return listing.describe([slot.summary() for slot in page if slot.last_summary is not None])

    @router.get("/{name}", dependencies=infer, responses=error_responses(400, 404))
    async def show_stream(name: Name) -> dict[str, Any]:
        """Show a stream: its counts, health and history."""
        slot = store.slot(name)
        if slot.last_summary is None:
            raise ApiError(404, f"the stream {name!r} is being created")
        return slot.summary()

    @router.post(
        "/{name}/image",
        dependencies=infer,
        response_model=ImageResponse,
        responses=error_responses(400, *STREAM_ERRORS),
        openapi_extra=describe_body(
            "image/png", "image/jpeg", "application/octet-stream", examples=image_examples(service)
        ),
    )
    async def classify_image(name: Name, body: Body, adapt: bool = True, compare: bool = False) -> dict[str, Any]:
        """Classify an image file; ``adapt=false`` only predicts, ``compare=true`` also asks the source network."""
        num_pixels = await asyncio.to_thread(read_num_pixels, body, size=service.image_size, limits=limits)
        num_bytes = BYTES_PER_PIXEL * num_pixels
        async with service.request_memory.reserve(num_bytes) as reservation:
            size = service.image_size or store.image_size(name)
            image = await asyncio.to_thread(_decode_and_trim, body, size, num_bytes)
            if size is not None:  # or another request may set the size of the stream first, and this one decodes again
                reservation.shrink(image.pixels.nbytes)
            # The source first: it may fail.
            source = await asyncio.to_thread(service.predict_source, image.pixels) if compare else None
            result = await service.infer_file(name, image, adapt=adapt)
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
            "application/json", schema=FeedbackRequest.model_json_schema(), examples={"application/json": FEEDBACK}
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
        return await service.feedback(name, request.ids, request.labels)

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

    return router


def read_num_pixels(body: bytes | bytearray, *, size: tuple[int, int] | None, limits: Limits) -> int:
    """Return the number of pixels of an image file from its header, before anything is decompressed.

    Args:
        body: The file.
        size: (height, width) that it is going to be resized to; None to keep its size.
        limits: Of the number of pixels, and of each side unless the image is resized.

    Returns:
        Width times height.

    Raises:
        ApiError: If the body is not an image or too large.
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
    """Decode an image file.

    Args:
        body: The file.
        size: (height, width) to resize to; None to keep its size.

    Returns:
        The image as a batch of one.

    Raises:
        ApiError: If the body is not an image.
    """
    with _reject_unreadable_images(), import_pillow().open(io.BytesIO(body), formats=IMAGE_FORMATS) as file:
        image = to_upright_rgb(file, "the image")
    width, height = image.size
    pixels = to_unit_floats(np.array(Resize(size)(image) if size else image)[None])
    return ImageFile(pixels, (height, width), lambda size: decode_image(body, size=size).pixels)


def _decode_and_trim(body: bytearray, size: tuple[int, int] | None, num_bytes: int) -> ImageFile:
    image = decode_image(body, size=size)
    if num_bytes >= LARGE:
        return_freed_memory()
    return image


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
    for path, (name, media_type) in PAGE_FILES.items():
        router.add_api_route(path, _send_file(name, media_type), methods=["GET"])
    return router


def _send_file(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    content = (files("ctta.serve") / name).read_bytes()
    headers = {
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def send() -> Response:
        return Response(content, media_type=media_type, headers=headers)

    return send
