"""Fuzzers of everything that others write: cases are made from valid ones, found ones stay in the corpus."""
