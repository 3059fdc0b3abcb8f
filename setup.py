"""The compiled parts: slots, dispatch, splits, selection, planning, the kernel, a benchmark's floor."""

import copy
import os

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FLOOR = Extension(
    "benchmarks.dispatch._floor",
    sources=["benchmarks/dispatch/_floor.c"],
    depends=["eaas/wire/spin.h", "expert_server/kernels/direct.h"],
    extra_compile_args=["-O2", "-std=c11", "-Wall", "-Wextra"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
)


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
        if not self.editable_mode:
            self.extensions = [found for found in self.extensions if found is not FLOOR]
        super().run()


setup(
    cmdclass={"build_ext": BuildInClone},
    ext_modules=[
        FLOOR,
        Extension(
            "eaas.wire._flags",
            sources=["eaas/wire/_flags.c"],
            depends=["eaas/wire/bell.h", "eaas/wire/spin.h"],
            extra_compile_args=["-O2", "-std=c11", "-Wall", "-Wextra"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
        ),
        Extension(
            "eaas.minmax._minmax",
            sources=["eaas/minmax/_minmax.c", "eaas/minmax/flow.c"],
            depends=["eaas/minmax/arrays.h", "eaas/minmax/flow.h"],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
        ),
        Extension(
            "attention_client.dispatch._dispatch",
            sources=[
                f"attention_client/dispatch/{name}.c"
                for name in ("_dispatch", "route", "level", "combine")
            ],
            depends=[
                "eaas/minmax/arrays.h",
                "attention_client/dispatch/route.h",
                "attention_client/dispatch/level.h",
            ],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
        ),
        Extension(
            "attention_client.exchange._exchange",
            sources=[
                "attention_client/exchange/exchange.c",
                "attention_client/exchange/lane.c",
                "attention_client/exchange/tensors.c",
                "attention_client/dispatch/route.c",
                "attention_client/dispatch/level.c",
            ],
            depends=[
                "eaas/minmax/arrays.h",
                "eaas/wire/bell.h",
                "eaas/wire/spin.h",
                "attention_client/dispatch/route.h",
                "attention_client/dispatch/level.h",
                "attention_client/exchange/exchange.h",
                "attention_client/exchange/tensors.h",
            ],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
        ),
        Extension(
            "attention_client.engines.transformers.paged._paged",
            sources=[
                *(
                    f"attention_client/engines/transformers/paged/{name}.c"
                    for name in (
                        *("_paged", "attend", "attend_avx2", "attend_avx512"),
                        *("attend_pairs", "attend_tiles"),
                    )
                ),
                "attention_client/exchange/tensors.c",
                "eaas/threads/pool.c",
            ],
            depends=[
                *("eaas/threads/pool.h", "eaas/threads/amx.h"),
                "eaas/minmax/arrays.h",
                *(
                    f"attention_client/engines/transformers/paged/{name}.h"
                    for name in ("attend", "floats", "many", "one", "tile", "amx_tiles")
                ),
                "attention_client/exchange/tensors.h",
            ],
            extra_compile_args=[
                *("-O3", "-std=gnu11", "-pthread", "-fvisibility=hidden"),
                *("-Wall", "-Wextra", "-Wno-psabi"),
            ],
            extra_link_args=["-Wl,-Bsymbolic"],
            libraries=["m", "pthread"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
        ),
        Extension(
            "attention_client.engines.transformers.dense._dense",
            sources=[
                "attention_client/engines/transformers/dense/_dense.c",
                "attention_client/engines/transformers/dense/product.c",
                "attention_client/exchange/tensors.c",
                "eaas/threads/pool.c",
            ],
            depends=[
                "eaas/threads/pool.h",
                "eaas/minmax/arrays.h",
                "attention_client/engines/transformers/dense/product.h",
                "attention_client/exchange/tensors.h",
            ],
            extra_compile_args=[
                *("-O3", "-std=gnu11", "-pthread", "-fvisibility=hidden"),
                *("-Wall", "-Wextra", "-Wno-psabi"),
            ],
            extra_link_args=["-Wl,-Bsymbolic"],
            libraries=["pthread"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
        ),
        Extension(
            "attention_client.scheduler.strategies._select",
            sources=[
                f"attention_client/scheduler/strategies/{name}.c"
                for name in ("_select", "balance", "servers", "difference")
            ],
            depends=[
                "attention_client/scheduler/strategies/rows.h",
                "attention_client/scheduler/strategies/select.h",
                "eaas/minmax/arrays.h",
            ],
            # Without it `decay` is not vectorised. Nothing here looks at floating-point exceptions.
            extra_compile_args=["-O3", "-std=c11", "-fno-trapping-math", "-Wall", "-Wextra"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
        ),
        # A plain library: balancer/policies/compiled.py calls it.
        Extension(
            "balancer.policies._native",
            sources=[
                "eaas/minmax/flow.c",
                *(
                    f"balancer/policies/native/{name}.c"
                    for name in (
                        *("heap", "keys", "replicate", "pack", "place", "refine"),
                        *("layout", "sparse", "spread", "scalpel", "match", "craft", "apart"),
                    )
                ),
                *(
                    f"balancer/policies/fractional/{name}.c"
                    for name in (
                        *("plan", "rows", "layer", "items", "fill", "one_by_one"),
                        *("keep", "chains", "deal", "refill"),
                        *(
                            "improve",
                            "search",
                            "spare",
                            "swap",
                            "together",
                            "together_moves",
                            "together_start",
                            "together_plan",
                            "window",
                        ),
                    )
                ),
                *(f"balancer/policies/spares/{name}.c" for name in ("plan", "refill", "exchange")),
            ],
            depends=[
                "eaas/minmax/flow.h",
                *(
                    f"balancer/policies/native/{name}.h"
                    for name in (
                        "export",
                        "heap",
                        "held",
                        "keys",
                        "planning",
                        "replicate",
                        "sparse",
                    )
                ),
                *(
                    f"balancer/policies/fractional/{name}.h"
                    for name in ("layer", "items", "fill", "refill", "search", "together")
                ),
                "balancer/policies/spares/spares.h",
            ],
            # No fused operations: a plan is the same on every machine. Roots in vectors set no errno.
            extra_compile_args=[
                *("-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"),
                *("-Wall", "-Wextra", "-Wno-psabi"),
            ],
            libraries=["m"],
            py_limited_api=True,
        ),
        Extension(
            "expert_server.kernels._native",
            sources=[
                "eaas/threads/pool.c",
                *(
                    f"expert_server/kernels/native/{name}.c"
                    for name in (
                        "module",
                        "moe",
                        "activation",
                        "split",
                        "convert",
                        "pack",
                        "gemm_amx",
                        "gemm_amx_few",
                        "gemm_avx512",
                        "gemm_avx512_codes",
                        "gemm_int",
                        "gemm_portable",
                    )
                ),
            ],
            depends=[
                *("eaas/threads/pool.h", "eaas/threads/amx.h"),
                "expert_server/kernels/direct.h",
                *(f"expert_server/kernels/native/{name}.h" for name in ("codes", "native")),
                "eaas/wire/spin.h",
                "expert_server/kernels/native/gemm_portable.h",
            ],
            extra_compile_args=[
                *("-O3", "-std=gnu11", "-pthread", "-fvisibility=hidden"),
                *("-Wall", "-Wextra", "-Wno-psabi"),
            ],
            # Its functions call each other, whatever else in the process has their names.
            extra_link_args=["-Wl,-Bsymbolic"],
            libraries=["m", "pthread"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
        ),
        Extension(
            "expert_server.loop._direct",
            sources=[f"expert_server/loop/{name}.c" for name in ("_direct", "answer", "serve")],
            depends=[
                "expert_server/loop/slots.h",
                *(f"eaas/wire/{name}.h" for name in ("bell", "headers", "spin")),
                "expert_server/kernels/direct.h",
            ],
            extra_compile_args=["-O2", "-std=c11", "-fvisibility=hidden", "-Wall", "-Wextra"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
