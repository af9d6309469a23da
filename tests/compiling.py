"""How XLA compiles the tests' programs: they are tiny, and compiling them takes the most time."""

from importlib.metadata import version

# jaxlib 0.12 has no older emitters, and an unknown flag ends the process.
_HAS_OLDER_EMITTERS = version("jaxlib").startswith("0.10.")
# Nothing here needs optimized code. The older emitters take a third of the newer ones' work on
# large programs, and one LLVM module a program a fifth less than 32.
XLA_FLAGS = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        *(["--xla_cpu_use_fusion_emitters=false"] if _HAS_OLDER_EMITTERS else []),
    ]
)
# The older ones write out of bounds where a scatter's indices are narrow or far outside.
NEWER_EMITTERS: dict[str, bool | int | str] = (
    {"xla_cpu_use_fusion_emitters": True} if _HAS_OLDER_EMITTERS else {}
)
