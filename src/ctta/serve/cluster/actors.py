"""The coordinator and the replicas as Ray actors, and handles by which other processes call them."""

import asyncio
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctta.serve.auth import Tokens
from ctta.serve.cluster.coordinator import DEFAULT_LEASE, ClusterCoordinator, Member
from ctta.serve.cluster.messages import HttpRequest, HttpResponse
from ctta.serve.cluster.replica import Replica
from ctta.serve.cluster.state import SharedFiles, SharedState
from ctta.serve.cluster.view import View
from ctta.serve.limits import Limits
from ctta.serve.listing import Listing, StreamQuery
from ctta.serve.service import Service

NAMESPACE = "ctta"


def import_ray() -> Any:
    """Return the module ``ray``, or raise ImportError that names the extra."""
    return import_module("ray")


def import_module(name: str) -> Any:
    """Return a module of Ray, or raise ImportError that names the extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError("a service on Ray needs the extra 'serve-ray': pip install 'ctta[serve-ray]'") from error


@dataclass(frozen=True)
class RayOptions:
    """How a service runs on a cluster; every process of it gets these.

    Attributes:
        make_service: Called in each replica with the shared state; returns the service. It must be picklable, and what
            it needs must be on every machine.
        state: Folder that every machine sees under this path, or a URL for fsspec.
        name: Name of the service on the cluster.
        tokens: Bearer tokens.
        limits: Limits of the front.
        lease: Seconds that a replica may serve without hearing from the coordinator.
        num_cpus: CPUs of each replica, as Ray counts them.
        num_gpus: GPUs of each replica.
        num_fronts: Processes that pass requests on; one is enough for some hundred requests per second.
    """

    make_service: Callable[[SharedState], Service]
    state: str
    name: str = "ctta"
    tokens: Tokens = field(default_factory=Tokens, repr=False)
    limits: Limits = field(default_factory=Limits)
    lease: float = DEFAULT_LEASE
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    num_fronts: int = 1

    def replica(self, number: int) -> str:
        """Return the name of a replica.

        Args:
            number: Its number, from 0.

        Returns:
            Its name on the cluster.
        """
        return f"{self.name}-replica-{number}"

    @property
    def coordinator(self) -> str:
        """Name of the coordinator."""
        return f"{self.name}-coordinator"


class RemoteActor:
    """Calls methods of a named actor; ConnectionError if it has died or is being restarted.

    Args:
        name: Name of the actor.
    """

    def __init__(self, name: str) -> None:
        self._ray, self._name, self._actor = import_ray(), name, None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method, and wait for what it returns.

        Args:
            method: Its name.
            *arguments: Its arguments.

        Returns:
            What it returns.
        """
        try:
            self._actor = self._actor or self._ray.get_actor(self._name, namespace=NAMESPACE)
        except ValueError as error:  # there is none of this name
            raise ConnectionError(f"{self._name} does not answer: {error}") from error
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except self._ray.exceptions.RayActorError as error:
            self._actor = None  # another one may be started under its name
            raise ConnectionError(f"{self._name} does not answer: {error}") from error


