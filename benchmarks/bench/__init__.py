"""Sweeps over real engines, stores and links: pieces as data, one runner, one JSON a run."""
