"""An engine with a GPU's clock: real vLLM over a worker that computes nothing and checks everything."""
