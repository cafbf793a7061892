"""Packaging. `patches/` and `kernels/` live beside the package in the tree and install inside it."""

from setuptools import find_packages, setup

NESTED = {"sglang_nightjar.patches": "patches", "sglang_nightjar.kernels": "kernels"}

setup(
    name="sglang-nightjar",
    version="0.1.0",
    description="Adaptive speculative decoding and elastic memory as a layer on SGLang",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["sglang_nightjar", "sglang_nightjar.*"]) + list(NESTED),
    package_dir=NESTED,
    package_data={"sglang_nightjar.simulate": ["scenarios/*.json"]},
    # torch, numba, numpy, msgspec, zmq and the rest come with, and at the versions of, this SGLang.
    install_requires=["sglang==0.5.23"],
    extras_require={
        "dev": ["hypothesis", "mypy", "pytest", "pytest-timeout", "pytest-xdist", "ruff"],
        "plot": ["matplotlib"],
    },
    entry_points={
        # Both do nothing in a process that was not started for Nightjar.
        "sglang.srt.plugins": ["nightjar = sglang_nightjar.plugin:load"],
        "sglang.srt.platforms": ["nightjar = sglang_nightjar.plugin:platform"],
    },
)
