#!/usr/bin/env bash
# What can be tried on one accelerator: the tests that need a single device, there, what sharding costs on one rank, and
# Muon's kernels.
#
#   bash benchmarks/gpu.sh               # on this machine's accelerator; fails where PyTorch sees none
#   DEVICE=cpu bash benchmarks/gpu.sh    # the same on the CPU, small: shows that the script itself is right
#
# PYTHON names the interpreter (default python3). What is printed says on what it ran.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
size=()
matrices=(--dtypes bfloat16 float32 float16)
if [ "${DEVICE:-accelerator}" = cpu ]; then
    export CUDA_VISIBLE_DEVICES="" ASCEND_RT_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
    size=(--width 128 --layers 2 --tokens 64 --rounds 3 --times 3)
    matrices=(--counts 8 --rounds 1 --least 0)
else
    "$python" -c 'import sys, torch; sys.exit(None if torch.accelerator.is_available() else "PyTorch sees no accelerator")'
    export HYPER_PARALLEL_TEST_ACCELERATOR=1
fi
"$python" -m pytest -q -k "not mindspore" tests/equivalence/test_primitives.py tests/equivalence/test_training.py tests/torch/test_muon_kernels.py
"$python" benchmarks/unshard.py "${size[@]}"
"$python" benchmarks/muon_kernels.py "${matrices[@]}"
