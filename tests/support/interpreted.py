"""Kernels under Triton's interpreter: import this before anything that imports triton.

Triton reads TRITON_INTERPRET when it is first imported. On a machine with a GPU the kernels are compiled instead.
"""

from __future__ import annotations

import os
import sys

import torch

COMPILED = torch.cuda.is_available()
DEVICE = "cuda" if COMPILED else "cpu"
BACKEND = "triton" if COMPILED else "interpret"

if not COMPILED and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise RuntimeError(
            "triton was imported before support.interpreted: set TRITON_INTERPRET=1 for the run"
        )
    os.environ["TRITON_INTERPRET"] = "1"
