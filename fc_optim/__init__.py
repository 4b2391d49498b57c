"""Optimizers that serve an unbiased bf16 copy of their fp32 masters."""

from fc_optim import _torch as _torch  # first: it says which torch is needed
from fc_optim.checkpoint import without_masters as without_masters
from fc_optim.optimizer import FairCastAdam as FairCastAdam
from fc_optim.optimizer import FairCastAdamW as FairCastAdamW
from fc_optim.optimizer import FairCastMuon as FairCastMuon
from fc_optim.optimizer import FairCastOptimizer as FairCastOptimizer
from fc_optim.params.layouts import FlatPiece as FlatPiece
from fc_optim.params.names import clean_name as clean_name
from fc_optim.params.names import param_id as param_id
from fc_optim.serving.digests import Digest as Digest
from fc_optim.serving.digests import digest as digest
from fc_optim.serving.evaluation import fp32_copy as fp32_copy
from fc_optim.serving.rounding import stochastic_round as stochastic_round
from fc_optim.serving.stream import served_params as served_params
from fc_optim.sync.diagnosis import SyncError as SyncError
from fc_optim.sync.manifests import Entry as Entry
from fc_optim.sync.manifests import Manifest as Manifest
from fc_optim.sync.manifests import manifest as manifest
from fc_optim.sync.patches import Patch as Patch
from fc_optim.sync.patches import apply_patch as apply_patch
from fc_optim.sync.sync import Sync as Sync
from fc_optim.update.muon import muon_param_groups as muon_param_groups

__version__ = "0.1.0"
