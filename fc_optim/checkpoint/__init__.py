"""State dicts: what is saved, what a load restores, and the ways from and to plain torch."""

from fc_optim.checkpoint.loading import load_options as load_options
from fc_optim.checkpoint.loading import load_state as load_state
from fc_optim.checkpoint.saved import add_names as add_names
from fc_optim.checkpoint.saved import logger as logger
from fc_optim.checkpoint.saved import plain_epochs as plain_epochs
from fc_optim.checkpoint.saved import to_torch_state_dict as to_torch_state_dict
from fc_optim.checkpoint.saved import without_masters as without_masters
