"""`autopar launch`: what each engine is given, read as that engine reads it."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import yaml

import autopar
from tests.cli.running import run

ODD = ("--note", 'it\'s $HOME; `id` $(id) "x": y\n- z', "ü")


def a_plan(folder: Path, cluster: str) -> Path:
    """A plan for a cluster, of next to nothing."""
    shape = jax.ShapeDtypeStruct((cluster_of(cluster).device_count, 8), jnp.float32)
    plan = autopar.plan(lambda x: x * 2, shape, cluster=cluster, method="dp")
    path = folder / "plan.json"
    plan.save(path)
    return path


def cluster_of(name: str) -> autopar.Cluster:
    return autopar.Cluster.parse(name)


def launched(folder: Path, cluster: str, on: str, *options: str) -> str:
    """What is written for a script with odd arguments."""
    plan = a_plan(folder, cluster)
    done = run("launch", "--on", on, *options, plan, "a folder/train.py", "--", *ODD)
    assert done.code == 0, done.err
    return done.out


def last_command(script: str) -> list[str]:
    """The words that bash would run at the end, once it is told to print them."""
    at = script.index("exec ")
    text = f"{script[:at]}printf '%s\\0' {script[at + 5 :]}"
    done = subprocess.run(["bash"], input=text, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_slurm_starts_one_task_a_host_with_all_of_its_devices(tmp_path: Path) -> None:
    script = launched(tmp_path, "4x8xh100", "slurm", "--name", "gpt-1", "--python", "/opt/p y")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    asked = [line[8:] for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert asked == [
        "--job-name=gpt-1", "--nodes=4", "--ntasks-per-node=1", "--exclusive",
        "--gpus-per-node=8",
    ]  # fmt: skip
    words = last_command(script)
    assert words[:3] == ["srun", "--kill-on-bad-exit=1", "--label"]
    assert words[3:] == ["/opt/p y", "a folder/train.py", *ODD]


@pytest.mark.parametrize(
    ("options", "where"),
    [((), ["--map-by", "ppr:1:node"]), (("--hosts", "a:1,b:1"), ["--host", "a:1,b:1"])],
)
def test_mpirun_starts_as_many_as_there_are_hosts(
    tmp_path: Path, options: tuple[str, ...], where: list[str]
) -> None:
    script = launched(tmp_path, "2x4xcpu", "mpi", *options)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    words = last_command(script)
    assert words[:3] == ["mpirun", "-np", "2"]
    assert words[words.index(where[0]) + 1] == where[1]
    assert "-x JAX_PLATFORMS=cpu -x JAX_NUM_CPU_DEVICES=4" in " ".join(words)
    assert words[words.index("python") :] == ["python", "a folder/train.py", *ODD]


def job_set(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A JobSet's job and its pod, with what the CRD requires of each."""
    found = yaml.safe_load(text)
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert set(found["spec"]) <= {"replicatedJobs", "network", "failurePolicy"}
    (replicated,) = found["spec"]["replicatedJobs"]
    assert set(replicated) == {"name", "replicas", "template"}
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] in ("Never", "OnFailure")
    (container,) = pod["containers"]
    assert {"name", "image"} <= set(container)
    assert all(isinstance(w, str) for w in (*container["command"], *container["args"]))
    assert all(isinstance(e["value"], str) for e in container.get("env", []))
    return job, pod


def test_kubernetes_starts_a_pod_a_host_which_know_their_number(tmp_path: Path) -> None:
    job, pod = job_set(launched(tmp_path, "2x8xh100", "kubernetes", "--image", "me/train:1 #x"))
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    (container,) = pod["containers"]
    assert container["image"] == "me/train:1 #x"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    words = [word.replace("$(", "$$(") for word in ODD]
    assert container["args"] == ["train-hosts-0-0.train:8476", "2", "a folder/train.py", *words]
    assert container["command"][:2] == ["python", "-c"]
    compile(container["command"][2], "command", "exec")


def test_a_tpu_slice_is_asked_for_by_its_chips_and_shape(tmp_path: Path) -> None:
    job, pod = job_set(launched(tmp_path, "v5p:2x2x4", "kubernetes", "--image", "i"))
    assert job["completions"] == 4
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "2x2x4",
    }
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}


def test_ray_starts_an_actor_a_host(tmp_path: Path) -> None:
    tree = ast.parse(launched(tmp_path, "2x8xh100", "ray"))
    held = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert held == {
        "HOSTS": 2,
        "BUNDLE": {"CPU": 1, "GPU": 8},
        "ENVIRONMENT": {},
        "COMMAND": ("a folder/train.py", *ODD),
    }


@pytest.mark.parametrize(
    ("cluster", "words", "told"),
    [
        ("2xv5e:4x4", ("kubernetes", "--image", "i"), "several slices are xpk's"),
        ("2x2xcpu", ("kubernetes",), "name the one that has your script"),
        ("2x2xcpu", ("slurm", "--name", "a\n#SBATCH --uid=0"), "cannot be a job's"),
    ],
)
def test_what_cannot_be_started_is_told(
    tmp_path: Path, cluster: str, words: tuple[str, ...], told: str
) -> None:
    done = run("launch", "--on", *words, a_plan(tmp_path, cluster), "train.py")
    assert done.code == 2
    assert told in " ".join(done.err.split())


def test_a_client_that_is_missing_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    path = tmp_path / "job.sbatch"
    done = run(
        "launch", "--on", "slurm", a_plan(tmp_path, "2x2xcpu"), "t.py", "--submit", "-o", path
    )
    assert done.code == 2
    assert "sbatch is not installed here" in " ".join(done.err.split())
    assert path.read_text().startswith("#!/bin/bash")
