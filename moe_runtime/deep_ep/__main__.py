"""`python -m moe_runtime.deep_ep`: how to use this package in place of DeepEP."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from moe_runtime.deep_ep.alias import write_alias

HOW = """moe_runtime.deep_ep has the interface of deep_ep.Buffer and deep_ep.ElasticBuffer. Use it

  in code:       from moe_runtime.deep_ep import Buffer, ElasticBuffer

  in a process:  from moe_runtime.deep_ep import install_alias
                 install_alias()       # before anything imports deep_ep

  in programs that you do not change:
                 python -m moe_runtime.deep_ep --write-alias FOLDER
                 PYTHONPATH=FOLDER python program.py"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print how, or write the package `deep_ep`. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.deep_ep", description=__doc__)
    parser.add_argument("--write-alias", metavar="FOLDER", help="write a package deep_ep there, for PYTHONPATH")
    parser.add_argument("--checkout", metavar="FOLDER", help="of DeepEP, whose tests/elastic are to run that way")
    arguments = parser.parse_args(argv)
    if arguments.write_alias is None:
        if arguments.checkout is not None:
            parser.error("--checkout: expected together with --write-alias")
        print(HOW)
        return 0
    try:
        print(write_alias(arguments.write_alias, arguments.checkout))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
