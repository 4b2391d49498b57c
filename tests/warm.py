"""Run to fill numba's cache, and imported where ranks are forked from: they have the kernels."""

import caches
import torch

torch.set_num_threads(1)
with caches.alone(caches.NUMBA):
    caches.run_kernels()
