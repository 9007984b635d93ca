"""The Open Inference Protocol over gRPC, in the event loop of the HTTP server; needs the extra ``ctta[grpc]``."""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from ctta.errors import InputError, first_line
from ctta.serve.auth import Authenticator, Tokens
from ctta.serve.errors import ApiError, hide_internal_errors
from ctta.serve.grpc_messages import SERVICE, message_class
from ctta.serve.protocol import MODEL_VERSION, answer, check_model, describe_model, describe_server
from ctta.serve.protocol import run_inline_or_in_thread as run
from ctta.serve.service import Service
from ctta.serve.tensors import BYTES_PER_REQUEST, BYTES_PER_VALUE, INPUT_TYPES, OUTPUT_TYPES, InferRequest, parse_input

logger = logging.getLogger("ctta.serve")

#: Status codes for those of HTTP.
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
#: Fields with the values of an input that are not sent as raw bytes; there is none for FP16.
CONTENTS = {"FP32": "fp32_contents", "FP64": "fp64_contents", "UINT8": "uint_contents"}
#: Bytes of an encoded message beside those of its tensors.
MESSAGE_OVERHEAD = 2**16

Handler = Callable[[Any], Awaitable[Any]]


@asynccontextmanager
async def grpc_server(service: Service, tokens: Tokens, *, host: str, port: int) -> AsyncIterator[int]:
    """Serve gRPC for the duration of a block.

    Args:
        service: What is served.
        tokens: Bearer tokens, which clients send as metadata ``authorization``.
        host: Address to listen on.
        port: Port to listen on; 0 for any that is free.

    Yields:
        The port.

    Raises:
        OSError: If the address cannot be used.
    """
    limits = service.limits
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", limits.max_body_bytes + MESSAGE_OVERHEAD),
            ("grpc.max_send_message_length", -1),
            # No compressed messages: gRPC expands them as a whole before it checks their size.
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.so_reuseport", 0),
        ],
        maximum_concurrent_rpcs=limits.max_connections,
    )
    methods = _Methods(service, tokens)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods.handlers()),))
    try:
        bound = server.add_insecure_port(f"{f'[{host}]' if ':' in host else host}:{port}")
    except RuntimeError as error:
        raise OSError(f"port {port} of {host} cannot be used for gRPC: {first_line(error)}") from error
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace=limits.request_timeout)


