"""One module per measurement: ``python -m benchmarks.NAME [--json OUT] [--plot OUT.png]``."""

import os

# Its tokenizers advise to install PyTorch, which nothing here needs.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