class RemoteReplica(RemoteActor):
    """A replica that runs in another process."""

    async def handle(self, stream: str | None, request: HttpRequest) -> HttpResponse | None:
        """Answer a request; None if its stream is not there."""
        response: HttpResponse | None = await self.call("handle", stream, request)
        return response

    async def list_streams(self, query: StreamQuery) -> Listing:
        """List the streams of the replica."""
        listing: Listing = await self.call("list_streams", query)
        return listing

    async def summaries(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the summaries of streams."""
        found: list[dict[str, Any]] = await self.call("summaries", names)
        return found

    async def prepare(self, view: View, incarnation: str) -> None:
        """Save and release the streams that leave the replica."""
        await self.call("prepare", view, incarnation)

    async def notify(self) -> None:
        """Ask for the view, which has changed."""
        await self.call("notify")

    async def is_process_gone(self, pid: int) -> bool:
        """Return whether there is no such process on the machine of the replica."""
        return bool(await self.call("is_process_gone", pid))


class RemoteCoordinator(RemoteActor):
    """The coordinator that runs in another process."""

    async def join(self, member: Member) -> None:
        """Ask to become a member."""
        await self.call("join", member)

    async def renew(self, name: str, incarnation: str) -> View | None:
        """Extend the lease of a replica."""
        view: View | None = await self.call("renew", name, incarnation)
        return view

    async def get_view(self) -> View:
        """Return the current view."""
        view: View = await self.call("get_view")
        return view

    async def suspect(self, name: str, incarnation: str) -> None:
        """Report a replica that does not answer."""
        await self.call("suspect", name, incarnation)


class CoordinatorActor:
    """A :class:`~ctta.serve.cluster.coordinator.ClusterCoordinator` as a Ray actor.

    Args:
        options: Of the service.
    """

    def __init__(self, options: RayOptions) -> None:
        self._coordinator = ClusterCoordinator(SharedFiles(options.state), Connections(), lease=options.lease)
        self._task: asyncio.Task[None] | None = None
        self._options = options

    async def start(self) -> None:
        """Begin to watch the leases."""
        self._task = self._task or asyncio.create_task(self._coordinator.run())

    async def join(self, member: Member) -> None:
        """Take up a replica that asks to become a member."""
        await self.start()
        await self._coordinator.join(member)

    async def renew(self, name: str, incarnation: str) -> View | None:
        """Extend the lease of a replica."""
        await self.start()  # also after a restart: all replicas call this
        return self._coordinator.renew(name, incarnation)

    async def get_view(self) -> View:
        """Return the current view."""
        return self._coordinator.view

    async def suspect(self, name: str, incarnation: str) -> None:
        """Take up a report that a replica does not answer."""
        await self._coordinator.suspect(name, incarnation)

    async def set_leaving(self, names: Sequence[str], leaving: bool) -> None:
        """Take all streams from replicas, or allow them to have some again."""
        for name in names:
            (self._coordinator.leave if leaving else self._coordinator.stay)(name)

    async def get_options(self) -> RayOptions:
        """Return the options of the service, for whoever changes the number of its replicas."""
        return self._options


class ReplicaActor:
    """A :class:`~ctta.serve.cluster.replica.Replica` as a Ray actor, which starts to work at once.

    Args:
        name: Name of the replica.
        options: Of the service.
    """

    def __init__(self, name: str, options: RayOptions) -> None:
        self._replica = Replica(
            name,
            options.make_service,
            options.state,
            RemoteCoordinator(options.coordinator),
            lease=options.lease,
            tokens=options.tokens,
            node=import_ray().get_runtime_context().get_node_id(),
        )
        self._task = asyncio.get_event_loop().create_task(self._replica.run())

    async def get_pid(self) -> int:
        """Return the process id, once the replica has been built."""
        return os.getpid()

    async def handle(self, stream: str | None, request: HttpRequest) -> HttpResponse | None:
        """Answer a request; None if its stream is not here."""
        return await self._replica.handle(stream, request)

    async def list_streams(self, query: StreamQuery) -> Listing:
        """List the streams of the replica."""
        return await self._replica.list_streams(query)

    async def summaries(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the summaries of streams."""
        return await self._replica.summaries(names)

    async def prepare(self, view: View, incarnation: str) -> None:
        """Save and release the streams that leave the replica."""
        await self._replica.prepare(view, incarnation)

    async def notify(self) -> None:
        """Ask for the view, which has changed."""
        await self._replica.notify()

    async def is_process_gone(self, pid: int) -> bool:
        """Return whether there is no such process on this machine."""
        return await self._replica.is_process_gone(pid)


class Connections:
    """Returns one handle for each name."""

    def __init__(self) -> None:
        self._handles: dict[str, RemoteReplica] = {}

    def __call__(self, name: str) -> RemoteReplica:
        """Return the handle of a replica."""
        return self._handles.setdefault(name, RemoteReplica(name))
