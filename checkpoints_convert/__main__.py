"""``python -m checkpoints_convert SRC OUT``: the same as ``herald convert SRC OUT``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from checkpoints_convert.convert import convert
from herald_jax.checkpoint import DTYPES
from herald_jax.diffusion.rules import RULES, rule_named


def main(argv: Sequence[str] | None = None) -> int:
    """Converts; returns the exit code: 0 done, 2 refused (one message on stderr), 130 stopped."""
    parser = argparse.ArgumentParser(prog="checkpoints_convert", description=__doc__)
    parser.add_argument("src", metavar="SRC", help="folder with config.json and safetensors files")
    parser.add_argument("out", metavar="OUT", help="checkpoint directory to create")
    parser.add_argument("--dtype", default="bfloat16", help=" or ".join(DTYPES))
    parser.add_argument("--block-size", type=int, help="decode by blocks of this size instead")
    parser.add_argument("--rule", metavar="NAME", help=f"decode by one of {', '.join(RULES)}")
    parser.add_argument("--force", action="store_true", help="replace a checkpoint at OUT")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(argv)
    try:
        if options.rule is not None:
            rule_named(options.rule)
        report = convert(
            options.src,
            options.out,
            dtype=options.dtype,
            block_size=options.block_size,
            rule=options.rule,
            force=options.force,
            progress=_show,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: nothing was written to {options.out}", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(report.as_json()))
    else:
        for note in report.notes:
            print(f"note: {note}")
        print(
            f"{report.out}: {report.config.family}, {report.parameters / 1e6:.1f} M parameters, "
            f"{report.nbytes / 1e6:.1f} MB {report.dtype}, {report.seconds:.1f} s"
        )
    return 0


def _show(done: int, total: int, item: str) -> None:
    print(f"[{done}/{total}] {item}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
