"""The form of what `--json` prints, by command: `python -m docs.reference.json_schemas`.

It writes a JSON Schema of each into `schemas`, beside this file.

A form is a type, `Maybe(form)` for null too, `[form]` a list, `Named(form)` an object by name, or a
dict of fields, of which those that end in "?" may be missing. Tests hold every output against its
form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Union

SCHEMAS = Path(__file__).parent / "schemas"
Form = Union[type, "Maybe", "Named", "Either", list["Form"], dict[str, "Form"]]


@dataclass(frozen=True)
class Maybe:
    """A form, or null."""

    form: Form


@dataclass(frozen=True)
class Named:
    """An object of one form by names that are the user's, such as mesh axes."""

    form: Form


@dataclass(frozen=True)
class Either:
    """A value of one of several types."""

    types: tuple[type, ...]


# -- parts of several ----------------------------------------------------------------------------

_TRAFFIC: Form = {"kind": str, "axes": [str], "count": int, "bytes": int, "seconds": float}
_CHANGES: Form = [{"name": str, "before": str, "after": str}]
_SPEC: Form = {"spec": str, "partial": [str]}
_DIMS: Form = {"dims": [[str]], "partial": [str]}
_SUMS: dict[str, Form] = {"runs": int, "bytes": int, "seconds": float, "hidden_share": float}
_SPOT: Form = {"region": str, "module": str, "line": str, "stage": Maybe(int), "part": str}
_PRICE: dict[str, Form] = {
    "seconds": float, "solver_seconds": float, "compute_seconds": float,
    "communication_seconds": float, "exposed_seconds": float, "peak_bytes": int,
}  # fmt: skip
_SCHEDULE: dict[str, Form] = {
    "schedule": str,
    "makespan_seconds": float,
    "devices": [[{"task": str, "start_seconds": float, "end_seconds": float}]],
}
_STAGE: Form = {
    "modules": str, "layers": int, "submesh": int, "remat": str, "forward_seconds": float,
    "input_gradient_seconds": float, "weight_gradient_seconds": float, "backward_seconds": float,
    "once_seconds": float, "peak_bytes": int,
}  # fmt: skip
_PLAN: dict[str, Form] = {
    "step": str, "cluster": str, "devices": int, "mesh": Named(int), "method": str, "jax": str,
    "layers": int, "stages": int, "microbatches": int, "pins": Named(str),
    "compiler_options": Named(Either((bool, int, str))),
    "outcome": {
        "status": str, "seconds": float, "bound_seconds": float, "gap": float, "sentence": str,
        "recipes": [{"name": str, "seconds": Maybe(float), "note": str}],
    },
    "predicted": {
        "seconds": float, "compute_seconds": float, "communication_seconds": float,
        "exposed_communication_seconds": float, "exposed_communication_share": float,
        "model_flops": int, "mfu_share": float, "item": str, "items_per_second": float,
        "roofline_seconds": Named(float),
    },
    "memory": {
        "argument_bytes": int, "peak_bytes": int, "other_bytes": int, "limit_bytes": int,
        "held": [{"what": str, "bytes": int, "local_bytes": int}],
        "peak": Maybe({
            "op": str, "module": str, "region": str, "line": str, "step_share": float,
            "bytes_by_kind": Named(int),
            "largest": [{
                "name": str, "kind": str, "shape": [int], "dtype": str, "sharding": str,
                "local_bytes": int, "line": str,
            }],
        }),
        "price_seconds_per_gib": float,
    },
    "pipeline": Maybe({
        "schedule": str, "lowering": str, "microbatches": int, "batch": int,
        "bubble_seconds": float,
        "peak_in_flight": [int], "submeshes": [{"mesh": Named(int), "devices": [int]}],
        "stages": [_STAGE], "notes": [str],
    }),
    "collectives": [_TRAFFIC],
    "parameters": [{
        "path": str, "shape": [int], "dtype": str, "role": str, "sharding": str, "bytes": int,
        "local_bytes": int, "submesh": int,
    }],
}  # fmt: skip
_INSPECTION: Form = {
    "meshes": [{"names": [str], "sizes": [int]}],
    "axes": [{"submesh": int, "axis": str, "size": int, "roles": [str], "evidence": [str]}],
    "modules": [{
        "path": str, "depth": int, "count": int, "ops": int, "flops": int, "parameter_bytes": int,
        "seconds": float, "stages": [int],
    }],
    "ops": [{
        "path": [int], "kind": str, "spot": _SPOT, "value": str, "shape": [int], "dtype": str,
        "sharding": _SPEC, "local_shape": [int], "operands": [list], "count": int, "runs": int,
        "flops": int, "seconds": float,
    }],
    "collectives": [{
        "kind": str, "axes": [str], "roles": [str], "submesh": int, "spot": _SPOT, "value": str,
        "shape": [int], "dtype": str, "before": _SPEC, "after": _SPEC, "reader": str, "bytes": int,
        "runs": int, "seconds": float, "exposed_seconds": float, "members": [str],
        "hidden_seconds": float, "hidden_share": float,
    }],
    "spans": [{
        "stream": str, "start_seconds": float, "end_seconds": float, "label": str, "spot": _SPOT,
    }],
    "memory": [{
        "submesh": int, "limit_bytes": int,
        "levels": [{"seconds": float, "label": str, "bytes_by_kind": Named(int)}],
    }],
    "busiest": int,
    "ops_total": {"runs": int, "flops": int, "seconds": float},
    "collectives_total": _SUMS,
    "collectives_by_kind": [{"kind": str, "axes": [str], **_SUMS}],
    "memory_peaks": [{"submesh": int, "level": int, "bytes": int}],
}  # fmt: skip
_CLUSTER: dict[str, Form] = {
    "name": str, "chip": str, "platform": str, "devices": int, "hosts": int, "memory_bytes": int,
    "memory_bytes_per_second": float, "peak_flops": Named(float), "topology": str,
    "link_bytes_per_second": float,
    "source": {"what": str, "url": str, "date": str, "confidence": str},
    "calibration": Maybe({
        "like": str, "jax": str, "device_kind": str, "samples": int,
        "figures": Named({"value": float, "relative_error": float}),
        "residuals": Named({"median": float, "largest": float, "samples": int}),
    }),
}  # fmt: skip
_PLACE: Form = Maybe({
    "shape": [int], "dtype": str, "sharding": str, "local_bytes": int, "submeshes": [int],
})  # fmt: skip
_PARTITION_STAGE: dict[str, Form] = {
    "first": int, "last": int, "replicas": int, "compute_ms": float, "sync_ms": float,
    "transfer_ms": float, "in_flight": int,
}  # fmt: skip
_FOUND: Form = {"loss": float, "parameters": float, "mean_gradient": float}

