"""python -m benchmarks: relax_core against verl, TRL and plain torch versions, as ratios measured side by side."""

import argparse

import torch

from benchmarks import cases, peers, scaling
from benchmarks.table import show

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--samples", type=int, default=1024, help="samples, in groups of 8")
parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest response")
parser.add_argument("--words", type=int, default=151_936, help="size of the vocabulary")
parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
parser.add_argument("--only", default="", help="cases whose name contains this")
parser.add_argument("--scaling", type=int, default=7, help="the scaling table goes to 10^this tokens (8 takes 20 GB)")
arguments = parser.parse_args()

versions = {package: peers.version(package) for package in ("torch", "verl", "trl")}
print(", ".join(f"{package} {version or 'not installed'}" for package, version in versions.items()), end="; ")
print(f"{torch.get_num_threads()} threads")
verl = peers.Verl() if versions["verl"] else None
batch = cases.Batch.draw(arguments.samples, arguments.longest)
print(f"{arguments.samples} samples, {batch.tokens.num_tokens} tokens; vocabulary: {arguments.longest} tokens")
work = [
    *cases.advantage_cases(batch, verl),
    *cases.loss_cases(batch, verl),
    *cases.vocabulary_cases(arguments.longest, arguments.words, bool(versions["trl"])),
]
show([case for case in work if arguments.only in case.name], arguments.rounds)
if not arguments.only:
    scaling.show([10**power for power in range(5, arguments.scaling + 1)], min(3, arguments.rounds))
