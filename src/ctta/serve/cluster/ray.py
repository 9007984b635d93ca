"""The service on a Ray cluster: Ray Serve in front, a coordinator, and replicas that Ray restarts."""

import logging
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fastapi import FastAPI

from ctta.errors import ConfigError
from ctta.serve.auth import check_host
from ctta.serve.cluster.actors import (
    NAMESPACE,
    Connections,
    CoordinatorActor,
    RayOptions,
    RemoteCoordinator,
    ReplicaActor,
    import_module,
    import_ray,
)
from ctta.serve.cluster.front import Front, create_front
from ctta.serve.cluster.view import View

CONCURRENCY = 1000  # calls of an actor at once
START_TIMEOUT = 600.0  # seconds; a cluster may have to start machines


class RayService:
    """A service that runs on the cluster that this process is connected to.

    Args:
        options: How it runs; None to find the one of ``name`` that runs already.
        name: Name of the service, if there are no options.

    Raises:
        ConfigError: If no service of that name runs.
    """

    def __init__(self, options: RayOptions | None = None, *, name: str = "ctta") -> None:
        self._ray = import_ray()
        if options is None:
            if not is_running(name):
                raise ConfigError(f"no service {name!r} runs on this cluster: start one with ctta serve --ray")
            coordinator = self._ray.get_actor(f"{name}-coordinator", namespace=NAMESPACE)
            options = self._ray.get(coordinator.get_options.remote())
        self.options = options

    def start(self, num_replicas: int, *, host: str = "127.0.0.1", port: int = 8000) -> None:
        """Start the service, and wait until it answers.

        Args:
            num_replicas: Number of replicas.
            host: Address that Ray Serve listens on, on every machine.
            port: Its port.
        """
        check_host(host, self.options.tokens)
        timeout = self.options.limits.request_timeout
        self._actor(CoordinatorActor, self.options.coordinator, num_cpus=0).remote(self.options)
        self.scale(num_replicas)
        import_module("ray.serve").start(
            proxy_location="EveryNode", http_options={"host": host, "port": port, "request_timeout_s": 2 * timeout}
        )
        import_module("ray.serve").run(
            _make_front(self.options), name=self.options.name, route_prefix="/", blocking=False
        )

    def scale(self, num_replicas: int) -> None:
        """Change the number of replicas while the service runs; streams move, and nothing is lost.

        Args:
            num_replicas: New number; with 0 all streams are saved, and none is served.
        """
        options, existing = self.options, self._replicas()
        wanted = [options.replica(number) for number in range(num_replicas)]
        surplus = sorted(set(existing) - set(wanted))
        self._ray.get(self._coordinator.set_leaving.remote(wanted, False))
        new = {name: self._create_replica(name) for name in wanted if name not in existing}
        for name, actor in new.items():
            try:
                self._ray.get(actor.get_pid.remote(), timeout=START_TIMEOUT)
            except self._ray.exceptions.RayError as error:
                raise ConfigError(f"{name} could not be started: {_last_line(error)}") from error
        self._ray.get(self._coordinator.set_leaving.remote(surplus, True))
        self._wait_until(lambda view: set(view.members) == set(wanted))
        for name in surplus:
            self._ray.kill(existing[name], no_restart=True)

    def stop(self) -> None:
        """Save every stream, and end all processes of the service."""
        with suppress(Exception):
            import_module("ray.serve").delete(self.options.name)
        self.scale(0)
        self._ray.kill(self._coordinator, no_restart=True)

    @property
    def view(self) -> View:
        """The current view."""
        view: View = self._ray.get(self._coordinator.get_view.remote())
        return view

    @property
    def num_replicas(self) -> int:
        """Number of replicas, also of those that are being started."""
        return len(self._replicas())

    @property
    def _coordinator(self) -> Any:
        return self._ray.get_actor(self.options.coordinator, namespace=NAMESPACE)

    def _replicas(self) -> dict[str, Any]:
        """Return the actor of each replica."""
        prefix = f"{self.options.name}-replica-"
        return {
            each["name"]: self._ray.get_actor(each["name"], namespace=NAMESPACE)
            for each in self._ray.util.list_named_actors(all_namespaces=True)
            if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)
        }

    def _create_replica(self, name: str) -> Any:
        options = self.options
        actor = self._actor(ReplicaActor, name, num_cpus=options.num_cpus, num_gpus=options.num_gpus)
        return actor.remote(name, options)

    def _actor(self, cls: type, name: str, **resources: float) -> Any:
        return self._ray.remote(cls).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,  # a request must not be counted twice
            max_concurrency=CONCURRENCY,
            scheduling_strategy="SPREAD",
            **resources,
        )

    def _wait_until(self, condition: Callable[[View], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not condition(self.view):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the replicas did not change within {START_TIMEOUT:g} s: see the logs of Ray")
            time.sleep(0.1)


def is_running(name: str) -> bool:
    """Return whether a service of a name runs on the cluster that this process is connected to.

    Args:
        name: Name of the service.

    Returns:
        Whether there is one.
    """
    try:
        import_ray().get_actor(f"{name}-coordinator", namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def connect(address: str) -> None:
    """Connect this process to a Ray cluster.

    Args:
        address: Address of a running cluster, ``"auto"`` to find one, ``"local"`` to start one on this machine.

    Raises:
        ConfigError: If there is no such cluster.
    """
    ray = import_ray()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        ray.init(
            address=None if address == "local" else address,
            namespace=NAMESPACE,
            include_dashboard=False if address == "local" else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except ConnectionError as error:
        raise ConfigError(
            f"there is no Ray cluster at {address!r}: start one with 'ray start --head', or give --ray local"
        ) from error


def wait_for_signal(is_over: Callable[[], bool]) -> None:
    """Wait for SIGTERM or Ctrl-C, or until something is over.

    Args:
        is_over: Asked every two seconds.
    """
    stopped = False

    def stop(*_arguments: object) -> None:
        nonlocal stopped
        stopped = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not stopped and not is_over():
            time.sleep(2.0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _make_front(options: RayOptions) -> Any:
    serve = import_module("ray.serve")

    def build() -> FastAPI:
        front = Front(RemoteCoordinator(options.coordinator), Connections(), timeout=options.limits.request_timeout)
        return create_front(front, options.tokens, options.limits)

    deployment = serve.deployment(
        name=f"{options.name}-front",
        num_replicas=options.num_fronts,
        max_ongoing_requests=options.limits.max_connections,
        ray_actor_options={"num_cpus": 0},
    )
    return deployment(serve.ingress(build)()).bind()


def _last_line(error: Exception) -> str:
    return [line.strip() for line in str(error).strip().splitlines() if line.strip()][-1]
