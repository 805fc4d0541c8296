"""Benchmarks: small scripts, each answering one question with ratios measured in one run."""
