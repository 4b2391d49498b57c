"""Without a GPU the Triton kernels run in triton's interpreter: to be chosen before the import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
