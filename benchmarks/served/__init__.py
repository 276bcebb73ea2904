"""The benchmark over engines that are served and whose device's time is modelled."""
