"""The one compiled part: the flag primitive of the slots (everything else is in pyproject.toml)."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "eaas.wire._flags",
            sources=["eaas/wire/_flags.c"],
            extra_compile_args=["-O2", "-std=c11", "-Wall", "-Wextra"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
