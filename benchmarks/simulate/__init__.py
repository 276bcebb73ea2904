"""A discrete-event simulation of one engine, its daemon and its store around the real planner and wait policies."""
