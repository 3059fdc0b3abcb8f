"""The compiled parts: slots, dispatch, splits, selection, planning, the kernel, a benchmark's floor."""

import copy
import os
import re

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

THREADED = ("-O3", "-std=gnu11", "-pthread", "-fvisibility=hidden", "-Wno-psabi")


def files(folder: str, names: str) -> list[str]:
    """Return the paths of the C files with these names."""
    return [f"{folder}/{name}.c" for name in names.split()]


def headers(paths: list[str]) -> list[str]:
    """Return the headers of this project that files include, directly or through others.

    A change to one of them rebuilds the extension.
    """
    found: set[str] = set()
    ahead = list(paths)
    while ahead:
        path = ahead.pop()
        with open(path, encoding="utf-8") as file:
            names = re.findall(r'^#include "(.+)"', file.read(), re.MULTILINE)
        included = {os.path.normpath(os.path.join(os.path.dirname(path), name)) for name in names}
        ahead += included - found
        found |= included
    return sorted(found)


def extension(name: str, sources: list[str], *options: str) -> Extension:
    """Describe an extension module, of Python's limited API, and its compiler options."""
    is_threaded = "-pthread" in options
    return Extension(
        name,
        sources=sources,
        depends=headers(sources),
        extra_compile_args=[*options, "-Wall", "-Wextra"],
        # Its functions call each other, whatever else in the process has their names.
        extra_link_args=["-Wl,-Bsymbolic"] if is_threaded else [],
        libraries=["m", "pthread"] if is_threaded else ["m"],
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        undef_macros=["NDEBUG"],  # Python's own flags set it; our assertions stay.
        py_limited_api=True,
    )


CLIENT, POOL = "attention_client", "eaas/threads/pool.c"
ENGINE, TENSORS = f"{CLIENT}/engines/transformers", f"{CLIENT}/exchange/tensors.c"
POLICIES = "balancer/policies"
EXTENSIONS = [
    extension("eaas.wire._flags", files("eaas/wire", "_flags"), "-O2", "-std=c11"),
    extension("eaas.wire._protocol", files("eaas/wire", "_protocol"), "-O2", "-std=c11"),
    extension("eaas.minmax._minmax", files("eaas/minmax", "_minmax flow"), "-O3", "-std=c11"),
    extension(
        "attention_client.dispatch._dispatch",
        files(f"{CLIENT}/dispatch", "_dispatch route level combine"),
        *("-O3", "-std=c11"),
    ),
    extension(
        "attention_client.exchange._exchange",
        files(
            CLIENT,
            "exchange/exchange exchange/slots exchange/tensors dispatch/route dispatch/level",
        ),
        *("-O3", "-std=c11"),
    ),
    extension(
        "attention_client.engines.transformers.paged._paged",
        [
            *files(
                f"{ENGINE}/paged",
                "_paged attend attend_avx2 attend_avx512 attend_pairs attend_tiles",
            ),
            *(TENSORS, POOL),
        ],
        *THREADED,
    ),
    extension(
        "attention_client.engines.transformers.dense._dense",
        [*files(f"{ENGINE}/dense", "_dense product product_tiles"), TENSORS, POOL],
        *THREADED,
    ),
    # A plain library: balancer/policies/compiled.py calls it.
    extension(
        "balancer.policies._native",
        [
            "eaas/minmax/flow.c",
            *files(f"{POLICIES}/native", "keys replicate place refine"),
            *files(f"{POLICIES}/native", "sparse spread match craft anti_affinity"),
            *files(f"{POLICIES}/fractional", "plan layer items fill one_by_one keep"),
            *files(f"{POLICIES}/fractional", "improve search spare swap"),
            *files(f"{POLICIES}/fractional", "together together_moves together_start"),
            *files(f"{POLICIES}/fractional", "together_plan"),
            *files(f"{POLICIES}/spares", "plan refill exchange"),
        ],
        # No fused operations: a plan is the same on every machine. Roots in vectors set no errno.
        *("-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"),
        "-Wno-psabi",
    ),
    extension(
        "expert_server.kernels._native",
        [
            POOL,
            *files("expert_server/kernels/native", "module moe activation split convert pack"),
            *files("expert_server/kernels/native", "gemm_amx gemm_amx_few gemm_avx512"),
            *files("expert_server/kernels/native", "gemm_avx512_codes gemm_int gemm_portable"),
        ],
        *THREADED,
    ),
    extension(
        "expert_server.loop._slots",
        files("expert_server/loop", "_slots serve"),
        *("-O2", "-std=c11", "-fvisibility=hidden"),
    ),
]
FLOOR = files("benchmarks/harness", "_floor")
if os.path.exists(*FLOOR):  # not in the image's sources
    options = ("-O2", "-std=c11", "-pthread")
    EXTENSIONS.append(extension("benchmarks.harness._floor", FLOOR, *options))


class BuildInClone(build_ext):
    """Builds on all cores, and the benchmarks' extension in a clone alone: wheels hold no benchmarks."""

    def finalize_options(self) -> None:
        """Compile as many extensions at a time as there are cores."""
        super().finalize_options()
        self.parallel = self.parallel or len(os.sched_getaffinity(0))

    def build_extension(self, ext: Extension) -> None:
        """Build in a directory of its own: extensions compile the same sources with other options."""
        own = copy.copy(self)
        own.build_temp = os.path.join(self.build_temp, ext.name)
        super(BuildInClone, own).build_extension(ext)

    def run(self) -> None:
        """Build."""
        if not (self.editable_mode or self.inplace):
            self.extensions = [each for each in self.extensions if each.sources != FLOOR]
        super().run()


setup(
    cmdclass={"build_ext": BuildInClone},
    ext_modules=EXTENSIONS,
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
