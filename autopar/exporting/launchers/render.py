"""The file with which an engine starts a script on the hosts of a cluster, one process on each.

Every value that goes into a file is quoted as its language quotes: by Jinja itself, so that none
can be forgotten.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined

from autopar.cluster import Cluster
from autopar.cluster.catalog import ENTRIES, entry_named
from autopar.cluster.torus import Torus
from autopar.errors import InputError

_PORT = 8476
# Kubernetes makes host names of it, with up to 22 characters behind.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


@dataclass(frozen=True)
class Launch:
    """A script with its arguments, and the cluster on whose hosts it runs.

    `places` are hosts as mpirun's --host has them, and `image` is the container of Kubernetes;
    both may be "".
    """

    name: str
    cluster: Cluster
    command: tuple[str, ...]
    places: str = ""
    image: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError(
                f"name {self.name[:60]!a} cannot be a job's: write up to 40 small letters, digits "
                "and dashes, beginning with a letter"
            )

    @property
    def devices(self) -> int:
        """Devices of a host, as JAX counts them."""
        return math.ceil(self.cluster.device_count / self.cluster.hosts)

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that JAX reads: virtual devices are as many as the plan's hosts have."""
        if self.cluster.chip.platform != "cpu":
            return {}
        return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(self.devices)}


@dataclass(frozen=True)
class Engine:
    """A launcher: its template, how values are quoted there, and the command that takes a file."""

    name: str
    suffix: str
    quote: Callable[[object], str]
    submit: tuple[str, ...]


def _word(value: object) -> str:
    return shlex.quote(str(value))


_ENGINES = {
    engine.name: engine
    for engine in (
        Engine("slurm", ".sbatch", _word, ("sbatch",)),
        Engine("mpi", ".sh", _word, ("bash",)),
        Engine("kubernetes", ".yaml", json.dumps, ("kubectl", "apply", "-f")),
        Engine("ray", ".py", ascii, ("ray", "job", "submit", "--working-dir", ".", "--", "python")),
    )
}


def engine_named(name: str) -> Engine:
    """The engine of a name."""
    return _ENGINES[name]


def render(engine: Engine, launch: Launch) -> str:
    """The file that an engine takes; raises InputError where it cannot start such a job."""
    platform = launch.cluster.chip.platform
    facts: dict[str, object] = {
        "name": launch.name,
        "hosts": launch.cluster.hosts,
        "devices": launch.devices,
        "platform": platform,
        "environment": launch.environment,
        "command": launch.command,
        "places": launch.places,
        "bundle": {"CPU": 1, **_asked(launch, "TPU", "GPU")},
        "port": _PORT,
    }
    if engine.name == "kubernetes":
        if not launch.image:
            raise InputError("Kubernetes runs containers: name the one that has your script")
        limits = _asked(launch, "google.com/tpu", "nvidia.com/gpu")
        facts |= {"image": launch.image, "limits": limits, "selector": _gke_nodes(launch)}
        # The name that a JobSet gives its first pod, by which the others find it.
        address = f"{launch.name}-hosts-0-0.{launch.name}:{_PORT}"
        # It would put variables into $(NAME).
        words = (word.replace("$(", "$$(") for word in launch.command)
        facts["args"] = [address, str(launch.cluster.hosts), *words]
    made = Environment(
        finalize=engine.quote,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the files are no HTML: each value is quoted by `finalize`
        loader=FunctionLoader(_template),
    )
    return made.get_template(f"{engine.name}.j2").render(**facts)


def _template(name: str) -> str:
    return (files("autopar.exporting.launchers") / name).read_text(encoding="utf-8")


def _asked(launch: Launch, tpu: str, gpu: str) -> dict[str, int]:
    """The devices of a host, by the name that an engine has for them; of a TPU its chips."""
    cluster = launch.cluster
    if isinstance(cluster.topology, Torus):
        return {tpu: launch.devices // cluster.topology.devices_per_chip}
    return {gpu: launch.devices} if cluster.chip.platform == "gpu" else {}


def _gke_nodes(launch: Launch) -> dict[str, str]:
    """The labels of GKE's nodes that are a TPU slice."""
    topology = launch.cluster.topology
    if not isinstance(topology, Torus):
        return {}
    entry = entry_named(launch.cluster.chip.name)
    if topology.slices > 1 or entry is None or not entry.gke:
        known = ", ".join(e.chip.name for e in ENTRIES if e.gke)
        raise InputError(
            f"{launch.cluster.name}: on Kubernetes one slice of {known} is started; "
            "several slices are xpk's to start"
        )
    return {
        "cloud.google.com/gke-tpu-accelerator": entry.gke,
        "cloud.google.com/gke-tpu-topology": "x".join(map(str, topology.shape)),
    }
