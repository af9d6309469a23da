"""Checks that the compiler of other hardware is installed, before a process is started."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version

from autopar.cluster.chip import Platform
from autopar.errors import VerifyError

_EXTRAS: dict[Platform, str] = {"gpu": "aot-gpu", "tpu": "aot-tpu"}
_CUDA = (("jax-cuda12-plugin", "jax-cuda12-pjrt"), ("jax-cuda13-plugin", "jax-cuda13-pjrt"))


def check_extras(platform: Platform) -> None:
    """Raise VerifyError, with the command to run, where a platform's compiler is not installed.

    Its version must be the one that this JAX was released with; others fail in odd ways.
    """
    if platform == "cpu":
        raise VerifyError("there is no compiler ahead of time for a CPU; its programs run here")
    needed = ["flatbuffers", *(_cuda() if platform == "gpu" else ["libtpu"])]
    if missing := [name for name in needed if _version(name) is None]:
        raise VerifyError(
            f"compiling ahead of time for a {platform.upper()} needs {' and '.join(missing)}, "
            f"which {'is' if len(missing) == 1 else 'are'} not installed: {_remedy(platform)}"
        )
    wanted = _version("jaxlib") if platform == "gpu" else _libtpu_pin()
    for name in needed[1:]:
        found = _version(name) or ""
        if wanted and not _matches(found, wanted):
            raise VerifyError(
                f"{name} is {found} but JAX {_version('jax')} goes with {name} {wanted}: "
                f"{_remedy(platform)}"
            )


def compiler_of(platform: Platform) -> str:
    """A platform's compiler with its version: "libtpu 0.0.42.1"."""
    package = _cuda()[1] if platform == "gpu" else "libtpu"
    return f"{package} {_version(package)}"


def _remedy(platform: Platform) -> str:
    return f'pip install "autopar[{_EXTRAS[platform]}]"'


def _cuda() -> tuple[str, str]:
    """The two packages of a CUDA release: those that are there, else the older release's."""
    return next((pair for pair in _CUDA if all(map(_version, pair))), _CUDA[0])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _libtpu_pin() -> str:
    """The version that JAX's own extra asks for, as "0.0.42.*"; "" where it pins none."""
    pins = (re.match(r"libtpu==([\w.*]+)", line) for line in requires("jax") or ())
    return next((pin.group(1) for pin in pins if pin), "")


def _matches(found: str, wanted: str) -> bool:
    return found == wanted or (
        wanted.endswith(".*") and f"{found}.".startswith(wanted.removesuffix("*"))
    )
