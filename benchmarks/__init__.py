"""Benchmarks: aioload beside other ways of loading the same samples."""