_VERIFIED: dict[str, Form] = {
    "step": str, "cluster": str, "level": str, "target": Maybe(str), "agrees": bool,
    "numerics": Maybe({
        "agrees": bool, "steps": int, "devices": int, "where": str, "rounding": float,
        "outputs": [{
            "path": str, "error": Maybe(float), "noise": Maybe(float),
            "tolerance": Maybe(float), "agrees": bool,
        }],
        "notes": [str],
    }),
    "parts": [{
        "name": Maybe(str), "alike": [str], "agrees": bool, "fits": bool, "device_bytes": int,
        "figures": [dict], "differences": [str], "compiled": dict,
    }],
    "notes": [str],
}  # fmt: skip

# -- the commands --------------------------------------------------------------------------------

FORMS: Mapping[str, dict[str, Form]] = {
    "plan": {
        **_PLAN,
        "passes": str, "planning_seconds": float, "output": Maybe(str), "warnings": [str],
        "compared?": [{
            "method": str, "mesh": Maybe(str), "seconds": Maybe(float), "more_share": Maybe(float),
            "peak_bytes": Maybe(int), "mfu_share": Maybe(float), "note": str,
        }],
        "fallbacks?": [{
            "hosts": int, "devices": Maybe(int), "mesh": Maybe(str), "microbatches": Maybe(int),
            "seconds": Maybe(float), "more_share": Maybe(float), "peak_bytes": Maybe(int),
            "note": str,
        }],
        "confirmed?": {
            "trials": [{
                "limit_bytes": int, "predicted_bytes": int, "compiled_bytes": int,
                "seconds": float,
            }],
            "verification": _VERIFIED,
        },
        "after?": str, "text?": str,
    },
    "lint": {
        "step": str, "cluster": str, "devices": int,
        "coverage": {"flops": int, "flops_share": float, "bytes": int, "bytes_share": float},
        "microbatches": {
            "rows": int, "tried": int, "exact": bool, "loops": int, "hoisted": int,
            "rescaled": bool, "barrier": bool, "notes": [str],
        },
        "findings": [{
            "severity": str, "topic": str, "text": str, "remedy": str, "line": Maybe(str),
            "count": int, "bytes": int,
        }],
    },
    "show": {**_PLAN, "inspection": _INSPECTION, "schedule": Maybe(_SCHEDULE)},
    "explain": {
        "headline": str, "subject": str, "shape": [int], "dtype": str, "submesh": int,
        "choice": str, "sharding": _DIMS, "local_bytes": int, "reads": [str], "price": _PRICE,
        "alternatives": [{
            "choice": str, "sharding": Maybe(_DIMS), "price": Maybe(_PRICE), "changes": [str],
            "refusal": str,
        }],
        "shared_by": [str], "binds": [str], "others": [str], "is_split": bool,
    },
    "why-not": {
        "verdict": str, "pins": [str], "price": _PRICE, "pinned": Maybe(_PRICE),
        "traffic": [{
            "kind": str, "axes": [str], "count": [int], "nbytes": [int], "seconds": [float],
        }],
        "moved": [{"path": str, "before": str, "after": str}], "refusal": str, "notes": [str],
    },
    "diff": {
        "step": str, "equal": bool, "same_decisions": bool, "same_graph": bool,
        "renamed_axes": [[str]], "asked": _CHANGES, "made_with": _CHANGES, "decisions": _CHANGES,
        "arguments": [{
            "path": str, "count": int, "role": str, "before": _PLACE, "after": _PLACE,
        }],
        "values": _CHANGES, "values_count": int,
        "collectives": [{
            "kind": str, "axes": [str], "count": [int], "bytes": [int], "seconds": [float],
        }],
        "figures": [{
            "name": str, "seconds?": [float], "bytes?": [int], "share": Maybe(float),
        }],
    },
    "clusters": {"clusters": [_CLUSTER]},
    "clusters NAME": {
        **_CLUSTER,
        "meshes": [{
            "mesh": Named(int), "axis": str, "size": int, "crosses": [str],
            "bytes_per_second": float, "latency_seconds": float,
        }],
    },
    "calibrate": _CLUSTER,
    "schedule": {
        "schedule": str, "stages": int, "microbatches": int, "chunks": int, "times": Named(float),
        "latency": float, "makespan": float, "makespan_bubble": float, "span_bubble": float,
        "peak_in_flight": [int],
        "devices": [[{
            "task": str, "kind": str, "stage": int, "microbatch": int, "start": float,
            "end": float,
        }]],
    },
    "schedule --plan": _SCHEDULE,
    "cache": {
        "action": str, "folder": str, "plans": int, "nbytes": int,
        "entries": [{"path": str, "nbytes": int, "plan": str}],
    },
    "profile": {
        "model": str, "source": str, "units": Named(str), "edges": [[str]],
        "layers": [{
            "name": str, "op": str, "forward_ms": float, "backward_ms": float,
            "activation_bytes": int, "parameter_bytes": int,
        }],
    },
    "partition": {
        "model": str, "workers": int, "sync": str, "first_layer": int, "layers": int,
        "bottleneck_ms": float, "one_worker_ms": float,
        "stages": [{**_PARTITION_STAGE, "stages?": [{**_PARTITION_STAGE, "stages?": [dict]}]}],
    },
    "verify": _VERIFIED,
    "demo": {
        "plan": _PLAN,
        "equality": {
            "losses": [float], "plain_losses": [float], "relative_difference": _FOUND,
            "rounding_alone": _FOUND, "limit": _FOUND, "holds": bool,
        },
        "training": {
            "losses": [float], "held_out_nats": float, "held_out_bits": float,
            "unigram_nats": float, "unigram_bits": float, "seconds": float, "holds": bool,
        },
        "seconds": float, "ok": bool,
    },
}  # fmt: skip

