"""Streams over HTTP: an image in and a label out, and what an operator needs."""

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Response
from fastapi import Path as InPath

from ctta.checkpoint.files import save
from ctta.serve.auth import Door
from ctta.serve.bodies import Bodies
from ctta.serve.errors import Refusal
from ctta.serve.images import read_image
from ctta.serve.names import PATTERN, checked_name
from ctta.serve.schemas import Label, answer_of, body_of, problems
from ctta.serve.service import Service
from ctta.serve.stream import ServedStream

SAFETENSORS = "application/octet-stream"
BUSY = (408, 409, 413, 415, 429, 503, 504)


def stream_routes(service: Service, door: Door, bodies: Bodies) -> APIRouter:
    """``/streams`` and what is below it."""
    router = APIRouter(prefix="/streams", tags=["streams"])
    reader, admin = [Depends(door.infer)], [Depends(door.admin)]
    store = service.store
    Name = Annotated[str, InPath(pattern=PATTERN)]
    Body = Annotated[bytes, Depends(bodies)]

    @router.get("", dependencies=reader, responses=problems(400))
    async def list_streams(
        limit: Annotated[int, Query(ge=1, le=1000)] = 100, offset: Annotated[int, Query(ge=0, le=10**9)] = 0
    ) -> dict[str, Any]:
        """Those used most recently first."""
        known = [(-entry.last_summary["used_at"], name) for name, entry in store.entries.items() if entry.last_summary]
        names = [name for _, name in sorted(known)[offset : offset + limit]]
        return {"total": len(known), "streams": [store.entries[name].summary() for name in names]}

    @router.get("/{name}", dependencies=reader, responses=problems(400, 404))
    async def show_stream(name: Name) -> dict[str, Any]:
        entry = store.entry(checked_name(name))
        if entry.last_summary is None:
            raise Refusal(404, f"the stream {name!r} is only coming into being")
        return entry.summary()

    @router.post(
        "/{name}/image",
        dependencies=reader,
        response_model=Label,
        responses=problems(400, *BUSY),
        openapi_extra=body_of("image/png", "image/jpeg", "application/octet-stream"),
    )
    async def label_image(name: Name, body: Body, adapt: bool = True, compare: bool = False) -> dict[str, Any]:
        """The body is a picture file; ``adapt=false`` only predicts, ``compare=true`` also asks the source."""
        limits = service.limits
        x = await asyncio.to_thread(read_image, body, size=service.size, max_pixels=limits.picture)
        answer = await service.infer(name, x, adapt=adapt)
        source = await asyncio.to_thread(service.source_logits, x) if compare else None
        return {
            "stream": name,
            **service.label(answer.logits),
            "update": answer.num_updates,
            "adapted": answer.adapted,
            "reason": answer.reason,
            "source": None if source is None else service.label(source),
        }

    @router.post("/{name}/{action}", dependencies=admin, responses=problems(400, 404, *BUSY))
    async def act(name: Name, action: Literal["reset", "freeze", "unfreeze", "rollback"]) -> dict[str, Any]:
        await store.run(checked_name(name), lambda stream: stream.act(action))
        return store.entry(name).summary()

    @router.get("/{name}/state", dependencies=admin, responses={**answer_of(SAFETENSORS), **problems(400, 404, *BUSY)})
    async def download_state(name: Name) -> Response:
        """The file that ctta.load reads."""
        content = await store.run(checked_name(name), _state_of)
        headers = {"Content-Disposition": f'attachment; filename="{name}.safetensors"'}
        return Response(content, media_type=SAFETENSORS, headers=headers)

    @router.put("/{name}/state", dependencies=admin, responses=problems(400, *BUSY), openapi_extra=body_of(SAFETENSORS))
    async def upload_state(name: Name, body: Body) -> dict[str, Any]:
        """Go on with a file that ctta.save wrote, for this network and with these settings."""
        model = await asyncio.to_thread(_loaded, service, body)
        await store.run(checked_name(name), lambda stream: stream.replace(model), create=True)
        return store.entry(name).summary()

    @router.delete("/{name}", dependencies=admin, responses=problems(400, 404, *BUSY))
    async def delete_stream(name: Name) -> dict[str, str]:
        await store.delete(checked_name(name))
        return {"deleted": name}

    return router


def _state_of(stream: ServedStream) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.safetensors")
        save(stream.model, path)
        return path.read_bytes()


def _loaded(service: Service, body: bytes) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "the upload")
        path.write_bytes(body)
        try:
            return service.factory.load_upload(path)
        except (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError) as error:  # whatever the bytes do to it
            raise Refusal(400, str(error).replace(f"{folder}/", "")) from error
