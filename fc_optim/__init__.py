"""Optimizers that serve an unbiased bf16 copy of their fp32 masters."""

from fc_optim.checkpoint import without_masters as without_masters
from fc_optim.diagnosis import SyncError as SyncError
from fc_optim.digests import Digest as Digest
from fc_optim.digests import digest as digest
from fc_optim.evaluation import fp32_copy as fp32_copy
from fc_optim.manifests import Entry as Entry
from fc_optim.manifests import Manifest as Manifest
from fc_optim.manifests import manifest as manifest
from fc_optim.muon import muon_param_groups as muon_param_groups
from fc_optim.naming import clean_name as clean_name
from fc_optim.naming import param_id as param_id
from fc_optim.optimizer import FairCastAdam as FairCastAdam
from fc_optim.optimizer import FairCastAdamW as FairCastAdamW
from fc_optim.optimizer import FairCastMuon as FairCastMuon
from fc_optim.optimizer import FairCastOptimizer as FairCastOptimizer
from fc_optim.patches import Patch as Patch
from fc_optim.patches import apply_patch as apply_patch
from fc_optim.rounding import stochastic_round as stochastic_round
from fc_optim.serving import served_params as served_params
from fc_optim.shards import FlatPiece as FlatPiece
from fc_optim.sync import Sync as Sync

__version__ = "0.1.0"
