"""Options of XLA that a plan's programs are compiled with, as its `--xla_...` flags are named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import GraphError
from autopar.ir.codec import ByName, shown

OptionValue = bool | int | str
CompilerOptions = ByName[OptionValue]  # in the order of the names, each once

# XLA's own default by now, and what predictions take for granted: collectives run beside work.
LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
# What lets XLA run a collective of one trip of a loop beside the work of another trip, by kind.
PIPELINED: Mapping[str, str] = {
    "all-gather": "xla_gpu_enable_pipelined_all_gather",
    "all-reduce": "xla_gpu_enable_pipelined_all_reduce",
    "reduce-scatter": "xla_gpu_enable_pipelined_reduce_scatter",
}
# XLA makes one product of several that read the same, if they are small. All else that they read is
# copied for that, and those that are added to sums are written out and added by a kernel each.
MERGED_PRODUCTS = "xla_gpu_dot_merger_threshold_mb"

OPTION_VALUES = (bool, int, str)
_NAME = re.compile(r"xla_[a-z0-9_]+")
_TEXT = re.compile(r"[\w.,:;=+*-]*", re.ASCII)
_MOST_CHARACTERS = 200
_SMALLEST, _BEYOND = -(2**63), 2**63
# A plan is data, and a file may come from anyone: what it has compiled reads and writes no files.
_OF_FILES = frozenset(
    ("asm", "cache", "dir", "directory", "dump", "file", "from", "llvm", "load", "path", "ptx")
)
_PLATFORM = re.compile(r"xla_(cpu|gpu|tpu)_")
_SWITCH = re.compile(r"xla_(?:(?:cpu|gpu|tpu)_)?(?:enable_)?")


def wrong_option(name: object, value: object) -> str:
    """Tell why a plan cannot have such an option; "" where it can."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        return f"{shown(name)} is no option of XLA: their names begin with xla_"
    if type(value) not in OPTION_VALUES:
        return f"{name} is {shown(value)}, and an option is a bool, an int or a text"
    if isinstance(value, int):
        is_known = _SMALLEST <= value < _BEYOND
        return "" if is_known else f"{name} is {shown(value)}, which does not fit 64 bits"
    text = str(value)
    if len(text) > _MOST_CHARACTERS or _TEXT.fullmatch(text) is None:
        return f"{name} is {shown(text)}, and a text is of letters, digits and .,:;=+*- alone"
    if not _OF_FILES.isdisjoint(name.split("_")):
        return f"{name} names a file, which a plan does not: set it in XLA_FLAGS"
    return ""


def merged_options(chosen: CompilerOptions, asked: CompilerOptions) -> CompilerOptions:
    """The chosen options with those that are asked for put over them."""
    return tuple(sorted({**dict(chosen), **dict(asked)}.items()))


def check_options(options: CompilerOptions) -> None:
    """Raise GraphError unless a plan can have these options."""
    names = [name for name, _ in options]
    wrong = next((why for name, value in options if (why := wrong_option(name, value))), "")
    if wrong:
        raise GraphError(f"compiler option {wrong}")
    if names != sorted(set(names)):
        raise GraphError("the compiler options are not in the order of their names, each once")


@dataclass(frozen=True)
class PlatformOptions:
    """The options that the compiler of one platform gets, and those that are for another's."""

    used: CompilerOptions = ()
    left_out: CompilerOptions = ()


def options_on(platform: str, options: CompilerOptions) -> PlatformOptions:
    """Options by whether they are for a platform's compiler: xla_gpu_... are for GPUs alone."""
    used = tuple((n, v) for n, v in options if _platform_of(n) in ("", platform))
    return PlatformOptions(used, tuple(o for o in options if o not in used))


def _platform_of(name: str) -> str:
    """The only platform that an option is for, "" where it is for all."""
    found = _PLATFORM.match(name)
    return found[1] if found is not None else ""


def options_text(options: CompilerOptions) -> str:
    """Options in a few words: `latency_hiding_scheduler, all_reduce_combine_threshold_bytes=1024`.

    What a switch enables is told by its name alone.
    """
    return ", ".join(
        _SWITCH.sub("", name) if value is True else f"{_SWITCH.sub('', name)}={value_text(value)}"
        for name, value in options
    )


def value_text(value: OptionValue) -> str:
    """A value as XLA's flags have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
