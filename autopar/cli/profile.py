"""`autopar profile`: what each layer of a model should take, as a file for `autopar partition`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from autopar import api
from autopar.cli.console import err, gather_warnings, out, print_json, print_warnings
from autopar.cli.loading import load_target, tracing
from autopar.ir.codec import Json, parse_json
from autopar.ir.profile import Profile
from autopar.ir.profile_file import profile_to_json, save_profile
from autopar.ir.text import show_bytes, show_seconds
from autopar.report.style import QUIET
from autopar.report.table import Table

_NO_STATE = (
    "no argument of the step comes back as new state, so no layer has parameters: let it return "
    "its parameters, as `new_state, metrics`"
)


def profile_step(
    target: str, cluster: str, depth: int | None, output: Path | None, as_json: bool
) -> None:
    """Print or save the predicted times and bytes of each layer of a step."""
    if cluster.strip().lower() != "local":
        api.keep_to_cpu()
    chosen = api.Cluster.parse(cluster)
    with err().status("reading the file"):
        loaded = load_target(target)
    with gather_warnings() as messages, tracing(loaded):
        profile = api.profile(
            loaded.step, *loaded.args, cluster=chosen, depth=depth, kwargs=loaded.kwargs
        )
    if output is not None:
        save_profile(profile, output)
    if not any(layer.parameter_bytes for layer in profile.layers):
        messages.append(_NO_STATE)
    print_warnings(messages)
    if as_json:
        print_json(cast("dict[str, Json]", parse_json(profile_to_json(profile))))
        return
    console = out()
    console.print(_table(profile))
    console.print()
    saved = f", saved to {output}" if output is not None else ""
    console.print(
        f"{profile.model}: {profile.source}{saved}",
        style=QUIET, markup=False, soft_wrap=True,
    )  # fmt: skip


def _table(profile: Profile) -> Table:
    rows = [
        (
            layer.name, show_seconds(layer.forward_ms / 1e3), show_seconds(layer.backward_ms / 1e3),
            show_bytes(layer.activation_bytes), show_bytes(layer.parameter_bytes),
        )
        for layer in profile.layers
    ]  # fmt: skip
    total = (
        "all",
        show_seconds(sum(layer.forward_ms for layer in profile.layers) / 1e3),
        show_seconds(sum(layer.backward_ms for layer in profile.layers) / 1e3),
        "",
        show_bytes(sum(layer.parameter_bytes for layer in profile.layers)),
    )
    columns = ("/layer", ">forward", ">backward", ">sends", ">parameters")
    return Table("Layers of one minibatch", columns, rows, total)
