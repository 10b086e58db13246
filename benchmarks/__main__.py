"""python -m benchmarks: relax_core against plain torch versions, as ratios measured side by side."""

import argparse

from benchmarks.core import table

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--samples", type=int, default=1024, help="samples, in groups of 8")
parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest response")
parser.add_argument("--words", type=int, default=151_936, help="size of the vocabulary")
parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
table(**vars(parser.parse_args()))
