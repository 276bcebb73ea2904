"""Parts shared by the end-to-end tests, the demo and the benchmarks: real engines, stores, links and daemons."""
