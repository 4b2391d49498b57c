"""The figures: plain definitions here, those of each step, dtypes by group."""

from fc_optim.metrics.formulas import LogRatio as LogRatio
from fc_optim.metrics.formulas import Movement as Movement
from fc_optim.metrics.formulas import MovementTracker as MovementTracker
from fc_optim.metrics.formulas import Weights as Weights
from fc_optim.metrics.formulas import bf16_ulp as bf16_ulp
from fc_optim.metrics.formulas import captured as captured
from fc_optim.metrics.formulas import changed_ratio as changed_ratio
from fc_optim.metrics.formulas import dead_zone_fraction as dead_zone_fraction
from fc_optim.metrics.formulas import effective_sample_size as effective_sample_size
from fc_optim.metrics.formulas import export_rms_ulp as export_rms_ulp
from fc_optim.metrics.formulas import lag_of_projections as lag_of_projections
from fc_optim.metrics.formulas import lag_steps as lag_steps
from fc_optim.metrics.formulas import log_ratio as log_ratio
from fc_optim.metrics.formulas import update_half_ulp as update_half_ulp
