"""Imported by the process that ranks are forked from: they start with compiled kernels."""

import caches
import torch

torch.set_num_threads(1)
with caches.alone(caches.NUMBA):
    caches.run_kernels()