class _Methods:
    """The methods of the service, which answer messages."""

    def __init__(self, service: Service, tokens: Tokens) -> None:
        self.service, self.auth = service, Authenticator(tokens)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """Return the handler of each method."""
        public: dict[str, Handler] = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
        }
        private: dict[str, Handler] = {
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelInfer": self.model_infer,
        }
        # As a stream of one message, which is the same on the wire: the message of a unary call is read before its
        # handler, and so its token, is asked.
        return {
            name: grpc.stream_unary_rpc_method_handler(self._wrap(name, method, needs_token=name in private))
            for name, method in (public | private).items()
        }

    def _wrap(self, name: str, method: Handler, *, needs_token: bool) -> Callable[..., Awaitable[bytes]]:
        """Return a handler of encoded messages: the token is checked before anything is read."""
        request_class, route = message_class(f"{name}Request"), f"/{SERVICE}/{name}"
        metrics = self.service.metrics

        async def handle(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
            started, response, error = time.monotonic(), b"", None
            try:
                with hide_internal_errors(name, metrics.count_failure):
                    if needs_token:
                        self.auth.check_infer_token(_get_authorization(context))
                    data = await _read_message(messages)
                    with self.service.read_body.hold(len(data)):
                        response = (await method(_decode(request_class, data))).SerializeToString()
            except (ApiError, InputError) as failure:
                error = failure if isinstance(failure, ApiError) else ApiError(400, first_line(failure))
            metrics.count_request("GRPC", route, error.status if error else 200, time.monotonic() - started)
            if error:
                retry_after = () if error.retry_after is None else (("retry-after", str(error.retry_after)),)
                await context.abort(CODES.get(error.status, grpc.StatusCode.UNKNOWN), error.message, retry_after)
            return response

        return handle

    async def server_live(self, _request: Any) -> Any:
        """Tell that the server runs."""
        return message_class("ServerLiveResponse")(live=True)

    async def server_ready(self, _request: Any) -> Any:
        """Tell whether the service should get requests."""
        return message_class("ServerReadyResponse")(ready=self._is_ready())

    async def model_ready(self, request: Any) -> Any:
        """Tell whether a model should get requests; one that there is not is never ready."""
        is_known = request.name == self.service.name and request.version in ("", MODEL_VERSION)
        return message_class("ModelReadyResponse")(ready=is_known and self._is_ready())

    def _is_ready(self) -> bool:
        try:
            self.service.check_ready()
        except ApiError:
            return False
        return True

    async def server_metadata(self, _request: Any) -> Any:
        """Describe the server."""
        return message_class("ServerMetadataResponse")(**describe_server())

    async def model_metadata(self, request: Any) -> Any:
        """Describe the model."""
        check_model(self.service, request.name, request.version or MODEL_VERSION)
        return message_class("ModelMetadataResponse")(**describe_model(self.service))

    async def model_infer(self, message: Any) -> Any:
        """Predict images of a stream."""
        check_model(self.service, message.model_name, message.model_version or MODEL_VERSION)
        num_bytes = _estimate_memory(message)
        async with self.service.request_memory.reserve(num_bytes) as reservation:
            request = await run(num_bytes, _to_request, message)
            x = await run(num_bytes, parse_input, request)
            reservation.shrink(x.nbytes)
            head, outputs, selection = await answer(self.service, request, x)
        is_raw = all(selection.values())
        return await run(sum(each.nbytes for each in outputs.values()), _to_response, head, outputs, is_raw)


async def _read_message(messages: AsyncIterator[bytes]) -> bytes:
    async for data in messages:
        return data
    raise ApiError(400, "the call has no message")


def _get_authorization(context: grpc.aio.ServicerContext) -> str:
    found = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
    return str(found[0]) if found else ""


def _decode(request_class: Any, data: bytes) -> Any:
    try:
        return request_class.FromString(data)
    except DecodeError as error:
        raise ApiError(400, f"the message is not a {request_class.DESCRIPTOR.name}: {error}") from error


def _estimate_memory(message: Any) -> int:
    """Return the memory that parsing a message takes at most, in addition to the message."""
    raw = sum(map(len, message.raw_input_contents))
    count = sum(len(values) for tensor in message.inputs for _, values in tensor.contents.ListFields())
    return BYTES_PER_REQUEST + raw * np.dtype(np.float32).itemsize + count * BYTES_PER_VALUE


def _to_request(message: Any) -> InferRequest:
    """Return a message as a request of which the only input is raw bytes."""
    raw = message.raw_input_contents
    if len(message.inputs) != 1 or len(raw) > 1:
        raise ApiError(400, f"expected one input, got {len(message.inputs)} with {len(raw)} raw_input_contents")
    (tensor,) = message.inputs
    if raw and tensor.HasField("contents"):
        raise ApiError(400, "the input has both contents and raw_input_contents: send one of them")
    data = raw[0] if raw else _encode_contents(tensor)
    fields = {
        "id": message.id,
        "parameters": {"binary_data_output": True, **_to_parameters(message.parameters)},
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": {"binary_data_size": len(data)},
            }
        ],
        "outputs": [
            {"name": output.name, "parameters": _to_parameters(output.parameters)} for output in message.outputs
        ],
    }
    return InferRequest(fields, memoryview(data))


def _encode_contents(tensor: Any) -> bytes:
    """Return the values of a tensor as the bytes that a client might have sent instead."""
    filled = {field.name: values for field, values in tensor.contents.ListFields()}
    expected = CONTENTS.get(tensor.datatype)
    if expected is None or set(filled) - {expected}:
        raise ApiError(
            400,
            f"{tensor.datatype or 'an input'} comes in {expected or 'raw_input_contents'}, "
            f"got {', '.join(filled) or 'nothing'}",
        )
    values = np.array(filled.get(expected, ()), dtype=np.float64)
    if tensor.datatype == "UINT8" and values.size and values.max() > 255:
        raise ApiError(400, "values of datatype UINT8 must be integers from 0 to 255")
    return values.astype(INPUT_TYPES[tensor.datatype]).tobytes()


def _to_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in parameters.items()}
    return {name: getattr(parameters[name], choice) for name, choice in chosen.items() if choice}


def _to_response(head: dict[str, Any], outputs: dict[str, NDArray[Any]], is_raw: bool) -> Any:
    """Return the answer as a message, whose outputs are raw bytes or numbers."""
    message = message_class("ModelInferResponse")(
        model_name=head["model_name"], model_version=head["model_version"], id=head.get("id", "")
    )
    for name, value in head["parameters"].items():
        kind = {bool: "bool", int: "int64", float: "double", str: "string"}[type(value)]
        setattr(message.parameters[name], f"{kind}_param", value)
    for name, values in outputs.items():
        datatype = OUTPUT_TYPES[values.dtype]
        tensor = message.outputs.add(name=name, datatype=datatype, shape=values.shape)
        if is_raw:
            message.raw_output_contents.append(values.tobytes())
        elif datatype == "FP32":
            tensor.contents.fp32_contents.extend(values.ravel())
        else:
            tensor.contents.int64_contents.extend(values.ravel())
    return message
