"""`python -m fc_optim.audit`, the same as `fc-audit`."""

from fc_optim.audit.main import main

main()
