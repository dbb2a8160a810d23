"""How HyperParallel is packaged. Build system and tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

readme = Path(__file__).with_name("README.md")
# 5.24 is what was tried; descriptions are made with what version 5 offers.
hugging_face = ["transformers>=5.24,<6", "torch>=2.6"]
plots = ["matplotlib>=3.8", "tensorboard>=2.16"]

setup(
    name="hyper-parallel",
    version="0.1.0",
    description="One static sharding plan that drives MindSpore and PyTorch",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["hyper_parallel", "hyper_parallel.*"]),
    install_requires=["numpy>=1.26", "pyyaml>=6", "rich>=13", "safetensors>=0.4.3"],
    extras_require={
        # MindSpore is compiled against numpy 1, though its wheel also accepts 2.
        "mindspore": ["mindspore>=2.10", "numpy<2"],
        "torch": ["torch>=2.6"],
        "npu": ["torch_npu>=2.6"],
        "hf": hugging_face,
        "train": plots,
        "test": ["pytest>=8", "hypothesis>=6.100", *plots, *hugging_face],
        "docs": ["mkdocs>=1.6"],
        # Peers of benchmarks/muon.py. TorchTitan takes much that is not needed: pip install --no-deps torchtitan==0.3.0
        "benchmarks": ["muon-fsdp2==0.3.0"],
    },
    entry_points={"console_scripts": ["hyper-parallel = hyper_parallel.cli:main"]},
)
