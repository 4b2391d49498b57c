"""One step: the plan of its kernel calls, the state that they need, what others wrote before."""
