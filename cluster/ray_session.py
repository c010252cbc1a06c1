"""The Ray that a cluster runs on: joined, or started here and then ended here."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import ray

from cluster.config import ClusterConfig
from pdcore.errors import PdserveError
from pdcore.types import Role

_OBJECT_STORE_BYTES = 128 << 20  # nothing large goes through it


def ray_address(config: ClusterConfig) -> str:
    """Where Ray is: as configured, else that of the job that this process belongs to, else one of our own."""
    return config.ray.address or ("auto" if os.environ.get("RAY_ADDRESS") else "local")


@dataclass(frozen=True, slots=True)
class RaySession:
    """A connection to Ray.

    Attributes:
        owned: we started this Ray and end it.
        one_node: every worker will run on this machine.
        node_address: this machine's address, for the other nodes.
        resources: what all nodes together offer, by name.
    """

    owned: bool
    one_node: bool
    node_address: str
    resources: dict[str, float]

    @classmethod
    def open(cls, config: ClusterConfig, *, log_to_driver: bool) -> RaySession:
        """Join or start Ray; takes seconds. `log_to_driver`: print what the workers log.

        Raises:
            PdserveError: there is no Ray at the address, or it cannot be started.
        """
        address = ray_address(config)
        owned = address == "local"
        if owned:
            # A Ray for this process alone: nobody to tell about it, and nobody else to let in.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")
            # By default Ray lets everything else on the machine go before its workers. These are why it is here.
            os.environ.setdefault("RAY_worker_niceness", "0")
        try:
            if owned:
                ray.init(
                    address="local",
                    namespace=config.name,
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    resources={role.value: config.pool(role).workers for role in Role if config.pool(role).workers},
                    logging_level=logging.ERROR,
                    log_to_driver=log_to_driver,
                )
            else:
                ray.init(
                    address=address,
                    namespace=config.name,
                    logging_level=logging.ERROR,
                    log_to_driver=log_to_driver,
                )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            hint = (
                "is a Ray cluster running there? `ray start --head` starts one" if not owned else "see the log above"
            )
            raise PdserveError(f"no Ray at {address!r}: {error} ({hint})") from error
        nodes = [node for node in ray.nodes() if node["Alive"]]
        return cls(
            owned=owned,
            one_node=len(nodes) == 1,
            node_address=ray.util.get_node_ip_address(),
            resources=ray.cluster_resources(),
        )

    def close(self) -> None:
        """Leave Ray; ends it, and every process of it, if we started it."""
        ray.shutdown()
