"""The public names are a promise: adding or dropping one is done here, on purpose."""

import pytest

import autopar

PUBLIC_NAMES = [
    "Cluster",
    "MeshShape",
    "ParallelStep",
    "Plan",
    "RuleBook",
    "errors",
    "load",
    "parallelize",
    "plan",
    "save",
    "verify",
]


@pytest.mark.smoke
def test_public_names_are_these() -> None:
    assert sorted(autopar.__all__) == sorted(PUBLIC_NAMES)


@pytest.mark.smoke
@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_name_exists(name: str) -> None:
    assert getattr(autopar, name) is not None
