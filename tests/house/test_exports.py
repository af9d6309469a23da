"""The public names are a promise: adding or dropping one is done here, on purpose."""

import subprocess
import sys

import pytest

import autopar

# fmt: off
PUBLIC_NAMES = [
    "Cluster", "MeshShape", "OwnRows", "ParallelStep", "Plan", "RuleBook", "compare",
    "distributed", "errors", "explain", "inspect", "lint", "load", "parallelize",
    "partition_spec", "plan", "save", "shardings", "verify", "why_not", "write_report",
]
# fmt: on


@pytest.mark.smoke
def test_public_names_are_these() -> None:
    assert sorted(autopar.__all__) == sorted(PUBLIC_NAMES)


@pytest.mark.smoke
@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_name_exists(name: str) -> None:
    assert getattr(autopar, name) is not None


@pytest.mark.smoke
def test_they_are_what_dir_lists_and_nothing_else_is_there() -> None:
    assert dir(autopar) == sorted(PUBLIC_NAMES)
    with pytest.raises(AttributeError, match="module 'autopar' has no attribute 'paralelize'"):
        getattr(autopar, "paralelize")  # noqa: B009


def test_importing_it_does_not_import_jax() -> None:
    code = "import sys, autopar; print('jax' in sys.modules, autopar.plan and 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
