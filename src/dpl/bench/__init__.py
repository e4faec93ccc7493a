"""Benchmarks: experiments as records, run, stored and tabulated."""