# -- as JSON Schema ------------------------------------------------------------------------------

_TYPES: Mapping[object, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object",
}  # fmt: skip
Schema = dict[str, object]


def schema(command: str) -> Schema:
    """The JSON Schema of what a command prints; its first field is the version of the form."""
    form: dict[str, Form] = {"json_version": int, **FORMS[command]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**head, "title": f"autopar {command} --json", **_schema(form)}


def _schema(form: Form) -> Schema:
    if isinstance(form, type):
        return {"type": _TYPES[form]}
    if isinstance(form, Maybe):
        inner = _schema(form.form)
        return {**inner, "type": [inner["type"], "null"]}
    if isinstance(form, Either):
        return {"type": [_TYPES[kind] for kind in form.types]}
    if isinstance(form, Named):
        return {"type": "object", "additionalProperties": _schema(form.form)}
    if isinstance(form, list):
        return {"type": "array", "items": _schema(form[0])}
    return {
        "type": "object",
        "properties": {name.removesuffix("?"): _schema(inner) for name, inner in form.items()},
        "required": [name for name in form if not name.endswith("?")],
        "additionalProperties": False,
    }


def schemas() -> dict[str, str]:
    """The schema of each command, by the name of its file."""
    return {
        f"{command.replace(' --', '-').replace(' ', '-').lower()}.json": (
            json.dumps(schema(command), indent=1) + "\n"
        )
        for command in FORMS
    }


if __name__ == "__main__":
    SCHEMAS.mkdir(exist_ok=True)
    for name, text in schemas().items():
        (SCHEMAS / name).write_text(text, encoding="utf-8")
