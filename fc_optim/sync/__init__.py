"""Proved weight syncs: what an engine must offer, and what is sent."""

from fc_optim.sync.sync import Engine as Engine
from fc_optim.sync.sync import SparseEngine as SparseEngine
from fc_optim.sync.sync import Sync as Sync
from fc_optim.sync.sync import WatchingEngine as WatchingEngine
