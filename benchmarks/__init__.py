"""One module per measurement: ``python -m benchmarks.NAME [--json OUT] [--plot OUT.png]``."""
