"""A campaign of faults: victims die or stand still at each step of the protocol, and an outsider judges the rest."""
