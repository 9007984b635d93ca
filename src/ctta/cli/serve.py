"""``ctta serve``: put a model that adapts behind HTTP."""

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
import typer

from ctta.base import AdaptiveModel
from ctta.cli.console import out
from ctta.cli.network import load_network
from ctta.guard import Admission, Guarded
from ctta.methods import METHODS


def serve(
    model: Annotated[
        str,
        typer.Option(help="embedded, timm:NAME, hf:NAME, torchvision:NAME or file:PATH.py:function.", metavar="SPEC"),
    ],
    state: Annotated[
        Path | None,
        typer.Option(help="Keep the streams here, and go on with those that are there.", metavar="DIR"),
    ] = None,
    method: Annotated[str, typer.Option(help=f"One of {', '.join((*METHODS, 'cotta_fast'))}.")] = "cotta_fast",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting such as restore=0.005, lr=1e-4 or views=8; repeatable.", metavar="NAME=VALUE"
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="To listen on; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(help="The token for clients, if not in CTTA_SERVE_TOKEN.", metavar="FILE"),
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(help="The token for operators, if not in CTTA_SERVE_ADMIN_TOKEN.", metavar="FILE"),
    ] = None,
    name: Annotated[str, typer.Option(help="Of the model, in the Open Inference Protocol.")] = "ctta",
    size: Annotated[
        tuple[int, int] | None,
        typer.Option(help="Of the network's images; pictures are resized to it.", metavar="HEIGHT WIDTH"),
    ] = None,
    classes: Annotated[
        Path | None, typer.Option(help="A text file with the name of one class per line.", metavar="FILE")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=0, help="Images a stream keeps, so that single ones can be normalised.")
    ] = None,
    update_every: Annotated[int | None, typer.Option(min=1, help="Images between two updates of a stream.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="Share of time for the updates of a stream, such as 0.2; the rest is left out.")
    ] = None,
    live_streams: Annotated[int, typer.Option(min=1, help="Streams in memory; the others wait on disk.")] = 64,
    streams: Annotated[int, typer.Option(min=1, help="Streams in memory and on disk.")] = 10_000,
    memory: Annotated[int, typer.Option(min=1, help="For the streams in memory, in MB.")] = 4096,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait for one stream.")] = 16,
    body: Annotated[int, typer.Option(min=1, help="Largest request, in MB.")] = 16,
    batch: Annotated[int, typer.Option(min=1, help="Most images in a request.")] = 256,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds until a request is given up.")] = 60.0,
    workers: Annotated[int | None, typer.Option(min=1, help="Streams that work at once.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of torch, for each worker.")] = 1,
    snapshot_every: Annotated[float, typer.Option(min=0.01, help="Seconds between two saves of a stream.")] = 30.0,
    guard: Annotated[bool, typer.Option(help="Watch each stream, and roll it back when it collapses.")] = True,
    device: Annotated[str, typer.Option(help="Such as cuda:0.")] = "cpu",
    seed: Annotated[int | None, typer.Option(help="Of a method that draws random numbers.")] = None,
) -> None:
    """Serve a model that adapts: an image in, a label out, for as many cameras as there are.

    Each stream (a camera, a line, a ward) adapts by itself, and none needs to
    be declared: the first image makes it. There is a page at /, an image
    endpoint for curl, and the Open Inference Protocol of Triton and KServe.
    Stopped or killed, the same command goes on with every stream.
    """
    try:
        import ctta.serve as serving
    except ModuleNotFoundError as error:
        raise ImportError(f"serving needs {error.name}, which an extra brings: pip install 'ctta[serve]'") from error
    tokens = serving.read_tokens(token_file, admin_token_file)
    serving.check_address(host, tokens)
    names = None if classes is None else classes.read_text(encoding="utf-8").splitlines()
    limits = serving.Limits(
        live_streams=live_streams,
        streams=streams,
        memory=memory * 2**20,
        queue=queue,
        body=body * 2**20,
        batch=batch,
        seconds=timeout,
    )
    torch.set_num_threads(threads)
    texts = [*(settings or ()), *([f"seed={seed}"] if seed is not None else [])]
    adaptive: AdaptiveModel = serving.method_by_name(load_network(model, device), method, texts)
    size = size or ((32, 32) if model == "embedded" else None)
    if guard:
        adaptive = Guarded(adaptive, admission=Admission(low=0, high=1, any_size=size is None))
    with nullcontext(state) if state else tempfile.TemporaryDirectory(prefix="ctta-serve-") as folder:
        service = serving.Service(
            adaptive,
            folder,
            name=name,
            size=size,
            classes=names,
            window=window,
            update_every=update_every,
            budget=budget,
            limits=limits,
            workers=workers,
            snapshot_every=snapshot_every,
        )

        def tell(address: str) -> None:
            header = ' -H "Authorization: Bearer $CTTA_SERVE_TOKEN"' if tokens else ""
            kept = f"The streams are in {state}." if state else "Nothing is kept after the end; --state DIR keeps it."
            for line in (
                f"Listening on {address}",
                f"  curl{header} --data-binary @picture.png {address}/streams/camera7/image",
                kept,
            ):
                out.print(line, markup=False, soft_wrap=True)

        serving.serve(service, host=host, port=port, tokens=tokens, on_listening=tell)
