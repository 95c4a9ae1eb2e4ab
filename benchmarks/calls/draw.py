"""Draws a record of p2p.py: microseconds and GB/s over T, beside the link's floor.

    python -m benchmarks.calls.draw RECORD.json [PICTURE]

Needs matplotlib.
"""

import argparse
import json
import pathlib

from jax_ep._cli.bench import draw


def main(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("json", type=pathlib.Path)
    parser.add_argument("picture", type=pathlib.Path, nargs="?")
    args = parser.parse_args(arguments)
    picture = args.picture or args.json.with_suffix(".svg")
    draw.save(json.loads(args.json.read_text()), picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
